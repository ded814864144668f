"""Cost of a commit for the coordinator, in calls and objects: they do not grow with the pieces."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import pytest

from dcp_remote.format.shard import ShardNames
from dcp_remote.saving.manifest_assembly import assemble_manifest
from dcp_remote.saving.plan_table import arrange
from dcp_remote.storage import MemoryStore
from tests.benchmark.clients.commit_cost import URL, Cost, Layout, main, plan
from tests.support.segments import lower_segments
from tests.support.work import count_work

T = TypeVar("T")


def test_nothing_is_done_piece_by_piece() -> None:
    """A later save makes as many calls for four times the pieces, and leaves as many objects."""
    counts = []
    for tensors in (20, 80):
        layout = Layout(data_parallel=1, tensors=tensors)
        planned = plan(layout, Cost())
        first, later = ([layout.report(rank, save) for rank in range(layout.ranks)] for save in (1, 2))
        assembled = partial(assemble_manifest, planned, url=URL, segment_names=ShardNames(0), put=MemoryStore().put)
        assembled(first, save_id="1" * 32)
        counts.append(count_work(partial(assembled, later, save_id="2" * 32))[1:])
    (few_calls, few_objects), (many_calls, many_objects) = counts
    assert many_calls < 1.1 * few_calls
    assert many_objects < few_objects + layout.ranks


def test_memory_grows_little_with_the_pieces() -> None:
    """Plan, first and later save of four times the pieces allocate at most 40 bytes more for each of them."""
    peaks = []
    for tensors in (20, 80):
        layout = Layout(data_parallel=64, stages=1, tensors=tensors)
        tables = [layout.table(rank) for rank in range(layout.ranks)]
        first, later = ([layout.report(rank, save) for rank in range(layout.ranks)] for save in (1, 2))
        own, planned = peak_of(partial(arrange, tables, compared=()))
        found = [own]
        with lower_segments(1000):
            assembled = partial(
                assemble_manifest, planned.planned, url=URL, segment_names=ShardNames(0), put=lambda *_: None
            )
            for save, reports in enumerate((first, later), start=1):
                found.append(peak_of(partial(assembled, reports, save_id=f"{save:032x}"))[0])
        peaks.append((layout.ranks * tensors, *found))
    (few, *before), (many, *after) = peaks
    assert max(map(int.__sub__, after, before)) < 40 * (many - few)


def peak_of(call: Callable[[], T]) -> tuple[int, T]:
    """Return the most bytes that a call has allocated at a time, and its result."""
    tracemalloc.start()
    try:
        result = call()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for the plan, and for each save."""
    main(["--data-parallel", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": CPU ")[0] for line in lines] == ["plan", "save 1", "save 2"]
