"""Compiled commands make the same calls of the driver as those in Python; the driver only records them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.cuda_kit import FakeDriver, compiled_only

from kvtier.errors import TransferError
from kvtier.testing.caches import make_caches, make_config
from kvtier.transfer.cuda.commands import (
    CommandKind,
    CopyPages,
    KernelArgs,
    LaunchKernel,
    Placeholder,
    PythonSubmitter,
    SimpleBounds,
    WriteArgs,
    make_submitter,
)
from kvtier.transfer.cuda.driver import Launch
from kvtier.transfer.cuda.pieces import Pages, PoolMap, Rows

POOL = 1 << 40


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    fake.use(monkeypatch)
    return fake


def pool_map() -> PoolMap:
    config = make_config(make_caches("kv_first"))
    return PoolMap(POOL, config.row_bytes, 4096, config)


def forms(*, to_pool: bool = True) -> list[Any]:
    compiled = make_submitter(pool_map(), to_pool=to_pool, pinned=True)
    assert not isinstance(compiled, PythonSubmitter)
    return [compiled, PythonSubmitter(pool_map(), to_pool=to_pool)]


numbers = st.integers(1, 1 << 47)
maybe = st.one_of(st.just(0), numbers)


@compiled_only
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers(1, 40), st.booleans(), st.booleans(), st.lists(maybe, min_size=3, max_size=3))
def test_kernels_get_the_same_arguments_and_launches(
    fake: FakeDriver, data: st.DataObject, size: int, in_pool: bool, has_copy: bool, events: list[int]
) -> None:
    blocks = np.array(data.draw(st.lists(numbers, min_size=2 * size, max_size=2 * size)), np.int64)[::2]
    rows = Rows(blocks >> 16 if in_pool else None, data.draw(numbers), data.draw(st.integers(1, 1 << 10)))
    first = data.draw(st.integers(0, size - 1))
    last = data.draw(st.integers(first + 1, size))
    offset, stream = data.draw(numbers), data.draw(numbers)
    kernel = Launch(*(data.draw(st.integers(1, 1 << 20)) for _ in Launch._fields))
    written = [(ctypes.c_int64 * 100)() for _ in range(2)]
    fake.calls.clear()
    calls = []
    for form, memory in zip(forms(), written, strict=True):
        args = KernelArgs(ctypes.addressof(memory), *((7, 8, 9) if has_copy else (0, 0, 0)), max_blocks=50)
        form.write_args(args, blocks, first, last, rows, offset)
        form.launch(kernel, args, last - first, stream, *events)
        calls.append([tuple("args" if arg == args.host else arg for arg in call) for call in fake.calls])
        fake.calls.clear()
    assert calls[0] == calls[1]
    assert written[0][:] == written[1][:]
    assert written[0][: last - first] == blocks[first:last].tolist()


@compiled_only
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers(1, 40), st.integers(1, 4), st.booleans(), st.booleans(), st.booleans())
def test_ranges_are_copied_alike(
    fake: FakeDriver,
    data: st.DataObject,
    size: int,
    num_pages: int,
    as_they_are: bool,
    to_pool: bool,
    has_batches: bool,
) -> None:
    """Blocks and rows are drawn from few, so that many are neighbours, at one end or at both, and some
    across a seam.
    """
    page = data.draw(st.sampled_from([512, 1 << 20]))
    few = st.lists(st.integers(0, 20), min_size=size, max_size=size)
    runs = st.sampled_from([np.arange(size), np.array(data.draw(few))])
    blocks, rows = data.draw(runs), Rows(data.draw(runs), POOL, num_pages * page)
    order = np.arange(num_pages)
    apart = data.draw(st.sampled_from([page, 1 << 30]))
    pages = Pages(
        apart * order, np.full(num_pages, num_pages * page), np.full(num_pages, page), page * order
    )
    first = data.draw(st.integers(0, size - 1))
    last = data.draw(st.integers(first + 1, size))
    side_done, *events = data.draw(st.lists(maybe, min_size=5, max_size=5))
    with pytest.MonkeyPatch.context() as patch:
        other = FakeDriver(has_batches=has_batches)
        other.use(patch)
        calls = []
        for form in forms(to_pool=to_pool):
            form.copy(pages, blocks if as_they_are else None, first, last, rows, 11, 12, side_done, *events)
            calls.append(list(other.calls))
            other.calls.clear()
    assert calls[0] == calls[1]
    assert any(name.startswith("cuMemcpy") for name, *_ in calls[0])


@compiled_only
def test_questions_are_answered_alike(fake: FakeDriver) -> None:
    for form in forms():
        fake.failing = {}
        assert form.is_over(3) is form.is_idle(4) is True
        assert form.seconds_between(1000, 3000) == 2.0
        assert form.wait_over(6) is None
        fake.failing = {"cuEventQuery": 600, "cuStreamQuery": 600}
        assert form.is_over(3) is form.is_idle(4) is False
    assert fake.calls[: len(fake.calls) // 2] == fake.calls[len(fake.calls) // 2 :]


@compiled_only
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(-1, 12), max_size=6), st.lists(st.integers(-1, 10), max_size=6), st.booleans())
def test_a_job_is_simple_if_all_ids_are_valid_and_the_engine_is_idle(
    fake: FakeDriver, blocks: list[int], slots: list[int], busy: bool
) -> None:
    bounds, ids = (
        SimpleBounds(POOL, 512, num_blocks=12, num_slots=10),
        (np.array(blocks, int), np.array(slots, int)),
    )
    is_simple = (
        len(blocks) == len(slots) > 0
        and not busy
        and {*blocks} <= {*range(1, 12)}
        and {*slots} <= {*range(10)}
    )
    fake.failing = {"cuStreamQuery": 600} if busy else {}
    compiled, python = forms()
    assert compiled.is_simple(bounds, *ids, 7) == is_simple
    assert python.is_simple(bounds, *ids, 7) is False


@compiled_only
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.lists(st.sampled_from(CommandKind), max_size=6), maybe, maybe)
def test_scripts_are_played_command_by_command(
    fake: FakeDriver, data: st.DataObject, which: list[CommandKind], start: int, wait: int
) -> None:
    memory = (ctypes.c_int64 * 16)()
    args = KernelArgs(ctypes.addressof(memory), 0, 0, 0, max_blocks=4)
    blocks, rows = np.array([5, 6, 7, 8]), Rows(np.array([3, 1, 2, 0]), POOL, 64)
    first = data.draw(st.integers(0, 3))
    last = data.draw(st.integers(first + 1, 4))
    own = Placeholder
    either, wait_for = st.sampled_from([own.START, 0, 21]), st.sampled_from([own.WAIT, 0, 22])
    span = own.FIRST, own.LAST
    any_rows, any_blocks = st.sampled_from([own.ROWS, ROWS]), st.sampled_from([own.BLOCKS, None])
    commands_of = {
        CommandKind.WRITE_ARGS: lambda: WriteArgs(args, own.BLOCKS, *span, data.draw(any_rows), 8),
        CommandKind.LAUNCH: lambda: LaunchKernel(
            KERNEL, args, own.COUNT, 1, data.draw(either), data.draw(wait_for), 23
        ),
        CommandKind.COPY: lambda: CopyPages(
            PAGES, data.draw(any_blocks), *span, own.ROWS, 1, 2, 3, data.draw(st.sampled_from([0, 20])),
            data.draw(either), own.WAIT, 24,
        ),
    }  # fmt: skip
    script = tuple(commands_of[kind]() for kind in which)
    given = {"blocks": blocks, "first": first, "last": last, "count": last - first, "rows": rows}
    given |= {"start": start, "wait": wait}
    one_by_one = PythonSubmitter(pool_map(), to_pool=True)
    calls = {
        WriteArgs: one_by_one.write_args,
        LaunchKernel: one_by_one.launch,
        CopyPages: one_by_one.copy,
    }
    fake.calls.clear()
    for command in script:
        arguments = command[:-1]
        calls[type(command)](*(given[item] if isinstance(item, str) else item for item in arguments))
    expected, written = list(fake.calls), memory[:]
    for form in forms():
        memory[:] = [0] * 16
        fake.calls.clear()
        form.play(script, *given.values())
        assert fake.calls == expected
        assert memory[:] == (written if CommandKind.WRITE_ARGS in which else [0] * 16)


ARGS = KernelArgs(0, 0, 0, 0, 4)
KERNEL = Launch(1, 1, 0, 1, 1, 1, 1)
IDS = np.arange(4)
COMMAND = LaunchKernel(KERNEL, ARGS, Placeholder.COUNT, 1, 0, 0, 0)
ROWS = Rows(IDS, POOL, 2048)
PAGES = Pages(*(np.array([value]) for value in (0, 64, 64, 0)))


@compiled_only
@pytest.mark.parametrize(
    ("failing", "call", "args"),
    [
        ("cuLaunchKernel", "launch", (KERNEL, ARGS, 0, 1, 0, 0, 0)),
        ("cuEventRecord", "launch", (KERNEL, ARGS, 0, 1, 2, 0, 0)),
        ("cuStreamWaitEvent", "launch", (KERNEL, ARGS, 0, 1, 0, 2, 0)),
        ("cuMemcpyAsync", "write_args", (KernelArgs(0, 1, 2, 3, 4), IDS, 0, 0, ROWS, 0)),
        ("cuStreamWaitEvent", "copy", (PAGES, None, 0, 1, ROWS, 1, 0, 0, 2, 0, 0, 0)),
        ("cuMemcpyAsync", "copy", (PAGES, None, 0, 1, ROWS, 1, 0, 0, 0, 0, 0, 0)),
        ("cuMemcpyBatchAsync", "copy", (PAGES, None, 0, 4, ROWS, 1, 0, 0, 0, 0, 0, 0)),
        ("cuLaunchKernel", "play", ((COMMAND,), IDS, 0, 1, 1, ROWS, 0, 0)),
        ("cuEventQuery", "is_over", (1,)),
        ("cuStreamQuery", "is_idle", (1,)),
        ("cuEventSynchronize", "wait_over", (1,)),
        ("cuEventElapsedTime", "seconds_between", (1, 2)),
    ],
)
def test_a_failed_call_raises_with_the_name_of_its_error(
    fake: FakeDriver, failing: str, call: str, args: tuple[Any, ...]
) -> None:
    fake.failing = {failing: 719}
    for form in forms():
        fake.calls.clear()
        with pytest.raises(TransferError, match=r"CUDA_ERROR_719 \(719\)"):
            getattr(form, call)(*args)
        assert fake.calls[-1][0] == failing, "nothing is enqueued after the failed call"


@compiled_only
@pytest.mark.parametrize(
    ("call", "args"),
    [
        ("write_args", (ARGS, IDS, 0, 5, ROWS, 0)),
        ("write_args", (ARGS._replace(max_blocks=3), IDS, 0, 4, ROWS, 0)),
        ("write_args", (ARGS, IDS, -1, 3, ROWS, 0)),
        ("write_args", (ARGS, IDS, 3, 2, ROWS, 0)),
        ("write_args", (ARGS, None, 0, 4, ROWS, 0)),
        ("write_args", (ARGS, IDS, 0, 4, ROWS._replace(ids=IDS[:2]), 0)),
        ("write_args", (ARGS, IDS, 0, 4, ROWS._replace(base=None), 0)),
        ("write_args", (ARGS, IDS.astype(np.int32), 0, 4, ROWS, 0)),
        ("write_args", (ARGS[:4], IDS, 0, 4, ROWS, 0)),
        ("write_args", (ARGS, IDS, 0, 4, ROWS)),
        ("launch", (KERNEL[:3], ARGS, 1, 1, 0, 0, 0)),
        ("launch", (KERNEL, ARGS, None, 1, 0, 0, 0)),
        ("launch", (KERNEL, ARGS, 1, 1, 0, 0)),
        ("copy", (PAGES, None, 0, 5, ROWS, 1, 0, 0, 0, 0, 0, 0)),
        ("copy", (PAGES, None, 0, 4, None, 1, 0, 0, 0, 0, 0, 0)),
        ("copy", (PAGES, IDS[:3], 0, 4, ROWS, 1, 0, 0, 0, 0, 0, 0)),
        ("copy", (PAGES, None, -2, 1, ROWS, 1, 0, 0, 0, 0, 0, 0)),
        ("copy", (PAGES, None, 3, 1, ROWS, 1, 0, 0, 0, 0, 0, 0)),
        ("copy", (PAGES[:3], None, 0, 1, ROWS, 1, 0, 0, 0, 0, 0, 0)),
        ("copy", (PAGES._replace(size=IDS[:0]), None, 0, 1, ROWS, 1, 0, 0, 0, 0, 0, 0)),
        ("is_over", ("1",)),
        ("play", ((COMMAND,), IDS, 0, 1, 1, ROWS, 0)),
        ("play", ([COMMAND], IDS, 0, 1, 1, ROWS, 0, 0)),
        ("play", ((COMMAND._replace(kind=3),), IDS, 0, 1, 1, ROWS, 0, 0)),
        ("play", ((COMMAND._replace(kind=-1),), IDS, 0, 1, 1, ROWS, 0, 0)),
        ("play", (((*range(13), CommandKind.LAUNCH),), IDS, 0, 1, 1, ROWS, 0, 0)),
        ("play", (((),), IDS, 0, 1, 1, ROWS, 0, 0)),
        ("play", ((7,), IDS, 0, 1, 1, ROWS, 0, 0)),
        ("play", ((COMMAND._replace(done="starts"),), IDS, 0, 1, 1, ROWS, 0, 0)),
        ("play", ((COMMAND._replace(done="no such name"),), IDS, 0, 1, 1, ROWS, 0, 0)),
        ("play", ((COMMAND._replace(done="\0"),), IDS, 0, 1, 1, ROWS, 0, 0)),
        ("play", ((COMMAND._replace(done=""),), IDS, 0, 1, 1, ROWS, 0, 0)),
        ("play", ((COMMAND._replace(done="start"),), IDS, 0, 1, 1, ROWS, None, 0)),
    ],
)
def test_bad_arguments_are_refused_before_any_call(
    fake: FakeDriver, call: str, args: tuple[Any, ...]
) -> None:
    with pytest.raises((TypeError, ValueError)):
        getattr(forms()[0], call)(*args)
    assert fake.calls == []


def test_python_serves_memory_that_is_not_pinned() -> None:
    """Its copies may wait, and must not keep the GIL while they do."""
    assert isinstance(make_submitter(pool_map(), to_pool=True, pinned=False), PythonSubmitter)
