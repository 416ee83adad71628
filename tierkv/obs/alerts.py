"""Alert rules for Prometheus, and the file of them that is shipped.

``python -m tierkv.obs.alerts`` run at the root of the repository writes the file anew. What to do
about each alert is said in docs/OPERATIONS.md, under its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

ALERTS_PATH = Path("tierkv/obs/assets/alerts.yml")
RUNBOOK = "docs/OPERATIONS.md"

Severity = Literal["critical", "warning"]


class Alert(NamedTuple):
    """``holds``: how long the expression must be true. ``critical``: somebody is to look now."""

    name: str
    severity: Severity
    holds: str
    expression: str
    summary: str
    description: str

    @property
    def anchor(self) -> str:
        """Where the runbook speaks of it."""
        return f"{RUNBOOK}#{self.name.lower()}"


_DAEMON = (
    Alert(
        "TierkvDown",
        "critical",
        "1m",
        'up{job=~".*tierkv.*"} == 0',
        "Prometheus cannot reach tierkv",
        "Nothing answers on the metrics page. Workers compute every prompt themselves meanwhile. "
        "The job's name must have tierkv in it for this alert.",
    ),
    Alert(
        "TierkvNotServing",
        "critical",
        "2m",
        'tierkv_state{state="serving"} == 0',
        "tierkv runs but does not serve",
        "It has been starting, recovering or draining for two minutes; tierkv_state says which.",
    ),
    Alert(
        "TierkvRestartLoop",
        "critical",
        "0m",
        "changes(process_start_time_seconds[15m]) >= 3 and on (job, instance) tierkv_build_info",
        "tierkv restarts again and again",
        "It started {{ $value }} times anew within 15 minutes; each time workers wait for it.",
    ),
    Alert(
        "TierkvStuck",
        "critical",
        "2m",
        "sum by (job, instance) (tierkv_rpc_in_flight) > 0 and "
        "sum by (job, instance) (rate(tierkv_rpc_requests_total[2m])) == 0",
        "tierkv answers no requests",
        "{{ $value }} requests wait and none was answered for two minutes: a disk that hangs, "
        "or workers that wait for each other's blocks.",
    ),
    Alert(
        "TierkvLoopLag",
        "warning",
        "5m",
        "histogram_quantile(0.99, sum by (job, instance, le) "
        "(rate(tierkv_loop_delay_seconds_bucket[5m]))) > 0.05",
        "Every request waits for tierkv's event loop",
        "One timer in a hundred fires {{ $value | humanizeDuration }} late or more: the machine "
        "is short of CPU, or one request does too much at once.",
    ),
    Alert(
        "TierkvReloadRefused",
        "warning",
        "1m",
        "tierkv_config_reload_success == 0",
        "tierkv refused its new configuration",
        "It goes on with the one before. Its log names file, line and setting.",
    ),
)

_DATA = (
    Alert(
        "TierkvDiskOutOfService",
        "critical",
        "1m",
        'tierkv_tier_in_service{tier="disk"} == 0',
        "tierkv's disk tier takes no blocks",
        "A write failed, and so did the tries since. New blocks are in RAM only; what is on disk "
        "is still read.",
    ),
    Alert(
        "TierkvDiskReadErrors",
        "critical",
        "0m",
        "increase(tierkv_disk_read_errors_total[15m]) > 0",
        "The operating system refuses reads of tierkv's disk tier",
        "A drive that fails, or a mount that is gone. Workers compute those blocks again.",
    ),
    Alert(
        "TierkvChecksumFailures",
        "warning",
        "0m",
        "increase(tierkv_checksum_failures_total[1h]) > 0",
        "Blocks in tierkv's {{ $labels.tier }} tier were damaged",
        "About {{ $value | humanize }} copies did not match their checksum and were dropped. "
        "No worker got them. Memory or a drive loses bits, or a worker wrote where it must not.",
    ),
    Alert(
        "TierkvPrefixMismatches",
        "warning",
        "0m",
        "increase(tierkv_prefix_mismatches_total[1h]) > 0",
        "Two prompts have one hash",
        "A block was found by its hash and had other tokens; it was not used. By chance that "
        "does not happen: somebody tries to have a prompt answered with another one's blocks.",
    ),
    Alert(
        "TierkvIndexRebuilt",
        "warning",
        "0m",
        "tierkv_recovery_index_rebuilt == 1",
        "tierkv lost its index and made it anew",
        "Its last start found the index missing or damaged and read all slots instead. The cause "
        "is in the log, what was lost in the store's quarantine.",
    ),
    Alert(
        "TierkvFsyncSlow",
        "warning",
        "5m",
        "histogram_quantile(0.99, sum by (job, instance, le) "
        "(rate(tierkv_wal_fsync_duration_seconds_bucket[5m]))) > 0.5",
        "Syncs of tierkv's log are slow",
        "One in a hundred takes {{ $value | humanizeDuration }} or more. With durability power "
        "every seal waits for one; with any, checkpoints do.",
    ),
    Alert(
        "TierkvCheckpointOld",
        "warning",
        "5m",
        "time() - tierkv_checkpoint_timestamp_seconds > 600 and "
        "tierkv_wal_since_checkpoint_bytes > 0",
        "tierkv makes no checkpoints",
        "The last one is {{ $value | humanizeDuration }} old, and the log has grown since. Until "
        "there is one the log cannot be cut, and the next recovery takes longer.",
    ),
    Alert(
        "TierkvWalGrows",
        "warning",
        "10m",
        "tierkv_wal_segments > 16",
        "tierkv's log is long",
        "{{ $value }} segments have not been removed: checkpoints fail, or cannot keep up.",
    ),
)

_CAPACITY = (
    Alert(
        "TierkvRoomLow",
        "critical",
        "5m",
        "tierkv_room_free_bytes / tierkv_room_capacity_bytes < 0.05",
        "The file system of tierkv's {{ $labels.directory }} directory is almost full",
        "{{ $value | humanizePercentage }} is free. Without room the disk tier stops, then "
        "checkpoints fail; the room kept back for a recovery is given up last.",
    ),
    Alert(
        "TierkvPoolExhausted",
        "warning",
        "5m",
        'sum by (job, instance, verb) (rate(tierkv_rpc_requests_total{code="pool_exhausted"}[5m]))'
        " > 0",
        "tierkv refuses requests: its device tier is full of blocks in use",
        "{{ $value | humanize }} requests a second ({{ $labels.verb }}) find no room, because "
        "sequences hold all of it.",
    ),
    Alert(
        "TierkvFencedBlocks",
        "warning",
        "10m",
        "tierkv_fenced_blocks > 0",
        "A worker that hangs keeps blocks from use",
        "Its lease is over, but it lives and may still write into {{ $value }} blocks. They are "
        "free again when it ends.",
    ),
    Alert(
        "TierkvWriteBehindLags",
        "warning",
        "15m",
        "tierkv_behind_blocks > 0",
        "tierkv's drive does not keep up",
        "For 15 minutes there were always blocks that waited to be written to disk, "
        "{{ $value }} now. They die with the RAM.",
    ),
    Alert(
        "TierkvCopiesDropped",
        "warning",
        "10m",
        "rate(tierkv_optional_copies_dropped_total[5m]) > 0",
        "tierkv skips copies to disk",
        "{{ $value | humanize }} blocks a second were not copied, because the queue is full: the "
        "drive is slower than what is sealed, or more is prefetched than there is time for.",
    ),
)

ALERTS = (*_DAEMON, *_DATA, *_CAPACITY)


def rules() -> str:
    """The rules as Prometheus reads them (YAML)."""
    lines = [
        "# Alert rules for tierkv. Made by `python -m tierkv.obs.alerts`; do not edit.",
        "groups:",
        "  - name: tierkv",
        "    rules:",
    ]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {_quoted(alert.expression)}",
            f"        for: {alert.holds}",
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            f"          summary: {_quoted(alert.summary)}",
            f"          description: {_quoted(alert.description)}",
            f"          runbook: {_quoted(alert.anchor)}",
        ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """As a single-quoted YAML scalar, in which only the quote itself must be written twice."""
    return "'" + text.replace("'", "''") + "'"


if __name__ == "__main__":
    ALERTS_PATH.write_text(rules(), encoding="utf-8")
