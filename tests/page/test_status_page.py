"""The status page in a real browser: it shows what /status.json says, and stays alive."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.page.chromium import EXECUTABLE, Chromium, Page
from tests.page.documents import EVIL, busy, degraded, past, recovering, showing
from tests.service.blocks import BLOCK, SPEC, store, tokens
from tests.service.running import Daemon
from tierkv.obs.history import History
from tierkv.obs.status import StatusDocument, WorkerStatus

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="needs Debian's package chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as browser:
        yield browser


def shown(browser: Chromium, url: str, **options: int) -> Page:
    """The page once it has an answer."""
    page = browser.page(**options)
    page.goto(url)
    page.until("document.body.className !== 'waiting'")
    return page


def cells(page: Page, table: str) -> list[list[str]]:
    found: list[list[str]] = page.run(
        f"[...document.querySelectorAll('#{table} tbody tr')].map("
        "(row) => [...row.cells].map((cell) => cell.innerText))"
    )
    return found


# --- a daemon -------------------------------------------------------------------------------------


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon({"metrics.tcp": f"127.0.0.1:{free_port()}"}) as daemon:
        yield daemon.start()


def test_it_shows_what_the_daemon_says_and_follows_it(browser: Chromium, daemon: Daemon) -> None:
    url = f"http://{daemon.settings['metrics.tcp']}/"
    with daemon.connect(EVIL) as client:
        store(client.namespace(SPEC), tokens(20, seed=1))
        client.flush()
        page = shown(browser, url)
        page.until("document.querySelector('#blocks').innerText === '20'")
        status = daemon.status()
        assert page.text("#state") == "serving"
        assert page.text("#says") == "Serving; all tiers are in order."
        assert f"pid {daemon.pid}" in page.text("#about")
        device = status["tiers"]["device"]
        assert f"{device['blocks']} blocks" in page.text("#tiers .tier:nth-child(1) .says")
        assert "of 8.00 MiB" in page.text("#tiers .tier:nth-child(1) .size")
        assert status["tiers"]["disk"]["io"] in page.text("#tiers .tier:nth-child(3) .says")
        assert cells(page, "workers-table") == [
            [EVIL, str(status["workers"][0]["pid"]), str(status["workers"][0]["lease"]), "0"]
        ]
        assert "last checkpoint" in page.text("#safe")
        store(client.namespace(SPEC), tokens(7, seed=2))
        store(client.namespace(SPEC), tokens(20, seed=1))
        page.until("document.querySelector('#blocks').innerText === '27'")
        page.until(f"document.querySelector('#saved').innerText === '{20 * BLOCK}'")
    page.until("document.querySelector('#workers').innerText === '0'")
    assert page.run("document.title") == "serving – tierkv"
    assert {request.partition("?")[0] for request in page.requests} <= {
        url, f"{url}status.json", f"{url}history.json",
    } | {one for one in page.requests if one.startswith("data:")}  # fmt: skip
    assert page.errors == []
    page.close()


def test_it_says_when_the_daemon_is_gone_and_comes_back_by_itself(
    browser: Chromium, daemon: Daemon
) -> None:
    page = shown(browser, f"http://{daemon.settings['metrics.tcp']}/")
    blocks = page.text("#blocks")
    before = daemon.pid
    assert daemon.process is not None
    daemon.process.kill()
    daemon.wait()
    page.until("document.body.className === 'stale'")
    assert page.text("#state") == "no answer"
    assert page.text("#says") == "The daemon does not answer."
    assert page.text("#blocks") == blocks
    assert re.fullmatch(r"last answer .* ago", page.text("#fresh"))
    daemon.start()
    page.until("document.body.className === '' && document.title.startsWith('serving')")
    assert daemon.pid != before
    assert f"pid {daemon.pid}" in page.text("#about")
    page.close()


# --- states ---------------------------------------------------------------------------------------


def test_a_recovery_has_a_bar_that_moves(browser: Chromium) -> None:
    with showing(recovering(420_000)) as daemon:
        page = shown(browser, daemon.url)
        assert page.text("#says") == "Recovering 42%: reading slot headers."
        assert "420,000 of 1,000,000, about 12 s left" in page.text("#more")
        assert page.run("document.querySelector('#bar').value") == 0.42
        daemon.document = recovering(900_000)
        page.until("document.querySelector('#bar').value === 0.9")
        daemon.document = busy()
        page.until("document.querySelector('#bar').hidden")
        assert page.text("#state") == "serving"
        page.close()


def test_what_is_wrong_is_said_first(browser: Chromium) -> None:
    with showing(degraded()) as daemon:
        page = shown(browser, daemon.url)
        assert page.text("#says") == "The disk tier is out of service; the others serve on."
        assert page.run("document.querySelector('#verdict').className") == "verdict bad"
        assert "out of service" in page.text("#tiers .tier:nth-child(3)")
        (_, level, what, times), _ = cells(page, "errors")
        assert (level, times) == ("error", "17")
        assert what == "the disk tier is out of service: No space left on device tier=disk"
        page.close()


def test_a_crowd_is_cut_short(browser: Chromium) -> None:
    document = busy()
    document.workers = [
        WorkerStatus(lease=k, pid=k, name=f"w{k}", sequences=k) for k in range(1, 1001)
    ]
    with showing(document) as daemon:
        page = shown(browser, daemon.url)
        rows = cells(page, "workers-table")
        assert rows[0] == ["w1000", "1000", "1000", "1,000"]
        assert rows[20:] == [["and 980 more", "", "", ""]]
        page.close()


def test_what_an_operator_has_left_to_do_is_said(browser: Chromium) -> None:
    document = busy()
    document.config.needs_restart = ["device.bytes", "disk.dir"]
    with showing(document) as daemon:
        page = shown(browser, daemon.url)
        assert page.run("document.querySelector('#verdict').className") == "verdict warn"
        assert "need a restart: device.bytes, disk.dir." in page.text("#more")
        document.config.ok, document.config.error = False, "wal.x: unknown key"
        page.until("document.querySelector('#more').innerText.includes('wal.x: unknown key')")
        page.close()


def test_names_that_others_choose_are_text(browser: Chromium) -> None:
    document = busy()
    document.workers[0].name = document.namespaces[0].model = EVIL
    document.namespaces[0].tenant = document.problems[0].message = EVIL
    document.evicted[0].why = document.native_missing = EVIL
    with showing(document) as daemon:
        page = shown(browser, daemon.url)
        assert page.text("body").count(EVIL) == 8
        assert page.run("document.querySelectorAll('img, body script').length") == 1
        assert page.run("document.title") == "serving – tierkv"
        assert page.errors == []
        page.close()


def test_a_long_name_is_shown_by_its_ends(browser: Chromium) -> None:
    document = busy()
    document.workers[0].name = document.namespaces[0].model = "/srv/" + "x" * 3000 + "/llama-70b"
    with showing(document) as daemon:
        page = shown(browser, daemon.url, width=360, height=740)
        for card in ("namespaces", "workers-table"):
            assert re.search(r"/srv/x{15}\.{3}x+/llama-70b\b", page.text(f"#{card}")), card
        assert page.run("document.documentElement.scrollWidth") == 360
        page.close()


def test_nothing_from_elsewhere_is_let_in(browser: Chromium) -> None:
    with showing(busy()) as daemon:
        page = shown(browser, daemon.url)
        refused = page.run(
            """new Promise((done) => {
              const found = [];
              document.addEventListener("securitypolicyviolation", (event) => {
                found.push(event.effectiveDirective);
                if (found.length === 3) done(found.sort());
              });
              const image = new Image();
              image.src = "http://127.0.0.1:9/x.png";
              const script = document.createElement("script");
              script.textContent = "document.title = 'pwned'";
              document.body.append(image, script);
              fetch("http://127.0.0.1:9/").catch(() => 0);
            })"""
        )
        assert refused == ["connect-src", "img-src", "script-src-elem"]
        assert page.run("document.title") == "serving – tierkv"
        page.close()


# --- the past -------------------------------------------------------------------------------------


def test_a_page_that_was_just_opened_shows_the_past(browser: Chromium) -> None:
    with showing(busy(), past()) as daemon:
        page = shown(browser, daemon.url)
        bars = "document.querySelectorAll('#saved-chart rect').length"
        assert page.run(bars) > 150
        label = page.run("document.querySelector('#ratio-chart').ariaLabel")
        assert re.fullmatch(r"Hit ratio over the last hour: between \d+.*% and \d+.*%", label)
        page.run("document.querySelector('input[value=day]').click()")
        assert "day" in page.run("document.querySelector('#ratio-chart').ariaLabel")
        assert 0 < page.run(bars) < 50  # it has run three hours only
        page.close()


def test_a_daemon_without_a_past_has_empty_charts(browser: Chromium) -> None:
    with showing(StatusDocument(version="1", state="serving", uptime_s=2.0), History()) as daemon:
        page = shown(browser, daemon.url)
        assert page.run("document.querySelectorAll('.chart rect').length") == 0
        label = page.run("document.querySelector('#ratio-chart').ariaLabel")
        assert label == "Nothing was looked up in the last hour"
        assert page.errors == []
        page.close()


# --- how it sits ----------------------------------------------------------------------------------


def test_on_a_phone_nothing_sticks_out_and_nothing_jumps(browser: Chromium) -> None:
    with showing(busy(), past()) as daemon:
        page = shown(browser, daemon.url, width=360, height=740)
        assert page.run("document.documentElement.scrollWidth") == 360
        shifted = page.run(
            """new Promise((done) => {
              let sum = 0, answers = 0;
              new PerformanceObserver((list) => {
                for (const entry of list.getEntries()) sum += entry.value;
              }).observe({ type: "layout-shift", buffered: true });
              const seen = new PerformanceObserver((list) => {
                answers += list.getEntries().filter((e) => e.name.endsWith("status.json")).length;
                if (answers >= 3) setTimeout(() => done(sum), 50);
              });
              seen.observe({ type: "resource", buffered: true });
            })"""
        )
        assert shifted < 0.02
        page.close()


def test_it_does_not_ask_while_nobody_looks(browser: Chromium) -> None:
    with showing(busy()) as daemon:
        page = shown(browser, daemon.url)
        planned = page.run(
            """(async () => {
              const planned = [], real = window.setTimeout;
              window.setTimeout = (call, ms) => { planned.push(ms); return real(call, ms); };
              Object.defineProperty(document, "hidden", { value: true, configurable: true });
              await poll();
              const hidden = planned.length;
              delete document.hidden;
              await poll();
              return [hidden, planned];
            })()"""
        )
        assert planned == [0, [1000]]
        page.run("document.dispatchEvent(new Event('visibilitychange'))")
        asked = "performance.getEntriesByName(location.href + 'status.json').length"
        page.until(f"{asked} >= 4")
        page.close()


def test_it_asks_ever_more_seldom_while_nobody_answers(browser: Chromium) -> None:
    with showing(busy()) as daemon:
        page = shown(browser, daemon.url)
        planned = page.run(
            """(async () => {
              const planned = [], real = window.setTimeout;
              window.setTimeout = (call, ms) => { planned.push(ms); return 0; };
              window.fetch = () => Promise.reject(new Error("away"));
              for (let k = 0; k < 6; k++) await poll();
              window.setTimeout = real;
              return planned;
            })()"""
        )
        assert planned == [2000, 4000, 8000, 10000, 10000, 10000]
        assert page.text("#says") == "The daemon does not answer."
        page.close()


def test_a_screen_reader_is_told_what_the_pictures_show(browser: Chromium) -> None:
    with showing(busy(), past()) as daemon:
        page = shown(browser, daemon.url)
        silent = page.run(
            "[...document.querySelectorAll('[role=img], section, [role=region], progress')].filter("
            "(one) => !one.ariaLabel && !one.getAttribute('aria-labelledby')).length"
        )
        assert silent == 0
        assert page.run("document.querySelectorAll('th:not([scope])').length") == 0
        assert page.run("document.documentElement.lang") == "en"
        page.close()
