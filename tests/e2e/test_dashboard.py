"""The dashboard in a real browser: it shows a real server's numbers, and asks nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from conftest import ServerMaker
from helpers.browser import PROGRAM, WHY_NOT, Browser
from helpers.local_server import LocalServer
from helpers.prompts import SMALL, other_revision, store

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    one = Browser(tmp_path_factory.mktemp("chromium"))
    yield one
    one.close()


def busy(server: LocalServer) -> None:
    client, other = server.connect("grpc"), server.connect("grpc", other_revision(SMALL))
    keys = store(client, 1, 6)
    for _ in range(3):
        client.lookup(keys=keys)
        client.get_chunks(keys)
    client.lookup(keys=client.keys(list(range(900, 932))))
    other.lookup(keys=store(other, 2, 3))
    server.settled()


def test_the_page_shows_live_numbers_and_asks_only_its_own_server(
    browser: Browser, make_server: ServerMaker
) -> None:
    server = make_server("--http", "127.0.0.1:0", "--policy", "hit_density,disk=lru")
    busy(server)
    origin = f"http://127.0.0.1:{server.node.http_port}/"
    browser.requests.clear()
    browser.errors.clear()
    browser.show(origin)
    browser.wait_for("document.querySelectorAll('section').length == 9")
    assert browser.evaluate("document.getElementById('now-chunks').textContent") == "9"
    assert browser.evaluate("document.getElementById('now-hit-ratio').textContent") == "91.3%"
    shown = browser.evaluate("document.querySelector('main').innerText")
    for part in ("cpu → disk", "hit_density", SMALL.model_id, "Calls of engines, recent"):
        assert part in shown
    assert browser.evaluate("document.querySelectorAll('#tiers tbody tr').length") == 2
    assert browser.evaluate("document.querySelectorAll('#prefixes tbody tr').length") == 2
    browser.wait_for("document.body.dataset.looks > 0")
    assert browser.evaluate("document.getElementById('live').textContent") == (
        "live, once a second"
    )
    client = server.connect("grpc")
    client.lookup(keys=store(client, 3, 4))
    browser.wait_for("document.getElementById('now-chunks').textContent === '13'")
    browser.wait_for("document.getElementById('hits').textContent.includes('27')")
    assert browser.errors == []
    assert len(browser.requests) >= 4, browser.requests
    strangers = [url for url in browser.requests if not url.startswith((origin, "data:"))]
    assert strangers == []


@pytest.mark.parametrize(("width", "dark"), [(1280, True), (390, False)])
def test_the_page_fits_every_width_in_light_and_dark_and_says_when_its_server_is_gone(
    browser: Browser, make_server: ServerMaker, width: int, dark: bool
) -> None:
    server = make_server("--http", "127.0.0.1:0")
    busy(server)
    browser.show(f"http://127.0.0.1:{server.node.http_port}/", width=width, dark=dark)
    browser.wait_for("document.querySelectorAll('section').length == 9")
    widest = "Math.max(...[...document.querySelectorAll('section')].map(s => s.scrollWidth))"
    assert browser.evaluate(widest) <= width
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, background[4:-1].split(","))) < 64) == dark
    browser.wait_for("document.body.dataset.looks > 0")
    server.stop()
    browser.wait_for("document.getElementById('live').classList.contains('off')")


def test_names_that_callers_chose_are_text_and_nothing_else_and_drawings_have_gaps(
    browser: Browser, make_server: ServerMaker
) -> None:
    server = make_server("--http", "127.0.0.1:0")
    name = '"><img src=x onerror="document.title=1"><b>bold</b>'
    client = server.connect("grpc", replace(SMALL, model_id=name))
    client.lookup(keys=store(client, 1, 2))
    browser.errors.clear()
    browser.show(f"http://127.0.0.1:{server.node.http_port}/")
    browser.wait_for("document.querySelectorAll('#prefixes tbody td').length > 1")
    assert browser.evaluate("document.querySelector('#prefixes tbody td').textContent") == name
    assert browser.evaluate("document.querySelectorAll('main img, main b').length") == 0
    assert browser.errors == []

    def lines(chart: str) -> object:
        return browser.evaluate(f"{chart}.querySelectorAll('polyline').length")

    curves = (
        "[['cpu', [[0.5, 0.1], [1, 0.2], [2, 0.4]]], ['disk', [[1, 0.5], [2, 0.6]]], ['x', []]]"
    )
    assert lines(f"whatIfChart({curves})") == 2
    assert browser.evaluate("whatIfChart([['cpu', []]])") is None
    assert lines("trendChart([0.5, null, 0.25, 0.75], 20)") == 2
    assert browser.evaluate("trendChart([null, null], 20)") is None
    assert browser.evaluate("quantile([0, 50, 50, 0], [1, 2, 4], 0.5)") == 2
    assert browser.evaluate("quantile([0, 50, 50, 0], [1, 2, 4], 0.75)") == 3
    assert browser.evaluate("quantile([0, 0, 0, 7], [1, 2, 4], 0.5)") == 4
    assert browser.evaluate("quantile([0, 0, 0, 0], [1, 2, 4], 0.5)") is None
