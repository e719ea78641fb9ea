"""The page of `kvtier index serve` in a real browser, over engines that publish their events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.engine.drive import tokens
from tests.engine.test_with_kvtier import ask, engine_with
from tests.unit.browser import Browser
from tests.unit.server_kit import SMALL, Client, IndexServer, publishing, registered

HOSTILE = '<img src=x onerror="document.title=1">\u202e' + "W" * 900
COLOUR = "getComputedStyle(document.body).backgroundColor"
LIGHT, DARK = "rgb(246, 247, 249)", "rgb(16, 21, 28)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


def test_the_page_shows_engines_live(browser: Browser) -> None:
    document = tokens(40, seed=1)
    with IndexServer(settings=SMALL) as server, ExitStack() as stack:
        client = Client(server.url)
        browser.resize(1440)
        browser.open(server.url)
        browser.until("document.querySelector('#verdict').innerText === 'No engine yet'")
        assert f"curl {server.url}/register" in browser.text("#empty")

        publishers = [stack.enter_context(publishing()) for _ in range(2)]
        engines = [stack.enter_context(engine_with(publisher=publisher)) for publisher in publishers]
        for number, publisher in enumerate(publishers):
            assert client("POST", "/register", registered(publisher, f"engine-{number}"))[0] == 201
        for number, engine in enumerate(engines):
            ask(engine, document + tokens(20, seed=10 + number), "first")
            engine.drain()
        browser.until("document.querySelector('#verdict').innerText === '2 engines, all exact'")
        (held,) = {
            listener["tiers"]["cpu"] * 4
            for one in client("GET", "/workers")[1]
            for listener in one["listeners"].values()
        }
        cells = "[...document.querySelectorAll('#rows tr')].map(row => row.cells[3].textContent)"
        browser.until(f"{cells}.join() === '{held},{held}'")
        assert held >= 60

        # a router asks about what both have
        browser.until(
            f"""fetch('query', {{method: 'POST', body: JSON.stringify({{model_name: 'm',
            token_ids: {document}}})}}).then(() => fetch('prefixes')).then(answer => answer.json())
            .then(([model]) => model.prefixes.length === 1)"""
        )
        browser.open(server.url)
        browser.until("document.querySelector('.chain') !== null")
        assert "40 tokens in 2 engines" in browser.text(".chain")
        browser.until("/^\\d/.test(document.querySelector('#rows').rows[0].cells[5].textContent)")

        engines[1].reset_prefix_cache()
        publishers[1].shutdown()
        browser.until("document.querySelector('#verdict').innerText === '1 of 2 engines exact'")
        assert browser.run("document.querySelector('#rows').rows[0].cells[0].innerText").startswith(
            "engine-1"
        )
        browser.until("document.querySelector('#rows').rows[0].innerText.includes('not connected')")
        assert browser.problems() == []
    browser.until("document.querySelector('#problem').innerText.startsWith('The index cannot be reached')")


@pytest.mark.parametrize("width", [390, 820, 1440])
def test_names_of_strangers_are_text_and_nothing_overflows(browser: Browser, width: int) -> None:
    with IndexServer(settings=SMALL) as server, publishing() as publisher:
        client = Client(server.url)
        body = registered(publisher, HOSTILE, model_name=HOSTILE, routing_group=HOSTILE)
        assert client("POST", "/register", body)[0] == 201
        assert client("POST", "/register", body | {"instance_id": 2**63 + 1, "dp_rank": 7})[0] == 201
        browser.resize(width)
        browser.open(server.url)
        browser.until("document.querySelectorAll('#rows tr').length === 2")
        names = browser.run("[...document.querySelectorAll('#rows .name')].map(name => name.textContent)")
        assert sorted(names) == [str(2**63 + 1), HOSTILE]
        assert browser.run("document.querySelectorAll('img, iframe').length") == 0
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert "kvtier index" in browser.run("document.title")
        assert browser.problems() == []


def test_the_theme_follows_the_system_until_the_switch_says_otherwise(browser: Browser) -> None:
    with IndexServer(settings=SMALL) as server:
        for scheme, colour in (("light", LIGHT), ("dark", DARK)):
            browser.resize(820, scheme=scheme)
            browser.open(server.url)
            browser.until(f"document.readyState === 'complete' && {COLOUR} === '{colour}'")
        browser.run("document.querySelector('#theme').click()")
        assert (browser.text("#theme"), browser.run(COLOUR)) == ("theme: light", LIGHT)
        browser.open(server.url)
        browser.until("document.readyState === 'complete'")
        assert (browser.text("#theme"), browser.run(COLOUR)) == ("theme: light", LIGHT), "it is remembered"
        browser.run("document.querySelector('#theme').click()")
        assert browser.text("#theme") == "theme: dark"


def test_engines_are_found_and_ordered(browser: Browser) -> None:
    with IndexServer(settings=SMALL) as server:
        client = Client(server.url)
        body = {"model_name": "m", "endpoint": "tcp://127.0.0.1:1", "block_size": 4}
        for number in range(60):
            assert client("POST", "/register", body | {"instance_id": f"engine-{number}"})[0] == 201
        browser.resize(1440)
        browser.open(server.url)
        rows = "document.querySelectorAll('#rows tr').length"
        browser.until(f"{rows} === 24")
        assert browser.text("#more") == "show more (36 engines)"
        browser.run("document.querySelector('#more').click()")
        assert browser.run(rows) == 60
        browser.run("globalThis.box = document.querySelector('#filter')")
        browser.run("box.value = 'ENGINE-5'; box.dispatchEvent(new Event('input'))")
        assert browser.run(rows) == 11
        browser.run("box.value = '<nobody>'; box.dispatchEvent(new Event('input'))")
        assert "No engine has this" in browser.text("#none")


def test_another_page_cannot_read_it_and_no_script_gets_in(browser: Browser) -> None:
    with IndexServer(settings=SMALL) as server, IndexServer(settings=SMALL) as other:
        browser.open(other.url)
        browser.until("document.readyState === 'complete'")
        read = f"fetch('{server.url}/workers').then(() => 'read', () => 'refused')"
        assert browser.run(read) == "refused"
        script = "document.createElement('script')"
        browser.run(f"document.body.append(Object.assign({script}, {{text: 'document.title = 7'}}))")
        assert browser.run("document.title") != "7", "the policy lets no script into the page"
