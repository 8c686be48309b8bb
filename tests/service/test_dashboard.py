"""The dashboard: what the page may do, and what it shows in a browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from attnserve.models.checksums import sha256
from service.app import create_app
from service.dashboard import PAGE, POLICY
from service.settings import Settings
from tests.service.browser import Browser, chromium
from tests.service.conftest import listening
from tests.service.tiny import write_encoder

KEY = "open-sesame"
OPTIMIZED = {
    "lineage": [
        {
            "rewrite": "collaborate",
            "before": {"parameters": 2000, "macs": 4000, "bytes": 8000},
            "after": {"parameters": 1500, "macs": 3000, "bytes": 6000},
            "fidelity": {"mean_cosine": 0.9876, "min_cosine": 0.9, "data": "held out"},
            "batch": 1,
            "sequence": 128,
        }
    ]
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_encoder(folder / "original")
    write_encoder(folder / "small", **OPTIMIZED)
    return folder


@pytest.fixture(scope="module")
def url(models: Path) -> Iterator[str]:
    with listening(create_app(Settings(model=models, probe=False))) as url:
        yield url


@pytest.fixture(scope="module")
def locked(models: Path) -> Iterator[str]:
    settings = Settings.model_validate({"model": models / "small", "probe": False, "api_keys": KEY})
    with listening(create_app(settings)) as url:
        yield url


@pytest.fixture
def page(url: str) -> Iterator[Browser]:
    with chromium() as browser:
        browser.open(url)
        browser.until(lambda: browser.text("#state") == "ready")
        yield browser
        assert browser.complaints() == []


def test_root_page_loads_no_external_resource(client: TestClient):
    answer = client.get("/", headers={"accept": "text/html"})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert answer.content == PAGE
    links = re.findall(rb"""(?:src|href)\s*=\s*["']([^"']+)""", PAGE)
    assert links and all(
        link.startswith((b"#", b"data:", b"stats.json", b"metrics")) for link in links
    )
    assert b"@import" not in PAGE and b"url(" not in PAGE


def test_policy_allows_only_own_script_and_style(client: TestClient):
    assert (
        client.get("/", headers={"accept": "text/html"}).headers["content-security-policy"]
        == POLICY
    )
    assert "unsafe" not in POLICY and "http" not in POLICY and "*" not in POLICY
    assert POLICY.startswith("default-src 'none'; script-src 'sha256-")
    assert POLICY.count("'sha256-") == 2 == PAGE.count(b"<script>") + PAGE.count(b"<style>")
    assert not re.search(rb"<[^>]+\s(style|on\w+)=", PAGE)


def test_openapi_omits_page(client: TestClient):
    assert "/" not in client.get("/openapi.json").json()["paths"]


def test_page_sends_texts_to_routes_that_exist(client: TestClient):
    paths = client.get("/openapi.json").json()["paths"]
    (select,) = re.findall(rb'<select id="what">(.*?)</select>', PAGE, re.DOTALL)
    names = re.findall(rb'value="(\w+)"', select)
    assert b"fetch(`texts/${what}`" in PAGE and len(names) == 3
    for name in names:
        assert "post" in paths[f"/texts/{name.decode()}"]


def test_page_of_idle_server_shows_models_without_requests(page: Browser):
    assert "no requests" in page.text("#latency")
    assert page.text("#which").split("\n") == ["original 1", "small 1"]
    assert "Model comparison" in page.text("#models-card")


def test_page_sends_texts_and_shows_their_cost(page: Browser, tmp_path: Path):
    page.run("document.querySelector('#texts').value = 'a b\\nc d\\na b'")
    page.click("#send")
    shown = page.until(lambda: page.text("#answer") if "cosine" in page.text("#answer") else "")
    assert "1.000" in shown and "tokens 12" in shown and "compute" in shown
    page.until(lambda: "last 60 s: p50" in page.text("#latency"))
    page.until(lambda: page.run("return document.querySelectorAll('#batches .bar').length"))
    assert page.screenshot(tmp_path / "page.png").stat().st_size > 10_000


def test_page_shows_server_errors(page: Browser):
    page.run("document.querySelector('#texts').value = Array(2049).fill('a').join('\\n')")
    page.click("#send")
    page.until(lambda: page.text("#answer").startswith("413: 2049 texts in one request"))


def test_model_card_compares_before_and_after(page: Browser):
    page.run(
        "const which = document.querySelector('#which'); which.value = 'small 1';"
        "which.dispatchEvent(new Event('change'))"
    )
    table = page.text("#optimization")
    assert "1.5 k" in table and "75 %" in table and "0.9876" in table
    assert "at 1 x 128 tokens" in table
    assert "collaborate" in page.text("#facts")


def test_charts_support_keyboard(page: Browser):
    page.run("document.querySelector('#throughput svg').focus()")
    press = (
        "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0]}))"
    )
    page.run(press, "ArrowLeft")
    assert page.text("#throughput > .readout").startswith("1 s ago: rows")
    page.run(press, "Home")
    label = page.run("return document.activeElement.getAttribute('aria-label')")
    assert label.startswith("Throughput. 60 s ago: rows")
    page.run(press, "Escape")
    assert page.text("#throughput > .readout").startswith("last 60 s")


def test_theme_button_switches_colors(page: Browser):
    ground = "return getComputedStyle(document.documentElement).backgroundColor"
    before = page.run(ground)
    page.click("#theme")
    assert page.run(ground) != before


def test_every_control_is_reachable_by_tab(page: Browser):
    names = page.run(
        "return [...document.querySelectorAll('button, select, textarea, input, svg.chart')]"
        ".filter(e => e.tabIndex < 0 || !(e.labels?.length || e.innerText || e.ariaLabel"
        " || e.getAttribute('aria-label'))).map(e => e.outerHTML)"
    )
    assert names == []


def test_page_escapes_texts(page: Browser):
    page.run("document.querySelector('#texts').value = '<img src=x onerror=document.title=1>'")
    page.click("#send")
    page.until(lambda: "cosine" in page.text("#answer"))
    assert "<img src=x" in page.text("#answer")
    assert page.run("return document.querySelectorAll('img').length") == 0


def test_page_of_stopped_server_shows_unreachable(models: Path):
    with chromium() as browser:
        with listening(create_app(Settings(model=models / "small", probe=False))) as address:
            browser.open(address)
            browser.until(lambda: browser.text("#state") == "ready")
        browser.until(lambda: browser.text("#state") == "unreachable")
        assert "the last values received" in browser.text("#notice")


def test_page_requests_api_key(locked: str):
    assert httpx.get(f"{locked}/stats.json").status_code == 401
    with chromium() as browser:
        browser.open(locked)
        browser.until(lambda: browser.text("#state") == "unauthorized")
        browser.type("#key", "wrong")
        browser.click("#key-form button")
        browser.until(lambda: "Invalid API key" in browser.text("#notice"))
        browser.run("document.querySelector('#key').value = ''")
        browser.type("#key", KEY)
        browser.click("#key-form button")
        browser.until(lambda: browser.text("#state") == "ready")
        assert browser.run("return document.querySelector('#notice').hidden")


@pytest.mark.process
def test_page_shows_the_agreement_of_queries_with_an_index(tmp_path: Path):
    original = write_encoder(tmp_path / "original")
    quality = {"measure": "index", "value": 0.5, "output": "last_hidden_state", "rows": 60}
    source = {"sha256": sha256(original / "model.onnx")}
    entry = {"rewrite": "x", "source": source, "quality": quality}
    served = write_encoder(tmp_path / "served", lineage=[entry])
    chosen = {"model": served, "probe": False, "shadow": original, "shadow_rate": 1}
    with listening(create_app(Settings.model_validate(chosen))) as address, chromium() as browser:
        browser.open(address)
        browser.until(lambda: browser.text("#state") == "ready")
        assert "index" not in browser.text("#tiles")
        for words in product("abcd", repeat=3):
            httpx.post(f"{address}/texts/embed", json={"inputs": " ".join(words)})
        shown = browser.until(
            lambda: "embedded anew" in (text := browser.text("#tiles")) and text, 60
        )
        tile = shown[shown.index("Quality") :]
        assert "index" in tile and "guaranteed 0.5000" in tile and " rows" in tile
        assert re.search(r"overlap [01]\.\d{4} if all texts are embedded anew", tile)
        assert browser.complaints() == []
