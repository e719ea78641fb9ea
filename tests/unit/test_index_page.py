"""What the index's page reads, and what it keeps from strangers: real publishers, real connections."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest
from tests.unit.server_kit import (
    SMALL,
    Client,
    IndexServer,
    T,
    publish,
    publishing,
    registered,
    stored,
    until,
)

from kvtier.events.types import BlockRemoved
from kvtier.events.wire import DecodedBatch, EventEncoder, frame_batch
from kvtier.index import sample
from kvtier.index.http import HttpLimits
from kvtier.index.prefix import FORMS, PrefixIndex
from kvtier.index.sample import Pace, PromptSample, longest, shared_prefix
from kvtier.index.service import Settings


@pytest.fixture
def client() -> Iterator[Client]:
    with IndexServer(settings=SMALL) as server:
        yield Client(server.url)


# -- the facts -------------------------------------------------------------------------------------


def test_workers_tell_what_each_publisher_holds_and_how_its_stream_fares(client: Client) -> None:
    with publishing() as publisher:
        client("POST", "/register", registered(publisher))
        assert client.listener()["tiers"] == {"gpu": 0, "cpu": 0, "storage": 0}
        publish(publisher, stored([1, 2], None, T[:8]), stored([1], None, T[:4], "CPU"))
        until(lambda: client.listener()["tiers"] == {"gpu": 2, "cpu": 1, "storage": 0})
        until(lambda: client.listener()["state"] == "exact")
        counters = client.listener()["counters"]
        assert counters["batches"] > 0
        assert counters["gaps"] == 0
        labels = '{model="m",routing_group="default",instance="1",rank="0"'
        metrics = client.metrics()
        assert metrics[f"kvtier_index_source_gaps_total{labels}}}"] == 0
        assert metrics[f'kvtier_index_worker_blocks{labels},tier="gpu"}}'] == 2


def test_models_tell_the_size_of_their_indexes(client: Client) -> None:
    assert client("GET", "/models") == (200, [])
    with publishing() as publisher:
        client("POST", "/register", registered(publisher, block_size=None))
        (model,) = client("GET", "/models")[1]
        assert (model["model_name"], model["routing_group"], model["block_size"]) == ("m", "default", None)
        publish(publisher, stored([1, 2], None, T[:8]))
        until(lambda: client("GET", "/models")[1][0]["blocks"] == 2)
        (model,) = client("GET", "/models")[1]
        assert (model["block_size"], model["budget"], model["dropped"]) == (4, SMALL.budget, 0)
        assert 0 < model["bytes"] <= model["budget"]


@pytest.mark.parametrize("keys", ["xxh3", "engine"])
@pytest.mark.parametrize("form", FORMS)
def test_shared_prefixes_are_found_in_what_routers_ask(form: str, keys: str) -> None:
    if form == "numba":
        pytest.importorskip("numba")
    settings = Settings(budget=4 << 20, form=form, keys=keys)  # type: ignore[arg-type]
    with (
        IndexServer(settings=settings) as server,
        publishing() as one,
        publishing() as two,
        publishing() as three,
    ):
        client = Client(server.url)
        assert client("GET", "/prefixes") == (200, [])
        for number, publisher in enumerate((one, two, three)):
            client("POST", "/register", registered(publisher, number))
        publish(one, stored([1, 2, 3, 4], None, T[:16]), stored([1, 2], None, T[:8], "CPU"))
        publish(two, stored([1, 2], None, T[:8]), stored([3], 2, T[8:12], "CPU"))
        publish(three, stored([1], None, T[:4], "STORAGE"))
        question = {"model_name": "m"} | (
            {"token_ids": T} if keys == "xxh3" else {"seq_hashes": [1, 2, 3, 4]}
        )
        path = "/query" if keys == "xxh3" else "/query_by_hash"

        def found() -> list[dict[str, object]]:
            client("POST", path, question)
            (model,) = client("GET", "/prefixes")[1]
            assert model["model_name"] == "m"
            return [step for prefix in model["prefixes"] for step in prefix["steps"]]

        expected = [
            {"tokens": 12, "workers": 2, "gpu": 1, "cpu": 0, "storage": 0},
            {"tokens": 4, "workers": 3, "gpu": 2, "cpu": 1, "storage": 1},
        ]
        until(lambda: found() == expected)
        publish(two, BlockRemoved([1, 2, 3], "GPU"), BlockRemoved([3], "CPU"))
        until(lambda: [step["workers"] for step in found()] == [2])


# -- the sample ------------------------------------------------------------------------------------


class Clock:
    """Goes on by `step` at every look."""

    def __init__(self, step: float = 0.0) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def batch_of(*events: object, index: PrefixIndex) -> object:
    encoder = EventEncoder()
    return index.decoder()(frame_batch(0.0, [encoder.event(event) for event in events], 0))  # type: ignore


@pytest.mark.parametrize("keys", ["xxh3", "engine"])
@pytest.mark.parametrize("form", FORMS)
def test_a_chain_grows_with_the_stores_that_follow_it(form: str, keys: str) -> None:
    if form == "numba":
        pytest.importorskip("numba")
    index = PrefixIndex(keys=keys, budget=4 << 20, form=form)  # type: ignore[arg-type]
    prompts = PromptSample(index, Pace(Clock()))
    for events in (
        [stored([9], 8, T[40:44])],  # its beginning is unknown
        [stored([1, 2], None, T[:8]), stored([7], None, T[20:24])],
        [stored([3], 2, T[8:12]), BlockRemoved([9], "GPU")],
    ):
        batch = batch_of(*events, index=index)
        index.apply("a", batch)
        prompts.offer_batch("a", batch)
    chains = [chain.tolist() for chain in prompts.chains()]
    assert [len(chain) for chain in chains] == [2, 3]
    assert chains[1][:2] == chains[0]
    assert index.match(chains[1]).on_any_tier.tolist() == [3]
    for chain in prompts.chains():
        assert shared_prefix(chain, index.match(chain)) is None, "one worker shares it with nobody"


def test_a_sample_is_bounded_and_keeps_what_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "_MOST_HASHES", 100)
    monkeypatch.setattr(sample, "_MOST_BLOCKS", 30)
    index = PrefixIndex(keys="engine", block_size=4, budget=4 << 20, form="python")
    prompts = PromptSample(index, Pace(Clock()))
    for number in range(1, 60):
        hashes = [number * 1000 + block for block in range(50)]
        batch = DecodedBatch(0.0, [stored(hashes, None, [0] * 200)], None)
        for worker in ("a", "b") if number == 3 else ("a",):
            index.apply(worker, batch)
            prompts.offer_batch(worker, batch)
    chains = prompts.chains()
    assert [len(chain) for chain in chains] == [30, 30, 30]
    assert 3000 in [int(chain[0]) for chain in chains], "two workers hold it"


def test_sampling_takes_a_small_share_of_the_time() -> None:
    clock = Clock(step=1.0)
    pace = Pace(clock)
    assert pace.begin()
    pace.end()  # a second of work
    resumed = next(look for look in range(10_000) if pace.begin())
    assert resumed >= 190


def test_one_line_for_each_beginning() -> None:
    index = PrefixIndex(keys="engine", block_size=4, budget=4 << 20, form="python")
    trunk = list(range(1, 11))
    for number in range(8):
        branch = [100 * (number // 2 + 1) + block for block in range(number)]
        blocks = trunk + branch
        index.apply(f"{number}", DecodedBatch(0.0, [stored(blocks, None, [0] * 4 * len(blocks))], None))
    found = []
    for number in (*range(8), 3):
        chain = np.array(trunk + [100 * (number // 2 + 1) + block for block in range(number)], np.uint64)
        prefix = shared_prefix(chain, index.match(chain))
        assert prefix is not None
        found.append(prefix)
    (line,) = longest(found, 20)
    assert [(step.blocks, step.workers) for step in line.steps] == [(16, 2), (10, 8)]


# -- strangers -------------------------------------------------------------------------------------

PATHS = ("/", "/style.css", "/page.css", "/page.js")


def test_the_page_is_static_and_allows_nothing_but_itself(client: Client) -> None:
    kinds = []
    for path in PATHS:
        status, headers, body = client.raw("GET", path)
        assert status == 200
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert b"innerHTML" not in body
        assert b"style=" not in body, "the policy would not let it"
        kinds.append(headers["content-type"].partition(";")[0])
        head = client.raw("HEAD", path)
        assert (head[0], head[2]) == (200, b"")
        assert head[1]["content-length"] == str(len(body))
    assert kinds == ["text/html", "text/css", "text/css", "text/javascript"]
    page = client.raw("GET", "/")[2].decode()
    assert "<script>" not in page
    assert "//" not in page.replace("tcp://", ""), "it leads nowhere else"


@pytest.mark.parametrize("path", [*PATHS, "/models", "/prefixes", "/workers"])
def test_the_page_has_the_rules_of_the_api(client: Client, path: str) -> None:
    for headers in (
        {"Host": "evil.example"},
        {"Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ):
        assert client.raw("GET", path, headers=headers)[0] == 403
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        status, headers, _ = client.raw(method, path, b"{}")
        assert (status, headers["allow"]) == (405, "GET")


@pytest.mark.parametrize(
    "target",
    [
        "/../page.js",
        "/..%2f..%2f..%2fetc/passwd",
        "/page/../page.js",
        "//page.js",
        "/page.js/",
        "/page.js%00",
        "/PAGE.JS",
        "/%2e%2e/__init__.py",
        "/page.html",
    ],
)
def test_no_other_file_is_served(client: Client, target: str) -> None:
    answer = client.bytes(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 404 ")


def test_huge_and_odd_queries(client: Client) -> None:
    assert client.raw("GET", "/?" + "a=1&" * 60)[0] == 200
    assert client.raw("GET", "/?" + "a=1&" * 100)[0] == 400
    assert client.raw("GET", "/workers?model_name=" + "x" * 10_000)[0] == 200
    assert client.raw("GET", "/prefixes?" + "x" * 20_000)[0] == 431
    assert client.raw("GET", "/models?%ff=%00&model_name=%f0%28")[0] == 200


def test_names_of_strangers_stay_json(client: Client) -> None:
    name = '</script><img src=x onerror=alert(1)>"\u2028\u202e\x07'
    with publishing() as publisher:
        body = registered(publisher, name, model_name=name)
        assert client("POST", "/register", body)[0] == 201
        for path in ("/workers", "/models", "/prefixes"):
            status, headers, _ = client.raw("GET", path)
            assert (status, headers["content-type"]) == (200, "application/json")
        assert client("GET", "/workers")[1][0]["instance_id"] == name
        assert client("GET", "/models")[1][0]["model_name"] == name


def test_many_searches_and_slow_readers_leave_the_server_answering() -> None:
    limits = HttpLimits(send_timeout=0.5, receive_timeout=0.5)
    with IndexServer(settings=SMALL, limits=limits) as server:
        client = Client(server.url)
        body = {"model_name": "m" * 4000, "endpoint": "tcp://127.0.0.1:1", "block_size": 4}
        for number in range(300):
            assert client("POST", "/register", body | {"instance_id": f"{number}" * 300})[0] == 201
        with client.connected() as slow, client.connected() as silent:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.sendall(b"GET /workers HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)
            silent.sendall(b"GET / HTT")
            assert len(client("GET", "/workers")[1]) == 300
            assert client("GET", "/health")[0] == 200
            assert client.raw("GET", "/")[0] == 200
            received = b"".join(iter(lambda: silent.recv(1 << 16), b""))
        assert received == b"", "a head that does not end is not answered"
