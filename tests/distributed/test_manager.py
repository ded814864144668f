"""CheckpointManager on real ranks: any strategy, at any world size; what fails on one rank, fails on all by name."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import pytest
import torch

from dcp_remote import load
from dcp_remote.errors import CheckpointNotFoundError
from dcp_remote.testing.servers import S3Server
from tests.distributed.managed import (
    Ended,
    assert_saved,
    count_collectives,
    evaluate_beside,
    fail_on_one_rank,
    guard_a_save,
    leave_by_an_error,
    look_and_save,
    miss_a_use,
    restore_own,
    resume,
    save_in_groups,
    save_own,
    save_steps,
    sent_by_saves,
    skip_saves,
    train_during_a_save,
    train_through,
)
from tests.support.rank_pool import RankPool
from tests.support.training import STRATEGIES, assert_same, full

THREE, PAIR = range(3), range(2)
MINE = Ended("KeyError", "'mine'")


# ---- training, saved and resumed


@pytest.mark.torture
@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        ("fsdp-tp-2x2", "fsdp-tp-2x2"),
        ("fsdp-4", "fsdp-3"),
        ("ddp-2", "hsdp-2x2"),
        ("hsdp-2x2", "tp-2"),
        ("tp-2", "plain"),
        ("fsdp-3", "fsdp-3"),
        ("plain", "ddp-2"),
    ],
)
def test_a_strategy_resumes_what_another_saved(saver: str, loader: str, rank_pool: RankPool, tmp_path: Path) -> None:
    """Saved while training went on, and restored on every rank to the bit; so are steps of the strategy that saved it.

    The oracle is torch: `full_tensor` on the ranks that saved, and on the ranks that restored.
    """
    url = tmp_path.as_uri()
    saved, expected = rank_pool.run(train_through, saver, url, 1, None, ranks=STRATEGIES[saver].ranks)[0]
    for restored, later in rank_pool.run(resume, loader, url, None, ranks=STRATEGIES[loader].ranks):
        assert_same(restored, saved)
        assert not torch.equal(later["/model/head.weight"], restored["/model/head.weight"])
        if saver == loader:
            assert_same(later, expected)
    assert_same(full(load(url)), saved)


def test_on_s3(rank_pool: RankPool, s3_server: S3Server) -> None:
    """From four ranks to two of another strategy, through a server; and read here."""
    bucket = f"test-{uuid.uuid4().hex}"
    s3_server.create_bucket(bucket)
    url, options = f"s3://{bucket}/a/run", s3_server.storage_options
    saved, _ = rank_pool.run(train_through, "fsdp-4", url, 1, options)[0]
    for restored, _ in rank_pool.run(resume, "tp-2", url, options, ranks=PAIR):
        assert_same(restored, saved)
    assert_same(full(load(url, storage_options=options)), saved)


# ---- values of single ranks


def test_values_of_single_ranks(rank_pool: RankPool, tmp_path: Path) -> None:
    """From three ranks to two, and to four: who saved gets its own back, the rest keep theirs; one warning each."""
    drawn = rank_pool.run(save_own, tmp_path, ranks=THREE)
    values = [{"files": ["a", "b"]}, "a text", (1, None, 2.5)]
    for world_size in (2, 3, 4):
        restored = rank_pool.run(restore_own, tmp_path, ranks=range(world_size))
        found, next_numbers, warnings = zip(*restored, strict=True)
        assert list(found) == [*values, "untouched"][:world_size]
        assert list(next_numbers[:3]) == drawn[:world_size]
        assert len({*next_numbers, *drawn}) == max(world_size, 3)
        assert [len(told) for told in warnings] == [int(world_size != 3)] + [0] * (world_size - 1)
        assert all(f"saved by 3 ranks and is restored by {world_size}" in told for told in warnings[0])
    assert load(tmp_path, keys="per_rank.*.own")["per_rank"] == {str(n): {"own": one} for n, one in enumerate(values)}


# ---- what is sent


def test_what_is_frozen_is_sent_once(rank_pool: RankPool, tmp_path: Path) -> None:
    """By all ranks together; after a restart as well, and what every rank has also at another world size."""
    saves = rank_pool.run(sent_by_saves, tmp_path, [1, 2, 3])
    first, second, third = (sum(sent) for sent in zip(*saves, strict=True))
    assert first > 390_000
    assert max(second, third) < 0.05 * first
    (again,) = (sum(sent) for sent in zip(*rank_pool.run(sent_by_saves, tmp_path, [4]), strict=True))
    assert again < 0.05 * first
    # Rows are cut elsewhere now; 200 kB of the 392 are no rows.
    by_two = [sum(sent) for sent in zip(*rank_pool.run(sent_by_saves, tmp_path, [5, 6], ranks=PAIR), strict=True)]
    assert by_two[0] < first - 200_000 + 10_000
    assert by_two[1] < 0.05 * first
    for step in range(1, 7):
        state = load(tmp_path, step=step)
        assert torch.equal(state["base"]["replicated"], torch.arange(50_000.0))
        assert torch.equal(state["base"]["rows"], torch.arange(48_000.0).reshape(48, 1000))
        assert torch.equal(state["adapter"]["rows"], torch.full((12, 10), float(step)))


# ---- groups


@pytest.mark.parametrize(
    "groups", [[[1, 3]], [[0, 1], [2, 3]], [[2, 0], [0, 1, 3]], [[0, 1, 2, 3], [0, 1, 2, 3]]], ids=str
)
def test_managers_of_several_groups_at_a_time(groups: list[list[int]], rank_pool: RankPool, tmp_path: Path) -> None:
    """A part of the ranks, two halves, parts that overlap, and two runs of all ranks; others are refused."""
    urls = [str(tmp_path / str(n)) for n in range(len(groups))]
    values = rank_pool.run(save_in_groups, urls, groups)
    for rank in range(4):
        assert values[rank] == [10.0 * n + 2 for n, members in enumerate(groups) if rank in members]
    for n, members in enumerate(groups):
        for step in (1, 2):
            assert_saved(urls[n], step, 10 * n + step, world_size=len(members))


# ---- what fails on one rank; `tests/manager/test_failing_ranks.py` has all of it


@pytest.mark.parametrize("victim", [0, 2])
def test_what_fails_on_one_rank(victim: int, rank_pool: RankPool, tmp_path: Path) -> None:
    """Every rank raises, and names it; tried again, the same works."""
    for saved, restored in rank_pool.run(fail_on_one_rank, tmp_path, victim, ranks=THREE):
        assert saved is not None
        assert (saved.kind, saved.rank) == ("SaveFailedError", victim)
        assert restored is not None
        assert restored.kind == "PermissionDeniedError"
        assert "An injected refusal" in restored.text
    assert_saved(tmp_path, 1, 1, world_size=3)


@pytest.mark.parametrize("raising", [[0, 1, 2], [2]], ids=str)
def test_leaving_a_block_by_an_error(raising: list[int], rank_pool: RankPool, tmp_path: Path) -> None:
    """Each of these ranks raises what is its own; the save that was under way is committed."""
    endings = rank_pool.run(leave_by_an_error, tmp_path, raising, ranks=THREE)
    assert endings == [MINE if rank in raising else None for rank in THREE]
    assert_saved(tmp_path, 1, 1, world_size=3)


def test_a_save_under_a_condition_on_the_rank(rank_pool: RankPool, tmp_path: Path) -> None:
    """It fails on rank 0, with the lines in which the other ranks are, and is not counted: the next save works."""
    ending, *others = rank_pool.run(guard_a_save, tmp_path, ranks=THREE)
    assert others == [None, None]
    assert ending is not None
    assert ending.kind == "SaveTimeoutError"
    assert re.search(r" have not called the save of step 2 within \d+ s of rank 0 \(", ending.text)
    # Both wait until rank 0 is ready, by a loop that calls a function.
    assert re.search(r"now='1: (wait_until \(points\.py|<lambda> \(managed\.py):", ending.text)
    for step in (1, 3):
        assert_saved(tmp_path, step, step, world_size=3)
    with pytest.raises(CheckpointNotFoundError):
        load(tmp_path, step=2)


IN_ITS_BLOCK, IN_ITS_SAVE, CLOSED = "in its block", "in its save", "and close it"
BEFORE, NO_THREADS = "before it is made", "without threads"


@pytest.mark.torture
@pytest.mark.parametrize(
    ("raising", "using", "how"),
    [
        ([0], [], IN_ITS_BLOCK),
        ([2], [], IN_ITS_BLOCK),
        ([0], [1, 2], IN_ITS_BLOCK),
        ([2], [0, 1], IN_ITS_BLOCK),
        ([0, 1], [2], IN_ITS_BLOCK),
        ([1, 2], [0], IN_ITS_BLOCK),
        ([0], [1, 2], IN_ITS_SAVE),
        ([2], [0, 1], IN_ITS_SAVE),
        ([2], [0, 1], NO_THREADS),
        ([0], [1, 2], CLOSED),
        ([2], [0, 1], CLOSED),
        ([0], [1, 2], BEFORE),
        ([2], [0, 1], BEFORE),
    ],
)
def test_a_use_that_ranks_missed(
    raising: list[int], using: list[int], how: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    """Whether others began it or not, all ranks find each other in the next; in the one after it if nobody could know.

    Others are told at once that somebody has left, where a `with` was left by an error; or wait until the deadline.
    """
    for rank, (block, *saves) in enumerate(rank_pool.run(miss_a_use, tmp_path, raising, using, how, ranks=THREE)):
        if how == BEFORE and 0 not in raising:  # nobody counts a use to which the coordinator does not come
            assert saves[0] is not None
            saves[0] = None
        assert saves == [None, None, None]
        if rank in raising:
            assert block == (Ended("RuntimeError", "can't start new thread") if how == NO_THREADS else MINE)
        elif rank not in using:
            assert block is None
        elif how in {IN_ITS_BLOCK, IN_ITS_SAVE}:
            assert block is not None
            assert block.kind == "SaveFailedError", block
            assert ("left by an error before its first call" if how == IN_ITS_BLOCK else "mine") in block.text
        else:
            assert block is not None
            assert block.kind == "SaveTimeoutError" or how == NO_THREADS, block
    assert_saved(tmp_path, 4, 4, world_size=3)


@pytest.mark.torture(smoke=False)
def test_a_use_that_one_rank_missed_beside_another_manager(rank_pool: RankPool, tmp_path: Path) -> None:
    """The other manager goes on, and what its ranks have met in says nothing of those that come after the miss."""
    for rank, endings in enumerate(rank_pool.run(evaluate_beside, tmp_path, 1, ranks=PAIR)):
        missed = endings.pop(3)
        assert missed is not None
        assert missed == MINE if rank == 1 else "left by an error before its first call" in missed.text
        assert endings == [None] * 5


# ---- beside training


@pytest.mark.torture
@pytest.mark.parametrize(
    ("strategy", "held"), [("ddp-2", ""), ("fsdp-4", ""), ("fsdp-4", "shards/"), ("fsdp-tp-2x2", "shards/")]
)
def test_training_goes_on_during_a_save(strategy: str, held: str, rank_pool: RankPool, tmp_path: Path) -> None:
    """The first request, or the first shard, waits for four steps and thirty collectives; neither sees the other."""
    for saved, trained, alone in rank_pool.run(
        train_during_a_save, strategy, tmp_path, held, ranks=STRATEGIES[strategy].ranks
    ):
        assert_same(trained, alone)
        assert_same(full(load(tmp_path)), saved)
        assert not torch.equal(saved["/model/head.weight"], trained["/model/head.weight"])


@pytest.mark.parametrize("ranks", [PAIR, THREE, range(4)])
def test_ranks_leave_out_the_same_saves(ranks: range, rank_pool: RankPool, tmp_path: Path) -> None:
    """With `when_busy="skip"`, whenever each rank hears of the end of the save before."""
    for seed in range(2):
        answers = rank_pool.run(skip_saves, tmp_path / str(seed), seed, ranks=ranks)
        assert answers == answers[:1] * len(ranks)
        begun, steps, skipped = answers[0]
        assert steps == [step for step, is_begun in enumerate(begun, 1) if is_begun]
        assert 0 < skipped == begun.count(False)


def test_no_collective(rank_pool: RankPool, tmp_path: Path) -> None:
    """Saves, restores, a failure: the groups of training count no operation, and none is made. An all_reduce is one."""
    assert rank_pool.run(count_collectives, tmp_path, ranks=THREE) == [(0, 0, 1)] * 3


def test_a_run_at_one_world_size_after_another(rank_pool: RankPool, tmp_path: Path) -> None:
    """Each job goes on from the one before."""
    for number, world_size in enumerate((3, 1, 4, 2)):
        rank_pool.run(save_steps, tmp_path, [2 * number + 1, 2 * number + 2], ranks=range(world_size))
        for step in (2 * number + 1, 2 * number + 2):
            assert_saved(tmp_path, step, step, world_size=world_size)


def test_a_rank_that_has_one_manager_more(rank_pool: RankPool, tmp_path: Path) -> None:
    """Saves and restores of all ranks find each other."""
    rank_pool.run(look_and_save, str(tmp_path), ranks=range(2))
    assert_saved(tmp_path, 2, 2, world_size=2)
