"""Each alert fires when it should and else does not, as promtool finds."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from tests.obs.prometheus import needs_prometheus, promtool
from tierkv.obs import alerts
from tierkv.obs.alerts import ALERTS, Alert

ROOT = Path(__file__).parents[2]
NAMES = [alert.name for alert in ALERTS]

STEP_S = 15
"""Between the values of the series below."""

AT = "30m"
"""When alerts are looked at: by then each has held for as long as it must, if it holds."""


class Case(NamedTuple):
    """Series with which an alert fires, and those with which it must not.

    ``says`` are the texts of its placeholders, in order; ``labels`` those of the alert besides job,
    instance and severity.
    """

    fires: dict[str, str]
    quiet: dict[str, str]
    says: tuple[str, ...] = ()
    labels: Mapping[str, str] = MappingProxyType({})


def _buckets(name: str, **values: str) -> dict[str, str]:
    """A histogram of three buckets."""
    bounds = {"low": "0.05", "high": "1.0", "all": "+Inf"}
    return {f'{name}_bucket{{le="{bounds[key]}"}}': value for key, value in values.items()}


FSYNC = "tierkv_wal_fsync_duration_seconds"
DELAY = "tierkv_loop_delay_seconds"
OK = 'tierkv_rpc_requests_total{verb="lookup",code="ok"}'
REFUSED = 'tierkv_rpc_requests_total{verb="reserve",code="pool_exhausted"}'
STARTED = "process_start_time_seconds"
CHECKPOINT = "tierkv_checkpoint_timestamp_seconds"
SINCE = "tierkv_wal_since_checkpoint_bytes"

CASES = {
    "TierkvDown": Case({"up": "0x120"}, {"up": "1x120"}),
    "TierkvNotServing": Case(
        {'tierkv_state{state="serving"}': "0x120"},
        {'tierkv_state{state="serving"}': "1x100 0x4 1x20"},
        labels={"state": "serving"},
    ),
    "TierkvRestartLoop": Case(
        {STARTED: "100x80 200x10 300x10 400x20", "tierkv_build_info": "1x120"},
        {STARTED: "100x80 200x10 300x30", "tierkv_build_info": "1x120"},
        ("3",),
    ),
    "TierkvStuck": Case(
        {"tierkv_rpc_in_flight": "2x120", OK: "0+9x80 720x40"},
        {"tierkv_rpc_in_flight": "2x120", OK: "0+9x120"},
        ("2",),
    ),
    "TierkvLoopLag": Case(
        _buckets(DELAY, low="0+5x120", high="0+10x120", all="0+10x120"),
        _buckets(DELAY, low="0+10x120", high="0+10x120", all="0+10x120"),
        ("981ms",),
    ),
    "TierkvReloadRefused": Case(
        {"tierkv_config_reload_success": "0x120"}, {"tierkv_config_reload_success": "1x120"}
    ),
    "TierkvDiskOutOfService": Case(
        {'tierkv_tier_in_service{tier="disk"}': "0x120"},
        {'tierkv_tier_in_service{tier="disk"}': "1x120"},
        labels={"tier": "disk"},
    ),
    "TierkvDiskReadErrors": Case(
        {"tierkv_disk_read_errors_total": "0x100 1x20"}, {"tierkv_disk_read_errors_total": "1x120"}
    ),
    "TierkvChecksumFailures": Case(
        {'tierkv_checksum_failures_total{tier="host"}': "0x100 4x20"},
        {'tierkv_checksum_failures_total{tier="host"}': "4x120"},
        ("host", "4"),
        {"tier": "host"},
    ),
    "TierkvPrefixMismatches": Case(
        {"tierkv_prefix_mismatches_total": "0x100 1x20"},
        {"tierkv_prefix_mismatches_total": "1x120"},
    ),
    "TierkvIndexRebuilt": Case(
        {"tierkv_recovery_index_rebuilt": "1x120"}, {"tierkv_recovery_index_rebuilt": "0x120"}
    ),
    "TierkvFsyncSlow": Case(
        _buckets(FSYNC, low="0+5x120", high="0+10x120", all="0+10x120"),
        _buckets(FSYNC, low="0+10x120", high="0+10x120", all="0+10x120"),
        ("981ms",),
    ),
    "TierkvCheckpointOld": Case(
        {CHECKPOINT: "600x120", SINCE: "0+64x120"},
        {CHECKPOINT: "600x120", SINCE: "0x120"},
        ("20m 0s",),
    ),
    "TierkvWalGrows": Case(
        {"tierkv_wal_segments": "17x120"}, {"tierkv_wal_segments": "16x120"}, ("17",)
    ),
    "TierkvRoomLow": Case(
        {
            'tierkv_room_free_bytes{directory="state"}': "4x120",
            'tierkv_room_capacity_bytes{directory="state"}': "100x120",
        },
        {
            'tierkv_room_free_bytes{directory="state"}': "6x120",
            'tierkv_room_capacity_bytes{directory="state"}': "100x120",
        },
        ("state", "4%"),
        {"directory": "state"},
    ),
    "TierkvPoolExhausted": Case(
        {REFUSED: "0+15x120"}, {REFUSED: "0x60 3x60"}, ("1", "reserve"), {"verb": "reserve"}
    ),
    "TierkvFencedBlocks": Case(
        {"tierkv_fenced_blocks": "5x120"}, {"tierkv_fenced_blocks": "5x100 0x20"}, ("5",)
    ),
    "TierkvWriteBehindLags": Case(
        {"tierkv_behind_blocks": "9x120"}, {"tierkv_behind_blocks": "9x100 0x1 9x20"}, ("9",)
    ),
    "TierkvCopiesDropped": Case(
        {"tierkv_optional_copies_dropped_total": "0+30x120"},
        {"tierkv_optional_copies_dropped_total": "30x120"},
        ("2",),
    ),
}


def test_every_alert_has_a_case() -> None:
    assert list(CASES) == NAMES


def test_the_shipped_file_is_what_the_table_makes() -> None:
    shipped = (ROOT / alerts.ALERTS_PATH).read_text(encoding="utf-8")
    assert shipped == alerts.rules(), "run `python -m tierkv.obs.alerts`"


@needs_prometheus
def test_promtool_finds_nothing_to_complain_of() -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", str(ROOT / alerts.ALERTS_PATH))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


@needs_prometheus
@pytest.mark.parametrize("what", ["fires", "quiet"])
def test_alerts_fire_when_they_should_and_else_do_not(what: str, tmp_path: Path) -> None:
    """All of them by one run of promtool: each has a test of its own there."""
    rules = tmp_path / "alerts.yml"
    rules.write_text(alerts.rules())
    tests = [_test(alert, CASES[alert.name], what == "fires") for alert in ALERTS]
    file = tmp_path / "test.yml"
    file.write_text(
        json.dumps(
            {"rule_files": [str(rules)], "evaluation_interval": f"{STEP_S}s", "tests": tests}
        )
    )
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


def _test(alert: Alert, case: Case, fires: bool) -> dict[str, object]:
    """In promtool's terms. Only this alert is looked at; others may fire on the same series."""
    series = case.fires if fires else case.quiet
    texts = iter(case.says)

    def filled(text: str) -> str:
        return re.sub(r"\{\{.*?\}\}", lambda _: next(texts), text)

    expected = {
        "exp_labels": {
            "job": "tierkv",
            "instance": "a:1",
            "severity": alert.severity,
            **case.labels,
        },
        "exp_annotations": {
            "summary": filled(alert.summary),
            "description": filled(alert.description),
            "runbook": alert.anchor,
        },
    }
    return {
        "name": alert.name,
        "interval": f"{STEP_S}s",
        "input_series": [
            {"series": _labelled(name), "values": values} for name, values in series.items()
        ],
        "alert_rule_test": [
            {"eval_time": AT, "alertname": alert.name, "exp_alerts": [expected] if fires else []}
        ],
    }


def _labelled(series: str) -> str:
    name, _, labels = series.partition("{")
    return f'{name}{{job="tierkv",instance="a:1",{labels or "}"}'
