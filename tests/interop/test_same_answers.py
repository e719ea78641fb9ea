"""Our index and Dynamo's, asked in the same words about the same publisher, give the same answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.interop.dynamo import INSTALLED, DynamoIndexer
from tests.interop.indexer import IndexerClient, Worker
from tests.interop.test_dynamo import ENCODINGS, following, publish, publisher
from tests.interop.traffic import Traffic
from tests.ports import free_port
from tests.unit.server_kit import IndexServer

pytestmark = pytest.mark.skipif(not INSTALLED, reason="ai-dynamo-runtime is not installed")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[IndexerClient, IndexerClient]]:
    """Give Dynamo's indexer and ours."""
    with DynamoIndexer(tmp_path_factory.mktemp("dynamo"), free_port()) as dynamo, IndexServer() as ours:
        yield dynamo, IndexerClient(ours.url, dumps_parents=False)


@ENCODINGS
@pytest.mark.parametrize("seed", range(3))
def test_both_indexers_give_the_same_scores(
    both: tuple[IndexerClient, IndexerClient], encoding: str, seed: int
) -> None:
    traffic = Traffic(seed=200 + seed)
    with publisher(encoding=encoding) as one, ExitStack() as stack:
        workers: list[tuple[IndexerClient, Worker]] = [
            (indexer, stack.enter_context(following(indexer, one.endpoint, one))) for indexer in both
        ]
        found = set()
        for at in range(5):
            publish(one, traffic.batches(40) if at < 4 else [traffic.evict_all()])
            for indexer, worker in workers:
                indexer.wait_until_holds(worker, traffic.truth)
            for prompt in (traffic.prompt() for _ in range(40)):
                dynamos, ours = (indexer.query(worker, prompt) for indexer, worker in workers)
                assert ours == dynamos, prompt
                found.add((dynamos["gpu"] > 0, dynamos["cpu"] > dynamos["gpu"]))
        assert found == {(True, True), (True, False), (False, True), (False, False)}


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "text/plain", ""])
def test_both_indexers_accept_the_same_content_types(
    both: tuple[IndexerClient, IndexerClient], kind: str
) -> None:
    """Clients of Dynamo's indexer send JSON that says it is JSON, since it takes nothing else; nor do we."""
    body = {"instance_id": 77, "model_name": f"of {kind}", "endpoint": "tcp://127.0.0.1:1", "block_size": 4}
    statuses = [indexer.status("/register", body, {"content-type": kind}) for indexer in both]
    assert statuses == ([201, 201] if kind.startswith("application/json") else [415, 415])
    if statuses[0] == 201:
        assert [indexer.status("/unregister", body, {"content-type": kind}) for indexer in both] == [
            200,
            200,
        ]


def test_a_rank_may_be_named_or_left_out(both: tuple[IndexerClient, IndexerClient]) -> None:
    for indexer in both:
        for rank in ({}, {"dp_rank": None}, {"dp_rank": 0}):
            body = {
                "instance_id": 78,
                "model_name": "ranks",
                "endpoint": "tcp://127.0.0.1:1",
                "block_size": 4,
            } | rank
            kind = {"content-type": "application/json"}
            assert indexer.status("/register", body, kind) == 201
            assert indexer.ask("/workers")[0]["endpoints"].keys() == {"0"}
            assert indexer.status("/register", body | {"dp_rank": 0}, kind) == 409
            assert indexer.status("/unregister", body, kind) == 200
