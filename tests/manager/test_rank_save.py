"""State that one rank keeps between saves, while the thread of an earlier save is still running."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import SavePlan

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.threads import OneTimeEvent
from dcp_remote.coordination.group import RankGroup
from dcp_remote.errors import SaveFailedError
from dcp_remote.format.catalog import Attempt
from dcp_remote.manager.rank_save import RankSaver
from dcp_remote.manager.reports import RankFigures
from dcp_remote.manager.save_planning import Agreed, Task
from dcp_remote.run.job import CheckpointLabels, JobSession
from dcp_remote.saving.plan_cache import RunPlanner
from dcp_remote.serialization.leaves import FlatState
from dcp_remote.storage import MemoryStore
from dcp_remote.storage.counting import CountingStore

LOST = SaveFailedError("Rank 0 has been silent for a minute.")


class _LostCoordinator:
    """Collective operation that loses the coordinator once this rank has put its shards."""

    ended_before_commit = False

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self._meanwhile = meanwhile

    def set_activity(self, text: str) -> None:
        pass

    def gather(self, value: object, decide: object) -> NoReturn:
        self._meanwhile()
        raise LOST


def _task(step: int) -> Task:
    operation: Any = SimpleNamespace(phase=lambda name: contextlib.nullcontext())
    return Task(
        CheckpointLabels.of(step),
        FlatState(values={}, paths={}),
        RunPlanner(),
        {},
        *(0.0, 0.0, 0.0, 60.0),
        operation=operation,
        background=False,
        begun=OneTimeEvent(),
    )


def _saver(store: MemoryStore, begun: dict[int, Attempt], monkeypatch: pytest.MonkeyPatch) -> RankSaver:
    """Return the saver of rank 1, which has nothing to write."""
    ranks = RankGroup(1, 2, dist.HashStore())
    saver = RankSaver(ranks, CountingStore(store), None, memory_budget_bytes=2**30, allow_pickle=False)
    figures = RankFigures(rank=1)
    report = SimpleNamespace(put_keys=(), to_sent=tuple)
    agreed = {step: Agreed(ticket, SavePlan([]), None) for step, ticket in begun.items()}
    monkeypatch.setattr(saver.planning, "agree", lambda _collective, task, **_: agreed[task.labels.step])
    monkeypatch.setattr(saver, "_upload", lambda *_: report)
    monkeypatch.setattr(saver, "_make_figures", lambda *_: figures)
    return saver


def _begin(job: JobSession, step: int) -> Attempt:
    begun = job.begin(CheckpointLabels.of(step), borrow=False, deadline=Deadline(60.0))
    assert isinstance(begun, Attempt)
    return begun


def _failed(saver: RankSaver, collective: Any, task: Task) -> None:
    with pytest.raises(SaveFailedError):
        saver.save(collective, task)


def test_whether_a_lost_coordinator_committed_is_asked_of_this_save_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost coordinator's commit is looked up for this save alone, not for an earlier one that still uploads."""
    store = MemoryStore()
    job, begun = JobSession(store), dict[int, Attempt]()
    for step in (1, 2):
        begun[step] = _begin(job, step)
    job.commit(begun[2], b"a manifest", size_bytes=1, deadline=Deadline(60.0))
    saver, before, now = _saver(store, begun, monkeypatch), _task(1), _task(2)
    _failed(saver, _LostCoordinator(lambda: _failed(saver, _LostCoordinator(), before)), now)
    assert saver.find_commit(now, LOST).step == 2
    _failed(saver, _LostCoordinator(), before)
    with pytest.raises(SaveFailedError) as caught:
        saver.find_commit(_task(3), LOST)
    assert caught.value is LOST


def test_shards_that_a_late_thread_leaves_while_ranks_agree_are_told_of_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unclear shards of an earlier save that fails just after this save's report are in the next save's report."""
    store = MemoryStore()
    begun = {1: _begin(JobSession(store), 1)}
    saver = _saver(store, begun, monkeypatch)
    monkeypatch.undo()  # the saver's own planning again
    told: list[int] = []

    class Agreeing(_LostCoordinator):
        def scatter(self, value: Any, decide: object) -> Any:
            told.append(len(pickle.loads(pickle.dumps(value.unclear))))
            saver._give_up(_LostCoordinator(), begun[1], ("shards/a",))  # type: ignore[arg-type]
            return SimpleNamespace(ticket=begun[1], is_known=True, latency_seconds=0.0)

    for _ in range(2):
        saver.planning.agree(Agreeing(), _task(2), borrow=False)  # type: ignore[arg-type]  # has what `agree` uses
    assert told == [0, 1]
