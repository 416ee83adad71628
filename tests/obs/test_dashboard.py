"""The dashboard as a file: valid for Grafana, and about every metric there is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tierkv.obs import alerts, dashboard
from tierkv.obs.declared import Type
from tierkv.obs.panels import ROWS
from tierkv.obs.table import METRICS

ROOT = Path(__file__).parents[2]
EXPRESSIONS = [query.expression for row in ROWS for panel in row.panels for query in panel.queries]
SUFFIXES = ("_bucket", "_sum", "_count")


def named(expressions: list[str]) -> set[str]:
    """tierkv's metrics in PromQL; histograms by their own names."""
    histograms = {metric.name for metric in METRICS if metric.type is Type.HISTOGRAM}
    found = set()
    for name in re.findall(r"tierkv_\w+", " ".join(expressions)):
        stems = {name.removesuffix(suffix) for suffix in SUFFIXES}
        found |= (stems & histograms) or {name}
    return found


def test_every_metric_is_on_the_dashboard_and_no_other() -> None:
    assert named(EXPRESSIONS) == {metric.name for metric in METRICS}


def test_alerts_are_about_metrics_that_exist() -> None:
    expressions = [alert.expression for alert in alerts.ALERTS]
    assert named(expressions) <= {metric.name for metric in METRICS}


def test_the_shipped_file_is_what_the_panels_make() -> None:
    shipped = (ROOT / dashboard.DASHBOARD_PATH).read_text(encoding="utf-8")
    assert shipped == dashboard.text(), "run `python -m tierkv.obs.dashboard`"


def _panels() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = json.loads(dashboard.text())["panels"]
    return panels


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = _panels()
    ids = [panel["id"] for panel in panels]
    assert len(ids) == len(set(ids))
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < dashboard.COLUMNS


def test_panels_say_what_they_show_and_ask_the_datasource_that_was_chosen() -> None:
    variables = {one["name"] for one in dashboard.dashboard()["templating"]["list"]}
    assert variables == {"datasource", "job", "instance"}
    for panel in _panels():
        if panel["type"] == "row":
            assert panel["title"].endswith("?")
            continue
        assert panel["description"].endswith(".")
        assert panel["datasource"]["uid"] == "${datasource}"
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references)) > 0
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"]))
            assert used <= {"job", "instance", "__rate_interval"}
            assert target["legendFormat"]
