"""docs/METRICS.md, made from the table of metrics.

``python -m tierkv.obs.docs`` run at the root of the repository writes it anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from tierkv.core.counters import REASONS
from tierkv.core.residency import SAMPLE, WATCHED_MAX
from tierkv.obs.alerts import ALERTS
from tierkv.obs.declared import Type
from tierkv.obs.table import METRICS
from tierkv.obs.tenants import NOBODY, OTHERS, TENANTS_MAX

MARKDOWN_PATH = Path("docs/METRICS.md")

_INTRO = """\
# Metrics

This page is made from `tierkv/obs/table.py` and what it gathers.

The daemon serves these pages on `metrics.tcp` (`127.0.0.1:9464`) and on the Unix socket
`metrics.socket`, to GET requests:

| page | content |
| --- | --- |
| `/` | a page for a person: the state, the tiers, the last hour and day, what went wrong |
| `/metrics` | the metrics below, as Prometheus text or, if the client accepts it, OpenMetrics |
| `/healthz` | 200 as long as the daemon answers |
| `/readyz` | 200 when it serves, else 503; the text is its state |
| `/status.json` | the document of `tierkv status --json` |
| `/history.json` | what some of its counters were in the last hour and day |

```console
$ curl --silent localhost:9464/metrics
$ curl --silent --unix-socket /run/tierkv/metrics.sock localhost/status.json
```

Times are in seconds, sizes in bytes; `tier` is `device`, `host` or `disk`. Everything is counted
since the daemon's start. Beside these there are `process_*` (memory, CPU, descriptors) and
`python_gc_*`.

| metric | type | labels | meaning | why |
| --- | --- | --- | --- | --- |
"""

_REASONS = """
## Why blocks are evicted

`reason` of `tierkv_eviction_count_total`: for what the room was needed, or what was wrong with the
copy.

| reason | meaning |
| --- | --- |
"""

_COST = f"""
## What it costs

Counting adds to plain integers and to places of a list, some tens of nanoseconds each. Nothing is
computed until somebody asks: a page takes a few milliseconds, so that it may be scraped every
second.

How long blocks live, how long they are unused and the time between two uses are measured on a
sample: one block of {SAMPLE}, by its id, and {WATCHED_MAX:,} at most at a time (about 5 MiB). What
happens to blocks is noted when it happens and looked at ten times a second, so these times are
exact to a tenth of a second.

The first {TENANTS_MAX} tenants have labels of their own, the rest is `{OTHERS}`. Namespaces that do
not say whose they are belong to `{NOBODY}`.

No metric tells how much time to the first token was saved, for the daemon does not know how fast
its workers compute. `tierkv_prefix_hit_tokens_total` counts the tokens that they did not have to:
divide them by the rate at which your engine computes prompts.
"""

_ALERTS = """
## Dashboard and alerts

```console
$ tierkv dashboard export > tierkv.json
$ tierkv dashboard export --alerts > tierkv-alerts.yml
```

The first is for Grafana: a row for each question, as in "does it pay?" and "why were blocks
evicted?". The second is for Prometheus: name it under `rule_files`. OPERATIONS.md says what to do
about each alert.

| alert | severity | for | summary |
| --- | --- | --- | --- |
"""

_BUCKETS = """
## Buckets of the histograms

"""


def markdown() -> str:
    """The text of docs/METRICS.md."""
    rows = [
        f"| `{metric.name}` | {metric.type.value} | {', '.join(metric.labels)} "
        f"| {metric.help} | {metric.why} |\n"
        for metric in METRICS
    ]
    buckets = [
        f"- `{metric.name}`: {len(metric.buckets)} from {metric.buckets[0]:g} "
        f"to {metric.buckets[-1]:g}\n"
        for metric in METRICS
        if metric.type is Type.HISTOGRAM
    ]
    reasons = [f"| `{reason}` | {meaning} |\n" for reason, meaning in REASONS.items()]
    alerts = [
        f"| `{alert.name}` | {alert.severity} | {alert.holds} | {_read(alert.summary)} |\n"
        for alert in ALERTS
    ]
    return "".join([_INTRO, *rows, _REASONS, *reasons, _COST, _ALERTS, *alerts, _BUCKETS, *buckets])


def _read(text: str) -> str:
    """A text of an alert as a person reads it: "tierkv's TIER tier"."""
    return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: found[1].upper(), text)


if __name__ == "__main__":
    MARKDOWN_PATH.write_text(markdown(), encoding="utf-8")
