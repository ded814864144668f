"""CheckpointManager on real ranks: any strategy, at any world size; what fails on one rank, fails on all by name."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import dcp_remote
from dcp_remote import load
from dcp_remote.errors import CheckpointNotFoundError
from dcp_remote.run.gc import find_orphans
from dcp_remote.storage import LocalStore
from dcp_remote.testing.servers import S3Server
from tests.distributed.managed import (
    RESTORE_FAILURES,
    SAVE_FAILURES,
    Ended,
    ask_for_different_steps,
    assert_saved,
    count_collectives,
    evaluate_beside,
    fail_to_restore,
    fail_to_save,
    guard_a_save,
    leave_by_an_error,
    leave_without_a_verdict,
    look_and_save,
    miss_a_use,
    own_values,
    restore_own,
    resume_each,
    save_empty_dicts,
    save_in_groups,
    save_own,
    save_steps,
    save_to_restore,
    sent_by_saves,
    train_during_a_save,
    train_through,
)
from tests.support.rank_pool import RankPool
from tests.support.states import equal
from tests.support.training import STRATEGIES, Leaves, assert_same, full

THREE, PAIR = range(3), range(2)
MINE = Ended("KeyError", "'mine'")


# ---- training, saved and resumed


@pytest.fixture(scope="module")
def runs(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Leaves, Leaves]]:
    """A run by each strategy, each of another seed: its URL, the full state as it was saved, and three steps later."""
    made = {}
    rank_pool.run(dist.get_rank)  # all start at once, where one that imports torch alone would keep others waiting
    for seed, (name, strategy) in enumerate(STRATEGIES.items()):
        url = tmp_path_factory.mktemp(name).as_uri()
        saved, later = rank_pool.run(train_through, name, url, seed, None, ranks=strategy.ranks)[0]
        made[name] = url, saved, later
    return made


@pytest.mark.torture(smoke=False)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_strategy_resumes_what_any_other_saved(
    strategy: str, rank_pool: RankPool, runs: Mapping[str, tuple[str, Leaves, Leaves]]
) -> None:
    """Saved while training went on, and restored on every rank to the bit; so are steps of the strategy that saved it.

    Each resumes its own and two others, in turn: `test_strategies` has all of them. The oracle is torch: `full_tensor`
    on the ranks that saved, and on the ranks that restored.
    """
    names = list(STRATEGIES)
    savers = [names[(names.index(strategy) + shift) % len(names)] for shift in (0, 1, 3)]
    urls = [runs[saver][0] for saver in savers]
    for states in rank_pool.run(resume_each, strategy, urls, None, ranks=STRATEGIES[strategy].ranks):
        for saver, (restored, later) in zip(savers, states, strict=True):
            _, saved, expected = runs[saver]
            assert_same(restored, saved, saver)
            assert not torch.equal(later["/model/head.weight"], restored["/model/head.weight"])
            if saver == strategy:
                assert_same(later, expected, saver)


def test_a_single_process_reads_a_run(runs: Mapping[str, tuple[str, Leaves, Leaves]]) -> None:
    """`load` gives the newest, whole, of whatever ranks saved."""
    for url, saved, _ in runs.values():
        assert_same(full(load(url)), saved, url)


def test_on_s3(rank_pool: RankPool, s3_server: S3Server) -> None:
    """From four ranks to two of another strategy, through a server; and read here."""
    bucket = f"test-{uuid.uuid4().hex}"
    s3_server.create_bucket(bucket)
    url, options = f"s3://{bucket}/a/run", s3_server.storage_options
    saved, _ = rank_pool.run(train_through, "fsdp-4", url, 1, options)[0]
    for states in rank_pool.run(resume_each, "tp-2", [url], options, ranks=PAIR):
        assert_same(states[0][0], saved)
    assert_same(full(load(url, storage_options=options)), saved)


def test_empty_dicts_of_ranks_that_differ(rank_pool: RankPool, tmp_path: Path) -> None:
    """Kept where no rank has anything; where another has something, that counts. Restored by the ranks that saved."""
    rank_pool.run(save_empty_dicts, tmp_path, ranks=THREE)
    weight = torch.ones(2)
    expected = {"a": {"x": weight, "deeper": {}}, "b": {}, "c": [{}, {"x": weight}], "d": {"e": {}}}
    for step in (1, 2):
        assert equal(load(tmp_path, step=step), expected)


# ---- values of single ranks


def test_values_of_single_ranks(rank_pool: RankPool, tmp_path: Path) -> None:
    """From four ranks to two and to four again: who is saved gets its own back, the rest keep theirs; one warning each.

    Values of different types, of one type, equal ones, and random states, whose next numbers are compared.
    """
    four = rank_pool.run(save_own, tmp_path, 1)
    for rank, (own, saved) in enumerate(zip(rank_pool.run(restore_own, tmp_path, None, 50), four, strict=True)):
        assert_own(own.values, rank)
        assert (own.step, own.draws, own.warnings) == (1, saved.draws, [])
    for rank, (own, saved) in enumerate(
        zip(rank_pool.run(restore_own, tmp_path, 1, 60, ranks=PAIR), four[:2], strict=True)
    ):
        assert_own(own.values, rank)
        assert (own.step, own.draws, len(own.warnings)) == (1, saved.draws, int(rank == 0))
        assert all(
            "saved by 4 ranks and is restored by 2: values of others are left out" in one for one in own.warnings
        )
    two = rank_pool.run(save_own, tmp_path, 2, ranks=PAIR)
    kept = rank_pool.run(restore_own, tmp_path, None, 70)
    elsewhere = rank_pool.run(restore_own, tmp_path, 1, 70)
    for rank, own in enumerate(kept):
        assert own.step == 2
        if rank in PAIR:
            assert_own(own.values, rank)
            assert own.draws == two[rank].draws
        else:
            assert own.values == [None, None, None]
            assert own.draws not in [other.draws for other in (*two, *four, *elsewhere)]
    assert [len(own.warnings) for own in kept] == [1, 0, 0, 0]
    assert "saved by 2 ranks and is restored by 4" in kept[0].warnings[0]
    assert "keys='per_rank.*'" in kept[0].warnings[0]
    values = load(tmp_path, step=1, keys="per_rank.*")["per_rank"]
    assert sorted(values) == ["0", "1", "2", "3"]
    for rank in range(4):
        assert_own([values[str(rank)][key] for key in ("different", "alike", "same")], rank)


def assert_own(values: Sequence[object], rank: int) -> None:
    """That these are the values of a rank."""
    for value, expected in zip(values, own_values(rank), strict=True):
        assert type(value) is type(expected)
        assert np.array_equal(value, expected) if isinstance(expected, np.ndarray) else value == expected  # type: ignore[arg-type]  # of one type


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


# ---- what fails on one rank


def assert_named(endings: Sequence[Ended | None], victim: int, kind: str, word: str, *, others: str) -> None:
    """That every rank raised: the victim its own error, the others one that names it and says why."""
    for rank, ending in enumerate(endings):
        assert ending is not None, rank
        assert ending.kind == (kind if rank == victim else others), (rank, ending)
        assert word in ending.text, (rank, ending)
        if rank != victim:
            assert ending.rank == victim, (rank, ending)


SAVE_CASES = [
    (failure, victim)
    for failure in SAVE_FAILURES
    for victim in (0, 2)
    if victim == 0 or failure != "create_global_plan"  # which the coordinator calls
]


@pytest.mark.parametrize(("failure", "victim"), SAVE_CASES)
def test_a_save_that_fails_on_one_rank(failure: str, victim: int, rank_pool: RankPool, tmp_path: Path) -> None:
    """In the foreground and in the background: every rank raises, and names it; tried again at once, it succeeds."""
    kind, word, others = {
        "object": ("UnsafeObjectError", "NeedsCode", "UnsafeObjectError"),
        "upload": ("SaveFailedError", "An injected refusal", "SaveFailedError"),
        "unpicklable": ("UnpicklableError", "in create_local_plan", "SaveFailedError"),
        "copy": ("UnsafeObjectError", "Uncopyable", "UnsafeObjectError"),  # in the foreground it cannot be stored
    }.get(failure, ("ZeroDivisionError", f"in {failure}", "SaveFailedError"))
    endings = rank_pool.run(fail_to_save, tmp_path, failure, victim, ranks=THREE)
    for number in (0, 1):
        assert_named([both[number] for both in endings], victim, kind, word, others=others)
    for step in (1, 2):
        assert_saved(tmp_path, step, step, world_size=3)
    # Neither of the rank that failed nor of those that had put all of theirs.
    assert find_orphans(LocalStore(str(tmp_path)), grace_seconds=0).old == ()


def test_a_rank_that_hears_of_no_end(rank_pool: RankPool, tmp_path: Path) -> None:
    """Hide the end of a save from a rank: at the next save the coordinator finds out if its shards were committed."""
    endings = rank_pool.run(leave_without_a_verdict, tmp_path, 2, ranks=THREE)
    assert all(ending is not None for (ending,) in endings)
    for step in (1, 3):
        assert_saved(tmp_path, step, step, world_size=3)
    assert find_orphans(LocalStore(str(tmp_path)), grace_seconds=0).old == ()


RESTORE_CASES = [
    (failure, victim)
    for failure in RESTORE_FAILURES
    for victim in (0, 2)
    if victim == 0 or failure != "manifest refused"  # which the coordinator alone does
]


@pytest.mark.parametrize(("failure", "victim"), RESTORE_CASES)
def test_a_restore_that_fails_on_one_rank(failure: str, victim: int, rank_pool: RankPool, tmp_path: Path) -> None:
    """Every rank raises, and names it; nothing counts as restored, until a restore that succeeds on all."""
    rank_pool.run(save_to_restore, tmp_path, ranks=THREE)
    kind, word, others = {
        "template": ("StateMismatchError", "unknown", "StateMismatchError"),
        "read refused": ("PermissionDeniedError", "An injected refusal", "PermissionDeniedError"),
        "read flipped": ("CorruptCheckpointError", "shards/", "CorruptCheckpointError"),
        "manifest refused": ("PermissionDeniedError", "An injected refusal", "PermissionDeniedError"),
    }.get(failure, ("ZeroDivisionError", f"in {failure}", "DcpRemoteError"))
    endings = rank_pool.run(fail_to_restore, tmp_path, failure, victim, ranks=THREE)
    assert_named([both[0] for both in endings], victim, kind, word, others=others)
    for _, unsaved in endings:
        assert unsaved is not None
        assert unsaved.kind == "CheckpointExistsError"
    newest = dcp_remote.latest(tmp_path)
    assert newest is not None
    assert newest.step == 5


def test_ranks_that_ask_for_different_steps(rank_pool: RankPool, tmp_path: Path) -> None:
    """Save or restore different steps: refused on all ranks, with the steps; with one step the call works."""
    for saved, saved_in_background, restored in rank_pool.run(ask_for_different_steps, tmp_path, ranks=THREE):
        for ending in (saved, saved_in_background):
            assert ending is not None
            assert ending.kind == "SaveFailedError", ending
            assert "instead of the save of step 10" in ending.text
            assert "the save of step 11" in ending.text or "the save of step 12" in ending.text
        assert restored is not None
        assert restored.kind == "InvalidArgumentError", restored
        assert "[1, 2, 1]" in restored.text
    for step in (1, 2, 3):
        assert_saved(tmp_path, step, step, world_size=3)


def test_leaving_a_block_by_an_error_of_all(rank_pool: RankPool, tmp_path: Path) -> None:
    """Each rank raises what is its own; the save that was under way is committed."""
    for ending in rank_pool.run(leave_after_all_raised, tmp_path, ranks=THREE):
        assert ending == Ended("KeyError", "'mine'")
    assert_saved(tmp_path, 1, 1, world_size=3)


def leave_after_all_raised(path: Path) -> Ended | None:
    return leave_by_an_error(path, list(THREE), before=False)


@pytest.mark.torture
@pytest.mark.parametrize("victim", [0, 2])
def test_leaving_a_block_by_an_error_of_one(victim: int, rank_pool: RankPool, tmp_path: Path) -> None:
    """Before it saves: the others are told that it has gone. After: the save is committed, and nobody else raises."""
    before = rank_pool.run(leave_before_one_saves, tmp_path / "before", victim, ranks=THREE)
    for rank, ending in enumerate(before):
        assert ending is not None
        if rank == victim:
            assert ending == Ended("KeyError", "'mine'")
        else:
            assert ending.kind == "SaveFailedError", ending
            assert "the save of step 1" in ending.text
    with pytest.raises(CheckpointNotFoundError):
        load(tmp_path / "before")
    after = rank_pool.run(leave_after_one_saved, tmp_path / "after", victim, ranks=THREE)
    assert [ending and ending.kind for ending in after] == ["KeyError" if rank == victim else None for rank in THREE]
    assert_saved(tmp_path / "after", 1, 1, world_size=3)


def leave_before_one_saves(path: Path, victim: int) -> Ended | None:
    return leave_by_an_error(path, [victim], before=True)


def leave_after_one_saved(path: Path, victim: int) -> Ended | None:
    return leave_by_an_error(path, [victim], before=False)


def test_a_save_under_a_condition_on_the_rank(rank_pool: RankPool, tmp_path: Path) -> None:
    """It fails on rank 0, with the lines in which the other ranks are, and is not counted: the next save works."""
    ending, *others = rank_pool.run(guard_a_save, tmp_path, ranks=THREE)
    assert others == [None, None]
    assert ending is not None
    assert ending.kind == "SaveTimeoutError"
    assert " have not called the save of step 2 within 1 s of rank 0 (" in ending.text
    # Both wait until rank 0 is ready, by a loop that calls a function.
    assert re.search(r"now='1: (wait_until \(rank_threads\.py|<lambda> \(managed\.py):", ending.text)
    for step in (1, 3):
        assert_saved(tmp_path, step, step, world_size=3)
    with pytest.raises(CheckpointNotFoundError):
        load(tmp_path, step=2)


IN_ITS_BLOCK, CLOSED, BEFORE, NO_THREADS = "in its block", "and close it", "before it is made", "without threads"


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
        elif how == IN_ITS_BLOCK:
            assert block is not None
            assert block.kind == "SaveFailedError", block
            assert "left by an error before its first call" in block.text
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
