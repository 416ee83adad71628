"""docs/METRICS.md, made from the table of metrics.

``python -m tierkv.obs.docs`` run at the root of the repository writes it anew.
"""

from __future__ import annotations

from pathlib import Path

from tierkv.obs.declared import Type
from tierkv.obs.table import METRICS

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
    return "".join([_INTRO, *rows, "\n## Buckets of the histograms (seconds)\n\n", *buckets])


if __name__ == "__main__":
    MARKDOWN_PATH.write_text(markdown(), encoding="utf-8")
