"""`kvtier top` against HTTP servers with the metrics of real engines."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO

import pytest
from rich.console import Console
from tests.engine.drive import tokens
from tests.engine.test_with_tiers import ask, expect_idle, forget
from tests.engine.tier_kit import MemoryTiers, tiered_engine
from tests.faulty_server import trickling

from kvtier.cli import main
from kvtier.cli.scrape import Scrape, parse, scrape
from kvtier.cli.top import EngineFigures, Scraper, Watch, render
from kvtier.engine import Engine


@contextmanager
def serving(read: Callable[[], str], status: int = 200) -> Iterator[str]:
    """Serve a text at a free port, and yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = read().encode()
            self.send_response(status if self.path == "/metrics" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def metrics_of(engine: Engine) -> str:
    assert engine.connector is not None
    assert engine.connector.connector_scheduler is not None
    return engine.connector.connector_scheduler.metrics.text()


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return f"127.0.0.1:{unused.getsockname()[1]}"


def printed(watch: Watch, width: int) -> str:
    console = Console(file=StringIO(), width=width, highlight=False)
    console.print(render(watch, width))
    file = console.file
    assert isinstance(file, StringIO)
    return file.getvalue()


def test_rates_of_two_engines_between_two_scrapes() -> None:
    now = [100.0]
    with tiered_engine(MemoryTiers()) as first, tiered_engine(MemoryTiers()) as second:
        ask(first, tokens(33), "first")
        forget(first)
        with (
            serving(lambda: metrics_of(first)) as one,
            serving(lambda: metrics_of(second)) as two,
        ):
            urls = [f"http://{one}/metrics", f"http://{two}/metrics"]
            watch = Watch(urls, lambda: now[0])
            watch.take({url: scrape(url, 10.0) for url in urls})
            busy, idle = watch.engines
            assert (busy.loaded_tokens, busy.computed_tokens, busy.hit_rate) == (0, 33, 0)
            assert busy.loaded_per_second is None, "one scrape gives no rate"
            assert busy.misses == {"never stored": 1}
            assert (idle.computed_tokens, idle.hit_rate) == (0, None)

            ask(first, tokens(33), "again")
            expect_idle(first)
            now[0] += 4.0
            watch.take({url: scrape(url, 10.0) for url in urls})
            busy, idle = watch.engines
            assert (busy.loaded_tokens, busy.loaded_per_second, busy.computed_per_second) == (32, 8, 0.25)
            assert busy.hit_rate == pytest.approx(32 / 33), "of the time between the scrapes"
            assert busy.bandwidth is not None
            assert busy.load_seconds is not None
            assert busy.load_seconds > 0
            assert idle.loaded_per_second == 0
            (disk,) = busy.tiers
            assert disk.name == "disk"
            assert disk.used is not None
            assert 0 < disk.used <= 1
            assert disk.promoted_per_second is not None
            assert disk.promoted_per_second > 0
            assert not disk.suspended
            for width in (80, 120):
                text = printed(watch, width)
                assert max(map(len, text.splitlines())) <= width
                assert one in text
                assert two in text
                assert "97%" in text
                assert f"misses of {one}: never stored 1" in text


def test_seconds_saved_are_computing_less_loading() -> None:
    with tiered_engine(MemoryTiers()) as engine:
        assert engine.connector is not None
        scheduler = engine.connector.connector_scheduler
        assert scheduler is not None
        ask(engine, tokens(33), "first")
        forget(engine)
        scheduler.cost.learn_step(100, 1e6)  # computing takes very long
        per_token = scheduler.cost.saved_seconds(1)
        assert per_token > 1e3
        assert scheduler.stats.saved_seconds == 0
        ask(engine, tokens(33), "again")
        expect_idle(engine)
        explanation = scheduler.explain("again")
        assert explanation is not None
        assert explanation.load_seconds is not None
        saved = scheduler.stats.saved_seconds
        assert saved == pytest.approx(32 * per_token - explanation.load_seconds, abs=1e-6)
        (shown,) = re.findall(r"^kvtier_saved_seconds_total (\S+)$", metrics_of(engine), re.MULTILINE)
        assert float(shown) == saved


def test_a_snapshot_of_a_server_and_of_some_that_give_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with tiered_engine(MemoryTiers()) as engine:
        ask(engine, tokens(33), "first")
        nobody = closed_port()
        with (
            serving(lambda: metrics_of(engine)) as good,
            serving(lambda: "vllm:num_requests_running 1\n<html>kvtier_</html>\n") as other,
            serving(lambda: "", status=500) as broken,
        ):
            assert main(["top", good, "--once"]) == 0
            assert re.search(rf"{good} +0 +33 +0% ", capsys.readouterr().out), (
                "totals, as there are no rates"
            )
            assert main(["top", good, other, broken, nobody, "--json"]) == 1
            found = json.loads(capsys.readouterr().out)
            assert main(["top", good, other, "--once"]) == 1
            assert f"{other}: reachable, but shows no metrics of kvtier" in capsys.readouterr().out
    assert [one["name"] for one in found["engines"]] == [good]
    assert found["engines"][0]["computed_tokens"] == 33
    assert {one["name"]: one["problem"] for one in found["problems"]} == {
        other: "reachable, but shows no metrics of kvtier",
        broken: "unreachable: the server answered 500 Internal Server Error",
        nobody: "unreachable: Connection refused",
    }


def test_a_server_that_answers_too_slowly_or_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 99.0])
    with serving(lambda: "x" * 300_000) as url:
        late = scrape(f"http://{url}/metrics", 10.0, lambda: next(times, 99.0))
        assert late.problem == "unreachable: timed out"
        monkeypatch.setattr("kvtier.cli.scrape._MOST_BYTES", 1000)
        assert "MiB of metrics" in str(scrape(f"http://{url}/metrics", 10.0).problem)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = scrape(f"http://127.0.0.1:{silent.getsockname()[1]}/metrics", 0.05)
        assert found.problem == "unreachable: timed out"


@pytest.mark.parametrize(
    ("head", "piece"),
    [(b"HTTP/1.1 200 OK\r\nX: ", b"a"), (b"HTTP/1.1 200 OK\r\n\r\n", b"\n"), (b"", b"")],
)
def test_a_server_that_trickles_holds_no_snapshot(head: bytes, piece: bytes) -> None:
    with trickling(head, piece) as url:
        assert scrape(f"{url}/metrics", 0.3).problem == "unreachable: timed out"


def test_a_snapshot_waits_for_no_thread() -> None:
    with trickling(b"") as url:
        scraper = Scraper([url])
        scraper.start()
        assert scraper.wait_all(0.1) == {url: Scrape({}, "unreachable: no answer in 0.1 s")}


def test_what_a_server_sends_controls_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        'kvtier_misses_total{engine="\x1b[41m",reason="\x1b]0;title\x07"} 2\n'
        'kvtier_tier_used_bytes{engine="\x1b[41m",tier="\x9b31m"} 2\n'
        'kvtier_asked_tokens_total{engine="0"} 2\n'
    )
    refusal = b"HTTP/1.1 500 \x1b[41mred\r\nContent-Length: 0\r\n\r\n"
    with serving(lambda: text) as url, trickling(refusal) as other:
        assert main(["top", url, other, "--once"]) == 1
    shown = capsys.readouterr().out
    assert shown.replace("\n", "").isprintable()
    for part in (r"#\x1b[41m", r"\x1b]0;title\x07 2", r"\x9b31m", r"500 \x1b[41mred"):
        assert part in " ".join(shown.split())


def test_json_has_no_figure_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(
        f'kvtier_misses_total{{engine="{number}",reason="{value}"}} {value}\n'
        f'kvtier_load_bytes_total{{engine="{number}"}} 1e17\n'
        f'kvtier_load_seconds_sum{{engine="{number}"}} 5e-324\n'
        f'kvtier_used_bytes{{engine="{number}"}} {value}\n'
        f'kvtier_capacity_bytes{{engine="{number}"}} {value}\n'
        for number, value in enumerate(["NaN", "+Inf", "-Inf", "1e999", "1e308", "7"])
    )
    with serving(lambda: text) as url:
        assert main(["top", url, "--json"]) == 0

    def refuse(name: str) -> None:
        raise AssertionError(name)

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert [engine["misses"] for engine in found["engines"]] == [{}] * 5 + [{"7": 7}]


def test_engines_differ_on_a_narrow_terminal() -> None:
    names = [f"node-{number}.rack.example.com:8000" for number in (1, 2)]
    watch = Watch([f"http://{name}/metrics" for name in names], lambda: 0.0)
    text = 'kvtier_asked_tokens_total 10\nkvtier_tier_used_bytes{tier="disk"} 5\n'
    watch.take({f"http://{name}/metrics": Scrape(parse(text)) for name in names})
    for width in range(36, 130):
        shown = printed(watch, width)
        assert max(map(len, shown.splitlines())) <= width
        assert [shown.count(name) for name in names] == [2, 2], width


def test_the_text_format() -> None:
    text = (
        "# HELP kvtier_loads_total Loads.\n"
        'vllm:kvtier_loads_total{engine="0",model_name="a\\"}b\\\\, c\\n"} 3.0\n'
        'vllm:kvtier_loads_total{engine="1",model_name="m",} 4 1700000000000\n'
        'vllm:kvtier_loads_created{engine="1"} 5\n'
        'vllm:kvtier_load_seconds_bucket{engine="1",le="+Inf"} 5\n'
        'vllm:kvtier_misses_total{engine="1",reason="never stored"} 1e3\n'
        'vllm:kvtier_tier_used_bytes{engine="1",tier="d\\"k"} +Inf\r\n'
        'vllm:kvtier_used_bytes{engine="1"} NaN\n'
        'kvtier_broken{engine="1} 5\n'
        "kvtier_broken many\n"
        "kvtier_index_blocks 7\n"
    )
    engines = parse(text)
    assert set(engines) == {"0", "1"}
    assert engines["0"].values == {"loads_total": 3}
    assert set(engines["1"].values) == {"loads_total", "used_bytes"}
    assert engines["1"].misses == {"never stored": 1000}
    assert engines["1"].tiers == {'d"k': {"used_bytes": float("inf")}}
    watch = Watch(["http://h:1/metrics"], lambda: 0.0)
    watch.take({"http://h:1/metrics": Scrape(engines)})
    assert [engine.name for engine in watch.engines] == ["h:1 #0", "h:1 #1"]
    assert "h:1 #1" in printed(watch, 80), "NaN and infinity are shown as not known"


def figures(now: str, before: str) -> EngineFigures:
    watch, times = Watch(["http://h/metrics"], iter([1.0, 3.0]).__next__), (before, now)
    for text in times:
        watch.take({"http://h/metrics": Scrape(parse(text))})
    return watch.engines[0]


def test_an_engine_that_was_started_anew_counts_from_zero() -> None:
    again = figures("kvtier_asked_tokens_total 10\n", "kvtier_asked_tokens_total 90\n")
    assert (again.computed_per_second, again.hit_rate) == (None, 0)
    assert (
        figures("kvtier_asked_tokens_total 90\n", "kvtier_asked_tokens_total 10\n").computed_per_second == 40
    )


def test_a_suspended_tier_is_named() -> None:
    watch = Watch(["http://h/metrics"], lambda: 0.0)
    text = 'kvtier_tier_suspended{tier="valkey"} 1\nkvtier_tier_late_total{tier="valkey"} 7\n'
    watch.take({"http://h/metrics": Scrape(parse(text))})
    assert re.search(r"valkey .* 7 +suspended", printed(watch, 80))


@pytest.mark.parametrize(
    "url", ["ftp://host/metrics", "http://", "file:///etc/passwd", "host:port", "a b:1"]
)
def test_a_wrong_address(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", url]) == 2
    assert "expected HOST:PORT or http://HOST:PORT/metrics" in capsys.readouterr().err


@contextmanager
def watching(
    *urls: str,
) -> Iterator[tuple[Callable[[bytes], None], Callable[[bytes], None], subprocess.Popen[bytes]]]:
    """Run it in a terminal: yield what waits for a text, what types keys, and the process."""
    seen = b""

    def until(text: bytes) -> None:
        nonlocal seen
        while text not in seen:
            ready, _, _ = select.select([terminal], [], [], 60)
            assert ready, seen[-2000:]
            seen += os.read(terminal, 1 << 16)
        seen = seen.partition(text)[2]

    terminal, inner = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    command = [sys.executable, "-m", "kvtier", "top", *urls]
    with subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=environment) as process:
        yield until, lambda keys: os.write(terminal, keys) and None, process
    os.close(inner)
    os.close(terminal)


def test_keys_in_a_terminal() -> None:
    """It shows the engine, pauses, sorts, quits, and gives the terminal back as it was."""
    with (
        serving(lambda: "kvtier_asked_tokens_total 10\nkvtier_loaded_tokens_total 5\n") as url,
        watching(url) as (until, press, process),
    ):
        until(b"50%")
        press(b"p")
        until(b"paused")
        press(b"s")
        until(b"sort (loaded/s)")
        press(b"q")
        until(b"\x1b[?1049l")
        assert process.wait(60) == 0


@pytest.mark.parametrize("end", ["q", "ctrl-c"])
def test_keys_do_not_wait_for_a_server_that_hangs(end: str) -> None:
    with (
        serving(lambda: "kvtier_asked_tokens_total 10\nkvtier_loaded_tokens_total 5\n") as url,
        trickling(b"HTTP/1.1 200 OK\r\nX: ", b"a") as other,
        watching(url, other.removeprefix("http://")) as (until, press, process),
    ):
        until(b"50%")
        press(b"s")
        until(b"sort (loaded/s)")
        if end == "q":
            press(b"q")
        else:
            process.send_signal(signal.SIGINT)
        until(b"\x1b[?1049l")
        assert process.wait(60) == 0
