"""The dashboard for Grafana, and the file of it that is shipped.

``python -m tierkv.obs.dashboard`` run at the root of the repository writes the file anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tierkv.obs.panels import ROWS, Panel

DASHBOARD_PATH = Path("tierkv/obs/assets/dashboard.json")

COLUMNS = 24
"""Width of Grafana's grid."""

HEIGHT = 8
"""Of a panel, in the grid's units."""

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in ROWS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.question,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
                "panels": [],
            }
        )
        y += 1
        x = 0
        for panel in row.panels:
            if x + panel.columns > COLUMNS:
                x, y = 0, y + HEIGHT
            place = {"x": x, "y": y, "w": panel.columns, "h": HEIGHT}
            panels.append(_panel(panel, len(panels) + 1, place))
            x += panel.columns
        y += HEIGHT
    return {
        "uid": "tierkv",
        "title": "tierkv",
        "description": "What a tierkv daemon holds, saves and does.",
        "tags": ["tierkv"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [_datasource_variable(), *map(_label_variable, ("job", "instance"))]
        },
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    custom: dict[str, Any] = {}
    options: dict[str, Any] = {}
    if panel.kind == "timeseries":
        custom = {"fillOpacity": 15, "showPoints": "never", "lineWidth": 1}
        if panel.stacked:
            custom["stacking"] = {"mode": "normal"}
        options = {
            "tooltip": {"mode": "multi", "sort": "desc"},
            "legend": {"displayMode": "list", "placement": "bottom"},
        }
    else:
        options = {
            "textMode": "value_and_name",
            "reduceOptions": {"calcs": ["lastNotNull"]},
        }
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": DATASOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for at, query in enumerate(panel.queries)
        ],
    }


def _datasource_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
    }


def _label_variable(label: str) -> dict[str, Any]:
    condition = '{job=~"$job"}' if label == "instance" else ""
    return {
        "name": label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": f"label_values(tierkv_build_info{condition}, {label})",
        "query": {
            "query": f"label_values(tierkv_build_info{condition}, {label})",
            "refId": label,
        },
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    DASHBOARD_PATH.write_text(text(), encoding="utf-8")
