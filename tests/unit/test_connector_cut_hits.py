"""An engine that takes fewer tokens than it was offered.

vLLM may cut a hit between asking and allocating: to whole blocks, or to nothing if another of its caches
lacks the tokens (`cap_external_hit`).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.unit.connector_kit import BLOCK, Request, make_host
from tests.unit.test_connector_groups import SHAPES, Shape, SmallEngine, _prompt

from kvtier.keys import make_offload_key


class CuttingEngine(SmallEngine):
    """Takes the number of tokens that `cut` makes of those offered."""

    def __init__(self, shape: Shape, per_chunk: int) -> None:
        super().__init__(shape, per_chunk)
        self.cut: Callable[[int], int] = lambda offered: offered
        self.offered: list[int] = []
        ask = self.scheduler.get_num_new_matched_tokens

        def ask_and_cut(request: Request, computed: int) -> tuple[int, bool]:
            offered, _ = ask(request, computed)
            assert offered is not None
            self.offered.append(offered)
            taken = self.cut(offered)
            return taken, taken > 0

        self.scheduler.get_num_new_matched_tokens = ask_and_cut  # type: ignore[assignment,method-assign]

    def best_end(self, request: Request, local: int) -> int:
        return local + self.cut(super().best_end(request, local) - local)


@pytest.mark.parametrize("per_chunk", [1, 2])
@pytest.mark.parametrize(
    "shape", [Shape((16,), (None,), 16), *(shape for shape in SHAPES if not shape.states)], ids=str
)
def test_a_load_that_was_cut_brings_what_the_next_token_attends_to(shape: Shape, per_chunk: int) -> None:
    prompt, step = _prompt(0, 200), shape.ends * per_chunk
    engine = CuttingEngine(shape, per_chunk)
    engine.run(Request("a", prompt))
    cuts = range(step, 200 // step * step, step)
    for cut in cuts:
        engine.cut = lambda offered, cut=cut: min(cut, offered)  # type: ignore[misc]
        engine.run(Request(f"b{cut}", prompt))
        engine.scheduler.check()
    assert engine.loaded == [min(cut, engine.offered[-1]) for cut in cuts]
    assert engine.loaded[0] < engine.offered[-1], "else nothing was cut"


@pytest.mark.parametrize("windows", [(None,), (None, 2 * BLOCK)])
def test_a_hit_that_was_cut_to_nothing_is_computed(windows: tuple[int | None, ...]) -> None:
    host, prompt, groups = make_host(windows=windows), list(range(26)), len(windows)
    host.cache(Request("a", prompt), groups)
    stores = host.scheduler.stats.stores
    again = Request("b", prompt)
    assert host.scheduler.get_num_new_matched_tokens(again, 0) == (24, True)
    blocks = host.blocks(7, groups)
    host.scheduler.update_state_after_alloc(again, blocks, 0)
    meta = host.run_new(again, blocks)
    assert not meta.reqs_to_load
    assert host.scheduler.request_finished(again, blocks) == (False, None)
    host.idle()
    explanation = host.scheduler.explain("b")
    assert explanation is not None
    assert (sum(explanation.from_tiers.values()), explanation.recomputed) == (0, 26)
    assert (host.scheduler.stats.loaded_tokens, host.scheduler.stats.stores) == (0, stores)
    assert host.scheduler.is_idle()
    host.scheduler.check()


def test_a_cut_load_whose_window_is_gone_fails_before_it_begins() -> None:
    """The pool has the window of the end that was offered, and not that of the end that was taken."""
    host, prompt = make_host(windows=(None, 2 * BLOCK)), list(range(26))
    stored = Request("a", prompt)
    host.cache(stored, 2)
    host.scheduler.manager.discard([make_offload_key(stored.block_hashes[1], 1)])
    again = Request("b", prompt)
    assert host.scheduler.get_num_new_matched_tokens(again, 0) == (24, True)
    full, window = host.blocks(3, 2)
    host.scheduler.update_state_after_alloc(again, (full, window), 3 * BLOCK)
    meta = host.idle()
    assert not meta.reqs_to_load
    (job_id,) = meta.jobs_to_end
    order = meta.jobs_to_end[job_id]
    assert (order.req_id, order.void) == ("b", True), "every rank reports the load as failed"
    assert set(full) <= set(order.block_ids) <= {*full, *window}
    host.refuse(job_id)
    assert host.scheduler.stats.loads_failed == 1
    assert host.scheduler.get_num_new_matched_tokens(Request("c", prompt), 0) == (24, True)
