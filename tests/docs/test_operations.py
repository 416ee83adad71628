"""The page for operators: what it names is there, and every alert has its section."""

from __future__ import annotations

import re
from pathlib import Path

from tierkv.cli.main import COMMANDS
from tierkv.config.schema import settings
from tierkv.obs.table import METRICS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "OPERATIONS.md").read_text()
ALERTS = (ROOT / "tierkv" / "obs" / "assets" / "alerts.yml").read_text()


def test_every_alert_has_its_section() -> None:
    """And there is none for an alert that is gone."""
    alerts = re.findall(r"- alert: (\w+)", ALERTS)
    sections = re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)
    assert alerts
    assert sorted(sections) == sorted(alerts)
    assert sorted(re.findall(r"docs/OPERATIONS\.md#(\w+)", ALERTS)) == sorted(
        alert.lower() for alert in alerts
    )


def test_every_command_that_is_named_exists() -> None:
    code = re.findall(r"`([^`\n]+)`", PAGE) + re.findall(r"^# (.+)$", PAGE, re.MULTILINE)
    named = {found for text in code for found in re.findall(r"\btierkv ([a-z]+)", text)}
    assert named - set(COMMANDS) == set()
    assert {"status", "doctor", "unit", "export", "delete", "drain", "reload"} <= named


def test_every_setting_that_is_named_exists() -> None:
    sections = {setting.section for setting in settings().values()}
    named = set(re.findall(r"`(?:server\.|[a-z]+\.)[a-z_]+\b", PAGE))
    keys = {text.strip("`") for text in named if text.strip("`").split(".")[0] in sections}
    assert keys - set(settings()) == set()
    assert {"device.bytes", "disk.bytes", "server.operator_uids"} <= keys


def test_what_it_quotes_is_said() -> None:
    """Messages of the log and of commands, two words or more."""
    sources = " ".join(path.read_text() for path in sorted((ROOT / "tierkv").rglob("*.py")))
    said = re.sub(r'"\s+f?"', "", sources)
    quoted = re.findall(r'"([a-z]+(?: [a-z]+)+)"', PAGE)
    assert "slow request" in quoted
    assert [text for text in quoted if text not in said] == []


def test_every_metric_that_is_named_exists() -> None:
    named = set(re.findall(r"`(tierkv_\w+)`", PAGE))
    assert named - {metric.name for metric in METRICS} == set()
