"""Units that several ranks want are read from the store once, whatever happens to the rank that reads for others."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from tests.distributed.exchanging import (
    COLUMNS,
    REPLICATED,
    ROWS,
    Got,
    healthy,
    restore,
    restore_by,
    restore_from_afar,
    save,
    save_many_rows,
)
from tests.support.rank_pool import RankPool, RanksFailedError

THREE, PAIR = range(3), range(2)


def assert_read_once(got: Sequence[Got]) -> int:
    """No two ranks read the same byte, and one read the manifest; how many bytes were read."""
    ranges = sorted(one for rank in got for one in rank.ranges)
    for (key, start, length), (other, begin, _) in pairwise(ranges):
        assert key != other or start + length <= begin
    assert [rank.manifests for rank in got] == [1] + [0] * (len(got) - 1)
    assert [rank.ending for rank in got] == [None] * len(got)
    assert [rank.warnings for rank in got] == [()] * len(got)
    return sum(rank.read_bytes for rank in got)


@pytest.mark.torture
@pytest.mark.parametrize("world_size", [3, 2, 4])
def test_replicated_state_is_read_once(world_size: int, rank_pool: RankPool, tmp_path: Path) -> None:
    """By all together: large and small tensors, one that is not contiguous, objects; each rank about as much.

    Saved by two. What each rank did not read it received, and all hold what was saved.
    """
    rank_pool.run(save, tmp_path, "replicated", ranks=PAIR)
    got = rank_pool.run(healthy, tmp_path, "replicated", ranks=range(world_size))
    total = assert_read_once(got)
    assert total >= 8 * REPLICATED
    for rank in got:
        assert rank.read_bytes + rank.received_bytes == total
        assert rank.read_bytes < total


def test_sharded_state_is_not_exchanged(rank_pool: RankPool, tmp_path: Path) -> None:
    """Each rank reads its own rows, and nothing else."""
    rank_pool.run(save, tmp_path, "rows", ranks=THREE)
    got = rank_pool.run(healthy, tmp_path, "rows", ranks=THREE)
    assert assert_read_once(got) == 4 * ROWS * COLUMNS
    assert [rank.received_bytes for rank in got] == [0] * 3


def test_from_rows_to_columns(rank_pool: RankPool, tmp_path: Path) -> None:
    """Every rank needs every block, and all together read each once: their tables never, as no block is left out."""
    rank_pool.run(save, tmp_path, "rows", ranks=range(4))
    got = rank_pool.run(healthy, tmp_path, "columns", ranks=THREE)
    assert assert_read_once(got) == 4 * ROWS * COLUMNS
    assert all(rank.read_bytes + rank.received_bytes == 4 * ROWS * COLUMNS for rank in got)


@pytest.mark.parametrize("budget_bytes", [2**28, 2**20])
def test_all_together(budget_bytes: int, rank_pool: RankPool, tmp_path: Path) -> None:
    """Rows, replicas, objects and values of single ranks, at another world size: each wanted byte is there once.

    But for blocks at the edges of rows. With little memory as well: what a rank has no room to keep, others read.
    """
    rank_pool.run(save, tmp_path, "mixed", ranks=range(4))
    got = rank_pool.run(restore, tmp_path, "mixed", "", -1, budget_bytes, ranks=THREE)
    assert [rank.ending for rank in got] == [None] * 3
    assert all(rank.received_bytes for rank in got)
    read = Counter(one for rank in got for one in rank.ranges)
    once = 8 * REPLICATED + 4 * ROWS * COLUMNS
    assert once <= sum(length * count for (_, _, length), count in read.items()) < 1.25 * once


def test_a_large_manifest_is_read_once_for_each_host(rank_pool: RankPool, tmp_path: Path) -> None:
    """By the coordinator, and by one other rank. What the manifest describes is read once all the same."""
    rank_pool.run(save, tmp_path, "replicated", ranks=PAIR)
    got = rank_pool.run(restore, tmp_path, "replicated", "large", 0, 2**28, ranks=range(4))
    assert [rank.ending for rank in got] == [None] * 4
    assert got[0].manifests == 1
    assert sum(rank.manifests for rank in got[1:]) == (1 if sys.platform == "linux" else 3)
    assert all(rank.received_bytes for rank in got)


def test_ranks_read_as_many_ranges_at_a_time_as_the_coordinator(rank_pool: RankPool, tmp_path: Path) -> None:
    """Only the coordinator has measured the latency of the store; the other rank has 32 ranges in flight as well."""
    rank_pool.run(save_many_rows, tmp_path, ranks=PAIR)
    assert rank_pool.run(restore_from_afar, tmp_path, ranks=PAIR) == [0.1, 0.0]


# ---- what a site forbids


@pytest.mark.parametrize("off", [(0, 1), (1,)], ids=["all", "one"])
def test_no_sockets(off: tuple[int, ...], rank_pool: RankPool, tmp_path: Path) -> None:
    """Switch the sockets of all ranks off, or of one: none opens there, and every rank reads all from the store."""
    rank_pool.run(save, tmp_path, "replicated", ranks=PAIR)
    sockets = tuple(rank not in off for rank in PAIR)
    for got in rank_pool.run(restore_by, tmp_path, "replicated", sockets, ranks=PAIR):
        assert got.received_bytes == 0
        assert got.read_bytes >= 8 * REPLICATED
        assert got.warnings == ()


# ---- trouble


@pytest.mark.torture
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("trouble", ["deaf", "gone", "lying", "stopped"])
def test_a_rank_that_gives_nothing_good(trouble: str, victim: int, rank_pool: RankPool, tmp_path: Path) -> None:
    """All hold what was saved in the end: what it does not give is read from the store by those who want it.

    It gives nothing, does not listen, gives wrong bytes, or is stopped for longer than the others' patience.
    """
    rank_pool.run(save, tmp_path, "mixed", ranks=THREE)
    got = rank_pool.run(restore, tmp_path, "mixed", trouble, victim, 2**28, ranks=THREE)
    assert [rank.ending for rank in got] == [None] * 3
    total = sum(rank.read_bytes for rank in got)
    once = 8 * REPLICATED + 4 * ROWS * COLUMNS
    assert total > once
    is_unreached = trouble in {"gone", "stopped"}
    for rank in (rank for number, rank in enumerate(got) if number != victim):
        assert (rank.fallback_bytes > 0) == (trouble != "lying")
        assert rank.unreached_ranks == is_unreached
        assert any("are read once more" in one for one in rank.warnings) == (trouble == "lying")
    assert any("`LoadReport.unreached_ranks`" in one for one in got[0].warnings) == is_unreached


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_fails_while_others_wait_for_it(victim: int, rank_pool: RankPool, tmp_path: Path) -> None:
    """Every rank raises, and names it."""
    rank_pool.run(save, tmp_path, "replicated", ranks=THREE)
    for rank in rank_pool.run(restore, tmp_path, "replicated", "refused", victim, 2**28, ranks=THREE):
        assert rank.ending is not None
        assert "An injected refusal" in rank.ending.text


@pytest.mark.torture(smoke=False)
def test_a_rank_that_is_killed_while_others_wait_for_it(rank_pool: RankPool, tmp_path: Path) -> None:
    """The others read what it owned, and then give up for its silence, as without it."""
    rank_pool.run(save, tmp_path, "replicated", ranks=THREE)
    with pytest.raises(RanksFailedError) as failed:
        rank_pool.run(restore, tmp_path, "replicated", "killed", 1, 2**28, ranks=THREE)
    assert set(failed.value.failures) == {1}
    for got in failed.value.results.values():
        assert got.ending is not None
        assert " has been silent" in got.ending.text
    for got in rank_pool.run(healthy, tmp_path, "replicated", ranks=THREE):
        assert got.ending is None
