"""A real Prometheus scrapes a real daemon under load: what it is asked, it can answer.

One daemon and one Prometheus for all tests of this file.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import tierkv
from tests.obs.prometheus import Prometheus, needs_prometheus, prometheus, promtool
from tests.service.blocks import SPEC, fill, sized, store, tokens
from tests.service.running import Daemon, running, until
from tierkv.errors import PoolExhausted
from tierkv.obs import alerts
from tierkv.obs.alerts import ALERTS
from tierkv.obs.declared import Type
from tierkv.obs.panels import ROWS
from tierkv.obs.table import METRICS

pytestmark = needs_prometheus

SCRAPES = 3
"""How often the daemon was asked at least before anything is looked at."""

RANGE = "30s"
"""In place of Grafana's own choice."""

AGES = (1, 4, 6)
"""How many prompts ago one was computed that is asked for again: it is in each of the tiers."""

IDLE = ("tierkv_attend_wait_seconds", "tierkv_attend_batch_requests", "tierkv_gc_pause_seconds")
"""Nobody asks this daemon for attention, and in so few seconds no garbage is collected. So there
are no quantiles of these: their expressions are only checked to be understood."""

QUERIES = [query for row in ROWS for panel in row.panels for query in panel.queries]


class Load(threading.Thread):
    """A worker that computes prompts, finds them again, and is refused now and then."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__()
        self._client = daemon.connect("load")
        self._over = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._work(self._client.namespace(SPEC))
        except Exception as error:
            self.error = error
        finally:
            self._client.close()

    def _work(self, ns: tierkv.Namespace) -> None:
        number = 0
        while not self._over.is_set():
            number += 1
            store(ns, tokens(6, seed=number))
            for age in AGES:
                store(ns, tokens(6, seed=max(1, number - age)))
            with fill(ns, tokens(2, seed=-number % 1000)) as sequence:
                with pytest.raises(PoolExhausted):
                    sequence.reserve(10**4)
                if number % 20 == 0:
                    self._client.flush()

    def stop(self) -> None:
        """End it; raises what it met with."""
        self._over.set()
        self.join()
        if self.error is not None:
            raise self.error


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    settings = sized(24, 24, 64, **{"metrics.tcp": "127.0.0.1:0", "wal.checkpoint_s": "1s"})
    with running(settings) as daemon:
        load = Load(daemon)
        load.start()
        yield daemon
        load.stop()


@pytest.fixture(scope="module")
def scraped(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    port = re.search(r"metrics_port=(\d+)", daemon.said())
    assert port, daemon.said()
    with prometheus(tmp_path_factory.mktemp("prometheus"), int(port[1]), alerts.rules()) as one:
        until(lambda: one.value("count_over_time(tierkv_build_info[1m])") >= SCRAPES)
        yield one


def concrete(expression: str) -> str:
    """A dashboard's expression with everything chosen."""
    chosen = expression.replace('"$job"', '".+"').replace('"$instance"', '".+"')
    return chosen.replace("$__rate_interval", RANGE)


def test_the_page_is_clean(daemon: Daemon) -> None:
    done = promtool("check", "metrics", given=daemon.get("/metrics")[1])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_openmetrics_is_what_it_says(daemon: Daemon, scraped: Prometheus) -> None:
    page = daemon.get("/metrics", accept="application/openmetrics-text; version=1.0.0")[1]
    assert page.endswith("# EOF\n")
    families = {family.name: family.type for family in text_string_to_metric_families(page)}
    for metric in METRICS:
        assert families[metric.name.removesuffix("_total")] == metric.type.value
    assert scraped.value("count(up == 1)") == 1


def test_prometheus_has_every_metric(scraped: Prometheus) -> None:
    there = set(scraped.get("label/__name__/values"))
    for metric in METRICS:
        name = f"{metric.name}_bucket" if metric.type is Type.HISTOGRAM else metric.name
        assert name in there, name


def test_every_expression_of_the_dashboard_returns_numbers(scraped: Prometheus) -> None:
    for expression, legend in QUERIES:
        series = scraped.query(concrete(expression))
        assert series, expression
        if not any(name in expression for name in IDLE):
            values = [float(one["value"][1]) for one in series]
            assert any(map(math.isfinite, values)), expression
        for label in re.findall(r"\{\{(\w+)\}\}", legend):
            assert all(one["metric"].get(label) for one in series), (expression, label)


def test_prometheus_evaluates_the_shipped_rules(scraped: Prometheus) -> None:
    def all_evaluated() -> bool:
        (group,) = scraped.get("rules")["groups"]
        return all(rule["lastEvaluation"][:4] != "0001" for rule in group["rules"])

    until(all_evaluated)
    (group,) = scraped.get("rules")["groups"]
    health = {rule["name"]: (rule["health"], rule.get("lastError", "")) for rule in group["rules"]}
    assert health == {alert.name: ("ok", "") for alert in ALERTS}
    # The load is refused now and then; the others have nothing to say of a healthy daemon.
    assert scraped.query('ALERTS{alertname="TierkvPoolExhausted", alertstate="pending"}')
    assert scraped.query('ALERTS{alertstate="firing"}') == []


def test_a_scrape_takes_some_milliseconds_at_most(scraped: Prometheus) -> None:
    assert scraped.value("max_over_time(scrape_duration_seconds[1m])") < 0.25
    assert scraped.value("min_over_time(scrape_duration_seconds[1m])") < 0.05
