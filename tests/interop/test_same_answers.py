"""Our index and Dynamo's, asked in the same words about the same publisher, give the same answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.interop.dynamo import INSTALLED, DynamoIndexer
from tests.interop.indexer import IndexerClient, Worker
from tests.interop.test_dynamo import ENCODINGS, following, free_port, publish, publisher
from tests.interop.traffic import Traffic

from kvtier.index.server import IndexServer

pytestmark = pytest.mark.skipif(not INSTALLED, reason="ai-dynamo-runtime is not installed")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[IndexerClient, IndexerClient]]:
    """Give Dynamo's indexer and ours."""
    with DynamoIndexer(tmp_path_factory.mktemp("dynamo"), free_port()) as dynamo, IndexServer() as ours:
        yield dynamo, IndexerClient(ours.url, dumps_parents=False)


@ENCODINGS
@pytest.mark.parametrize("seed", range(3))
def test_who_holds_how_much_of_a_prompt(both: tuple[IndexerClient, IndexerClient], encoding: str, seed: int) -> None:
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
