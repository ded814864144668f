"""CheckpointManager on one process: contents of saves, restores, fencing, retention, dedup, and errors."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import dcp_remote
from dcp_remote import CheckpointManager, PerRank, RemoteReader, RemoteWriter, Retention, load
from dcp_remote.common.arrays import Buffer
from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DcpRemoteError,
    FencedError,
    InvalidArgumentError,
    PermissionDeniedError,
    SaveFailedError,
    SaveTimeoutError,
    UnsafeObjectError,
)
from dcp_remote.format.catalog import CATALOG_KEY, Catalog, thin_entry
from dcp_remote.format.keys import manifest_key
from dcp_remote.format.manifest_json import encode
from dcp_remote.manager.background_save import BackgroundSaves
from dcp_remote.run.catalog_store import read_catalog, swap
from dcp_remote.run.gc import find_orphans
from dcp_remote.run.lookup import read_manifest
from dcp_remote.run.recovery import recover
from dcp_remote.run.retention import Best
from dcp_remote.run.thinning import drop_keys
from dcp_remote.storage import MemoryStore
from dcp_remote.storage.base import Condition, Version
from dcp_remote.storage.wrapper import Request, WrappedStore
from dcp_remote.testing import Fault, FaultyStore, RecordingStore
from tests.support.rank_threads import wait_until
from tests.support.simulated_ranks import load_as_ranks, save_as_ranks
from tests.support.states import equal
from tests.support.threads import HookedStore


def state_of(step: int) -> dict[str, Any]:
    """Return a state of training at a step: a frozen part, a changing part, objects."""
    return {
        "model": {"frozen": torch.arange(50_000.0), "weight": torch.full((50, 7), float(step))},
        "optim": {"state": {"weight": {"exp_avg": torch.full((50, 7), step / 2)}}, "param_groups": [{"lr": 0.1}]},
        "step": step,
    }


def saved(store: Any, *steps: int, **options: Any) -> None:
    """Save these steps as a new job of the run."""
    with CheckpointManager(store, **options) as checkpoints:
        checkpoints.restore(state_of(0))
        for step in steps:
            checkpoints.save(step, state_of(step))


def assert_is(state: dict[str, Any], step: int) -> None:
    """Check that a state is that of a step."""
    expected = state_of(step)
    assert torch.equal(state["model"]["weight"], expected["model"]["weight"])
    assert torch.equal(state["model"]["frozen"], expected["model"]["frozen"])
    moment = state["optim"]["state"]["weight"]["exp_avg"]
    assert torch.equal(moment, expected["optim"]["state"]["weight"]["exp_avg"])
    assert state["step"] == step
    assert state["optim"]["param_groups"] == [{"lr": 0.1}]


def refusing(store: MemoryStore, what: str) -> FaultyStore:
    """Return a store that refuses each request whose verb or whose key's beginning is this."""
    refused = Fault(
        lambda verb, key, _number: verb == what or key.startswith(what),
        "request",
        persistent=True,
        error=lambda: PermissionDeniedError("not yours"),
    )
    return FaultyStore(store, [refused])


# ---- saving and restoring


def test_a_fenced_manager_changes_nothing() -> None:
    """Let a job save, and a later one: the first can neither delete, pin nor name; a manager that only looks can."""
    store = MemoryStore()
    with CheckpointManager(store) as first, CheckpointManager(store) as second, CheckpointManager(store) as looking:
        first.save(1, state_of(1), wait=True)
        first.run.name(1, "begin")
        second.restore(state_of(0), "latest")
        first.save(2, state_of(2), wait=True)
        first.run.delete(1)
        second.restore(state_of(0), "last")
        second.save(3, state_of(3), wait=True)
        calls: list[Callable[[], None]] = [
            lambda: first.run.delete(2),
            lambda: first.run.pin(2),
            lambda: first.run.unpin(2),
            lambda: first.run.name(2, "best"),
            lambda: first.run.unname("best"),
        ]
        for call in calls:
            with pytest.raises(FencedError, match="nothing was changed"):
                call()
        assert looking.run.steps() == [2, 3]
        second.run.name(2, "best")
        looking.run.pin(2)
        looking.run.delete("best", force=True)
        assert looking.run.steps() == [3]


def test_save_and_restore() -> None:
    """Restores the newest checkpoint, one by step and one by name, with the user's metadata."""
    store = MemoryStore()
    with CheckpointManager(store) as checkpoints:
        assert checkpoints.restore(state_of(0)) is None
        assert (checkpoints.run.latest(), checkpoints.run.steps(), checkpoints.wait()) == (None, [], None)
        for step in (10, 20):
            checkpoints.save(step, state_of(step), name="newest", metrics={"loss": 1 / step}, user={"note": step})
        report = checkpoints.wait()
        assert report is not None
        assert (report.step, report.world_size) == (20, 1)
        assert checkpoints.last_save is report
        assert checkpoints.run.steps() == [10, 20]
    state = state_of(0)
    with CheckpointManager(store) as checkpoints:
        newest = checkpoints.run.latest()
        assert newest is not None
        assert (newest.step, newest.names, dict(newest.metrics)) == (20, ("newest",), {"loss": 0.05})
        assert checkpoints.restore(state) == 20
        assert_is(state, 20)
        assert checkpoints.restore(state, 10) == 10
        assert_is(state, 10)
        assert checkpoints.run.user("newest") == {"note": 20}
        with pytest.raises(CheckpointNotFoundError, match="step"):
            checkpoints.restore(state, 15)
        with pytest.raises(CheckpointNotFoundError, match="newest"):
            checkpoints.restore(state, "best")
    with pytest.raises(InvalidArgumentError, match="closed"):
        checkpoints.save(30, state)


def test_others_read_a_run() -> None:
    """`load`, `latest` and torch's own load through `RemoteReader` read a run: its newest, a step, a name."""
    store = MemoryStore()
    assert dcp_remote.latest(store) is None
    saved(store, 1, 2)
    newest = dcp_remote.latest(store)
    assert newest is not None
    assert newest.step == 2
    assert_is(load(store), 2)
    assert_is(load(store, step=1), 1)
    state = state_of(0)
    load_as_ranks([state], lambda: RemoteReader(store, step=1))
    assert_is(state, 1)
    with pytest.raises(CheckpointNotFoundError, match="steps='1, 2'"):
        load(store, step=3)
    with pytest.raises(InvalidArgumentError, match="integer"):
        load(store, step=1.0)  # type: ignore[arg-type]  # the wrong type is the test


def test_what_is_changed_afterwards_is_not_saved() -> None:
    """Changes after the call are not saved: all is copied, objects included, into memory that the next save reuses."""
    store = MemoryStore()
    state = state_of(1)
    with CheckpointManager(store) as checkpoints:
        for step in (1, 2, 3):
            state["model"]["weight"].fill_(step)
            state["optim"]["state"]["weight"]["exp_avg"].fill_(step / 2)
            state["step"] = step
            checkpoints.save(step, state)
            state["model"]["weight"].fill_(-1)
            state["optim"]["state"]["weight"]["exp_avg"].fill_(-1)
            state["optim"]["param_groups"][0]["lr"] = 7.0
            state["optim"]["param_groups"][0]["lr"] = 0.1
            state["step"] = -1
    for step in (1, 2, 3):
        assert_is(load(store, step=step), step)


def test_tensors_in_values_of_one_rank_are_filled() -> None:
    """A program goes on with the tensors that it has put into a `PerRank`, as with those of the state."""
    own, other = torch.tensor([1.0, 2.0]), torch.nn.Parameter(torch.ones(2))
    expanded, grown = torch.ones(1).expand(3), torch.zeros(1)
    store = MemoryStore()

    def state() -> dict[str, PerRank[Any]]:
        return {"own": PerRank(own), "more": PerRank({"p": [other, 5], "e": expanded, "g": grown})}

    with CheckpointManager(store) as checkpoints:
        checkpoints.save(1, state(), wait=True)
    expected = {"own": own.clone(), "other": other.detach().clone()}
    own.zero_()
    other.data.zero_()
    grown = torch.zeros(2)
    restored = state()
    with CheckpointManager(store) as checkpoints:
        assert checkpoints.restore(restored) == 1
    assert restored["own"].value is own
    assert torch.equal(own, expected["own"])
    assert restored["more"].value["p"][0] is other
    assert torch.equal(other, expected["other"])
    assert other.requires_grad
    assert restored["more"].value["p"][1] == 5
    # No place for the values: replaced.
    assert torch.equal(restored["more"].value["e"], torch.ones(3))
    assert restored["more"].value["g"].shape == (1,)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"step": -1}, "step"),
        ({"step": True}, "step"),
        ({"step": 2**60}, "step"),
        ({"step": np.int64(26)}, r"Write int\(step\)"),
        ({"step": torch.tensor(26)}, r"Write int\(step\)"),
        ({"step": torch.zeros(9)}, "finished steps"),
        ({"step": {"model": torch.zeros(9)}}, "State and step are exchanged"),
        ({"step": torch.nn.Linear(1, 1)}, "State and step are exchanged"),
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "\ud800"}, "name"),
        ({"name": ["a", "a"]}, "twice"),
        ({"name": "x" * 201}, "name"),
        ({"name": 5}, "name"),
        ({"name": "100"}, "digits"),
        ({"metrics": {"loss": torch.zeros(2)}}, "number"),
        ({"metrics": {"loss": 10**400}}, "number"),
        ({"metrics": {"": 1.0}}, "name"),
        ({"metrics": 0.5}, "mapping"),
        ({"user": {"when": object()}}, "JSON"),
        ({"user": {"loss": float("nan")}}, "JSON"),
        ({"user": {"long": "x" * 2**20}}, "too large"),
        ({"user": "text"}, "mapping"),
        ({"overwrite": True, "exist_ok": True}, "exclude each other"),
        ({"state": {1: 2}}, "strings"),
        ({"state": {"per_rank": 2}}, "per_rank"),
        ({"state": {"a": {3: 1, "3": 2}}}, "equal as text"),
        ({"state": {"a": {"b.c": 1, "b": {"d": 2, "c": 3}}}}, r"Two values .* name='a.b.c' paths="),
        ({"state": {"a": [torch.zeros(1)], "a.0": torch.zeros(1)}}, r"Two values .* name='a.0'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], what: str) -> None:
    """Wrong arguments raise in the call; at most the fence is written; the next save succeeds."""
    store = MemoryStore()
    with CheckpointManager(store) as checkpoints:
        call: dict[str, Any] = {"step": 1, "state": state_of(1), "wait": True} | arguments
        with pytest.raises(InvalidArgumentError, match=what):
            checkpoints.save(call.pop("step"), call.pop("state"), **call)
        checkpoints.save(1, state_of(1), metrics={"loss": torch.tensor(0.5), "accuracy": np.float32(0.25)}, wait=True)
        (info,) = checkpoints.run.checkpoints()
    assert dict(info.metrics) == {"loss": 0.5, "accuracy": 0.25}


@pytest.mark.parametrize("name", ["timeout_seconds", "silence_seconds", "notice_seconds"])
@pytest.mark.parametrize("seconds", [0, float("nan"), float("inf"), "30"])
def test_seconds_that_are_none(name: str, seconds: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{name} must be a number above zero"):
        CheckpointManager(MemoryStore(), **{name: seconds})


def test_a_metric_that_is_not_finite(caplog: pytest.LogCaptureFixture) -> None:
    """A metric that is NaN does not end the training: it is left out of the checkpoint, with a warning."""
    store = MemoryStore()
    with CheckpointManager(store) as checkpoints:
        checkpoints.save(1, state_of(1), metrics={"loss": float("nan"), "accuracy": 0.5})
    assert [dict(entry.metrics) for entry in read_catalog(store).entries] == [{"accuracy": 0.5}]  # type: ignore[union-attr]  # a catalog was written
    assert "metric=loss" in caplog.text


def test_metrics_and_notes_are_those_of_the_call() -> None:
    """A loss is a metric as it is, though torch warns of converting it; later changes of the notes are not saved."""
    notes, loss = {"seen": [1]}, torch.tensor(0.5, requires_grad=True) * 2
    with warnings.catch_warnings(), CheckpointManager(MemoryStore()) as checkpoints:
        warnings.simplefilter("error")
        checkpoints.save(1, state_of(1), metrics={"loss": loss}, user=notes)
        notes["seen"].append(2)
        checkpoints.wait()
        assert [dict(info.metrics) for info in checkpoints.run.checkpoints()] == [{"loss": 1.0}]
        assert checkpoints.run.user() == {"seen": [1]}


@pytest.mark.parametrize(
    "state",
    [torch.optim.SGD([nn.Parameter(torch.ones(2))]), torch.ones(2), None, [torch.ones(2)]],
    ids=lambda s: type(s).__name__,
)
def test_a_state_that_is_no_dict(state: Any) -> None:
    """A state that is no dict, such as an optimizer, is refused by save and restore; the manager stays usable."""
    with CheckpointManager(MemoryStore()) as checkpoints:
        with pytest.raises(InvalidArgumentError, match=f"state must be a dict.* type='{type(state).__name__}'"):
            checkpoints.save(1, state)
        checkpoints.save(1, {"w": torch.ones(2)}, wait=True)
        with pytest.raises(InvalidArgumentError, match="state must be a dict"):
            checkpoints.restore(state)


def test_keys_that_are_no_text() -> None:
    """Integer keys of objects (a schedule's milestones) and of tensors come back as integers, to be saved again."""

    def made(value: float) -> dict[str, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=value)
        own = {0: {"best": value, 5: torch.full((2,), value), "rest": [{1: value, 2: torch.full((1,), value)}, 7]}}
        return {
            "schedule": torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 7], gamma=value),
            "loss": {0: value, 1: value / 2},
            "own": own,
            "more": PerRank({1: "a", "1": value}),
        }

    store, state, expected = MemoryStore(), made(0.25), made(0.5)
    own = state["own"][0]
    with CheckpointManager(store) as checkpoints:
        checkpoints.save(1, expected, wait=True)
        assert checkpoints.restore(state) == 1
        assert state["schedule"].state_dict() == expected["schedule"].state_dict()
        assert equal(
            [state["loss"], state["own"], state["more"].value],
            [expected["loss"], expected["own"], expected["more"].value],
        )
        assert state["own"][0] is own
        checkpoints.save(2, state)
    assert load(store)["schedule"]["milestones"] == {"3": 1, "7": 1}


@pytest.mark.parametrize("key", ["0", 0], ids=repr)
def test_lists_below_keys_that_are_no_text(key: object) -> None:
    """Saved lists replace those of the state, as below text keys: shorter, longer, empty, with None, with tensors."""

    def made(*lists: Any) -> dict[str, Any]:
        return {"history": {key: list(lists)}, "shared": {key: lists[0]}}

    saved = made([0.9, 0.8], [], [1, None, torch.zeros(1)], [[1], [2]], [{"x": 1}, torch.zeros(1)])
    state = made([5, 6, 7], [7, 8], [5, 6, torch.ones(1)], [[3, 4], [5, 6], [9, 9]], [{"x": 2}, torch.ones(1)])
    outer = state["history"]
    store = MemoryStore()
    with CheckpointManager(store) as checkpoints:
        checkpoints.save(1, saved, wait=True)
        assert checkpoints.restore(state) == 1
        assert str(state) == str(saved)
        assert state["history"] is outer
        checkpoints.save(2, state)
    assert str(load(store)["history"]) == str({str(key): saved["history"][key]})


# ---- fencing and rollback


def test_a_step_that_falls_behind() -> None:
    """A new step before the restored one is refused: no restore would choose it. `overwrite=True` replaces one."""
    store = MemoryStore()
    saved(store, 10, 20)
    with CheckpointManager(store, retention=Retention(keep_last=2)) as checkpoints:
        checkpoints.restore(state_of(0))
        for step in (1, 15):
            with pytest.raises(InvalidArgumentError, match=rf"restore\(\).* step={step} newest=20"):
                checkpoints.save(step, state_of(step), wait=True)
        checkpoints.save(10, state_of(10), overwrite=True, wait=True)
        checkpoints.save(21, state_of(21))
        checkpoints.wait()
    with CheckpointManager(store) as checkpoints:
        assert checkpoints.run.steps() == [20, 21]
        checkpoints.restore(state_of(0), 20)
        checkpoints.save(20, state_of(20), overwrite=True)  # the very step that was restored


def test_only_abandoned_checkpoints_are_left() -> None:
    """Delete the one checkpoint that counts: a job neither starts from nothing nor saves over what was abandoned."""
    store = MemoryStore()
    saved(store, 5, 10, 15)
    with CheckpointManager(store) as checkpoints:
        checkpoints.restore(state_of(0), 5)
        checkpoints.save(7, state_of(7), wait=True)
        for step in (5, 7):
            checkpoints.run.delete(step, force=True)
    with CheckpointManager(store) as checkpoints:
        for _ in range(2):
            with pytest.raises(CheckpointExistsError, match=r"rm --abandoned.* abandoned='10, 15'"):
                checkpoints.restore(state_of(0))
            with pytest.raises(CheckpointExistsError, match="restored from none"):
                checkpoints.save(10, state_of(0), wait=True)
        assert [entry.step for entry in checkpoints.run.checkpoints()] == [10, 15]
        assert checkpoints.restore(state_of(0), 10) == 10
        checkpoints.save(11, state_of(11), wait=True)
        checkpoints.run.delete(11, force=True)
    with CheckpointManager(store, start_over=True) as checkpoints:
        assert checkpoints.restore(state_of(0)) is None
        checkpoints.save(10, state_of(1), wait=True)


def test_what_is_left_behind_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A job that rolls back or starts over logs once what it abandons; a job that starts from nothing logs that."""
    store = MemoryStore()
    saved(store, 10, 20)
    assert "starts from nothing" in caplog.text
    caplog.clear()
    with CheckpointManager(store, resumed_from=1) as checkpoints:
        checkpoints.save(2, state_of(2))
    with CheckpointManager(store, start_over=True) as checkpoints:
        checkpoints.save(1, state_of(1))
    assert "goes on from step 1: its first commit abandons 10, 20" in caplog.text
    assert "starts over: its first commit abandons 2" in caplog.text
    assert "nothing" not in caplog.text


def test_a_run_that_was_not_restored() -> None:
    """Saving into a run without a restore is refused; `resumed_from` and `start_over` allow it."""
    store = MemoryStore()
    saved(store, 10, 20)
    with CheckpointManager(store) as checkpoints:
        with pytest.raises(CheckpointExistsError, match="restore"):
            checkpoints.save(30, state_of(30), wait=True)
        assert checkpoints.restore(state_of(0)) == 20
        checkpoints.save(30, state_of(30))
    assert CheckpointManager(store).run.steps() == [10, 20, 30]
    with CheckpointManager(store, resumed_from=20) as checkpoints:
        checkpoints.save(25, state_of(25))
        checkpoints.wait()
        assert checkpoints.run.steps() == [10, 20, 25]
    with CheckpointManager(store, start_over=True) as checkpoints:
        checkpoints.save(5, state_of(5))
        checkpoints.wait()
        assert checkpoints.run.steps() == [5]
        assert_is(load(store, step=25), 25)  # abandoned, and still in the store
    with pytest.raises(InvalidArgumentError, match="exclude each other"):
        CheckpointManager(store, start_over=True, resumed_from=3)


def test_going_back() -> None:
    """Checkpoints newer than the restored one are abandoned, and replaced as their steps come again."""
    store = MemoryStore()
    saved(store, 10, 20, 30)
    with CheckpointManager(store) as checkpoints:
        assert checkpoints.restore(state_of(0), 10) == 10
        assert checkpoints.run.steps() == [10, 20, 30]  # a job that restores and never commits changes nothing
        checkpoints.save(20, state_of(-20))
        checkpoints.wait()
        assert checkpoints.run.steps() == [10, 20]
        assert checkpoints.restore(state_of(0)) == 20  # a second restore in the same job
        checkpoints.save(40, state_of(40))
    assert load(store, step=20)["step"] == -20
    assert load(store, step=30)["step"] == 30
    assert load(store)["step"] == 40


def test_restoring_an_older_step_says_what_that_abandons(caplog: pytest.LogCaptureFixture) -> None:
    """Restoring an older step logs first what it abandons and how to avoid that; restoring the newest undoes it."""
    store = MemoryStore()
    with CheckpointManager(store) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, state_of(step), name="best" if step == 20 else None, wait=True)
        caplog.clear()
        checkpoints.restore(state_of(0), 30)
        checkpoints.restore(state_of(0))
        assert "abandons" not in caplog.text
        checkpoints.restore(state_of(0), 10)
        (warning,) = (record for record in caplog.records if "abandons" in record.message)
        assert "restores step 10: the next save abandons 20, 30" in warning.message
        assert "(pinned or named, and so not replaced unless a save is given the name, exist_ok or overwrite: 20)" in (
            warning.message
        )
        assert "dcp_remote.load(url, step=10)" in warning.message
        checkpoints.restore(state_of(0), "best")
        assert "restores step 20: the next save abandons 30" in caplog.text
        assert checkpoints.restore(state_of(0)) == 30
        checkpoints.save(40, state_of(40), wait=True)
        assert checkpoints.run.steps() == [10, 20, 30, 40]


def test_a_checkpoint_by_itself_that_was_saved_over_a_run() -> None:
    """A run over which a checkpoint was saved by itself is refused by restore, before training, and by save."""
    store = MemoryStore()
    saved(store, 1)
    save_as_ranks([{"a": torch.zeros(3)}], lambda: RemoteWriter(store))
    with CheckpointManager(store) as checkpoints:
        with pytest.raises(CheckpointExistsError, match=r"by itself lies here.* delete manifest\.json"):
            checkpoints.restore(state_of(0))
        with pytest.raises(CheckpointExistsError, match="by itself lies here"):
            checkpoints.save(2, state_of(2), wait=True)
        store.delete(["manifest.json"])
        assert checkpoints.restore(state_of(0)) == 1
        checkpoints.save(2, state_of(2))


def test_a_checkpoint_by_itself_is_no_run() -> None:
    """A prefix with a checkpoint saved by itself is refused for a run, which readers would never find."""
    store = MemoryStore()
    save_as_ranks([{"a": torch.zeros(3)}], lambda: RemoteWriter(store))
    with CheckpointManager(store) as checkpoints, pytest.raises(CheckpointExistsError, match="URL of its own"):
        checkpoints.save(1, state_of(1), wait=True)
    assert read_catalog(store) is None


def test_a_run_that_lost_its_catalog() -> None:
    """Without its catalog a run with checkpoints is refused: by restore, by save, and by `latest`."""
    store = MemoryStore()
    saved(store, 1, 2)
    store.delete([CATALOG_KEY])
    with CheckpointManager(store) as checkpoints:
        for call in (
            lambda: checkpoints.restore(state_of(0)),
            lambda: checkpoints.save(3, state_of(3), wait=True),
            checkpoints.run.latest,
            checkpoints.run.steps,
        ):
            with pytest.raises(CorruptCheckpointError, match="recover"):
                call()
        for step in (None, 2):
            with pytest.raises(CorruptCheckpointError, match="recover"):
                load(store, step=step)
        recover(store)
        assert checkpoints.restore(state_of(0)) == 2
        checkpoints.save(3, state_of(3))


def test_a_zombie() -> None:
    """A job that was started before another one commits nothing more, not even after a restore, nor when it closes."""
    store = MemoryStore()
    old = CheckpointManager(store)
    old.save(1, state_of(1), wait=True)
    with CheckpointManager(store) as new:
        new.restore(state_of(0))
        new.save(2, state_of(2))
    with pytest.raises(FencedError, match="newer job"):
        old.save(3, state_of(3), wait=True)
    # Else it would take the run back from the job that fenced it.
    assert old.restore(state_of(0)) == 2
    with pytest.raises(FencedError):
        old.save(3, state_of(3), wait=True)
    old.save(4, state_of(4))
    with pytest.raises(FencedError):
        old.close()
    assert CheckpointManager(store).run.steps() == [1, 2]


def test_a_job_that_hung_before_its_first_save() -> None:
    """Two jobs restore one checkpoint, and one has saved: the other is refused, also after a look at the run."""
    store = MemoryStore()
    saved(store, 10)
    with CheckpointManager(store) as hung, CheckpointManager(store) as new:
        assert hung.restore(state_of(0)) == new.restore(state_of(0)) == 10
        new.save(20, state_of(20), wait=True)
        hung.restore(state_of(0), go_on=False)
        with pytest.raises(FencedError, match="since this job restored"):
            hung.save(11, state_of(11), wait=True)
        new.save(30, state_of(30), wait=True)
    with CheckpointManager(store) as back:
        back.restore(state_of(0))
        back.restore(state_of(0), 20)
        back.save(21, state_of(21), wait=True)
        back.restore(state_of(0), 10)
        back.save(11, state_of(11), wait=True)
        assert [entry.step for entry in back.run.checkpoints() if not entry.abandoned] == [10, 11]


def test_the_generators_of_a_training_are_its_own() -> None:
    """Every third request fails and is retried after a random pause; the training's random generators are not used.

    A retry of a cut connection once changed the numbers that a rank drew next.
    """
    store = FaultyStore(
        MemoryStore(), [Fault(lambda _verb, _key, number: number % 3 == 0, "response", persistent=True)]
    )
    before = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tobytes()  # type: ignore[index]  # the words of its state
    saved(store, 1, 2, retention=Retention(keep_last=1))
    saved(store, 3, retention=Retention(keep_last=1))
    assert len(store.hits) > 10
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert np.random.get_state()[1].tobytes() == before[2]  # type: ignore[index]  # as above


# ---- retention


def test_retention_says_what_it_deletes(caplog: pytest.LogCaptureFixture) -> None:
    """One line names the steps that retention deletes, and the steps that lose their optimizer."""
    caplog.set_level(logging.INFO)
    store = MemoryStore()
    with CheckpointManager(store, retention=Retention(keep_last=2, keep_optimizer_last=1)) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {**state_of(step), "optim": {"m": torch.full((9,), float(step))}}, wait=True)
    lines = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert "retention deletes the optimizer of step 1" in lines
    assert "retention deletes step 1, the optimizer of step 2" in lines
    assert "deleted 2 objects" in lines, "zeros are left out"


def test_retention() -> None:
    """Retention keeps the newest, every n-th, the best and pinned checkpoints; without a retention all are kept."""
    store = MemoryStore()
    with CheckpointManager(
        store, retention=Retention(keep_last=2, keep_every=50, keep_best=Best("loss"))
    ) as checkpoints:
        for step in range(10, 110, 10):
            checkpoints.save(step, state_of(step), metrics={"loss": abs(step - 30)}, wait=True)
            if step == 20:  # 20 is the newest, which no retention retires
                checkpoints.run.pin(20)
                checkpoints.run.unpin(20)
                checkpoints.run.pin(20)
        with pytest.raises(CheckpointNotFoundError):
            checkpoints.run.pin(40)
    assert CheckpointManager(store).run.steps() == [20, 30, 50, 90, 100]
    for step in (20, 30, 50, 90, 100):
        assert_is(load(store, step=step), step)
    found = find_orphans(store, grace_seconds=0)
    assert (found.old, found.young) == ((), ())
    all_kept = MemoryStore()
    saved(all_kept, *range(1, 9))
    assert CheckpointManager(all_kept).run.steps() == list(range(1, 9))


def test_thinning() -> None:
    """Older checkpoints lose their optimizer: its shards are deleted, no data is copied, and the rest still loads."""
    store = RecordingStore(MemoryStore())
    with CheckpointManager(store, retention=Retention(keep_optimizer_last=1)) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state_of(step), wait=True)
    assert not any(verb == "get_into" for verb, _ in store.calls)
    assert set(load(store, step=1)) == {"model", "step"}
    assert torch.equal(load(store, step=2)["model"]["weight"], state_of(2)["model"]["weight"])
    assert_is(load(store, step=3), 3)
    state = {"model": state_of(0)["model"]}
    with CheckpointManager(store) as checkpoints:
        assert checkpoints.restore(state, 1, include="model.*") == 1
        entries = read_catalog(store).entries  # type: ignore[union-attr]  # a catalog was written
        assert [entry.thinned for entry in entries] == [("optim",), ("optim",), ()]
        assert entries[0].size_bytes < entries[2].size_bytes
    found = find_orphans(store, grace_seconds=0)
    assert (found.old, found.young) == ((), ())


def test_without_permission_to_delete(caplog: pytest.LogCaptureFixture) -> None:
    """Retention without permission to delete goes on, leaves the objects to `dcp-remote gc`, and says so once."""
    inner = MemoryStore()
    with (
        caplog.at_level(logging.WARNING),
        CheckpointManager(refusing(inner, "delete"), retention=Retention(keep_last=1)) as checkpoints,
    ):
        for step in range(1, 6):
            checkpoints.save(step, state_of(step), wait=True)
    assert CheckpointManager(inner).run.steps() == [5]
    assert len(caplog.records) == 1, caplog.text
    assert "gc" in caplog.text
    assert find_orphans(inner, grace_seconds=0).old


# ---- dedup


def test_what_did_not_change_is_not_sent_again() -> None:
    """Unchanged tensors are not sent again, also after a restart; each checkpoint loads alone. Without dedup all is."""
    for dedup in (True, False):
        store = RecordingStore(MemoryStore())
        with CheckpointManager(store, dedup=dedup) as checkpoints:
            checkpoints.save(1, state_of(1), wait=True)
            first = store.size_bytes("put")
            store.clear()
            checkpoints.save(2, state_of(2), wait=True)
            second = store.size_bytes("put")
            assert checkpoints.last_save is not None
            assert (checkpoints.last_save.deduplicated_bytes == 200_000) == dedup
        store.clear()
        with CheckpointManager(store, dedup=dedup) as checkpoints:
            checkpoints.restore(state_of(0))
            store.clear()
            checkpoints.save(3, state_of(3), wait=True)
        third = store.size_bytes("put")
        assert (second < 0.1 * first, third < 0.1 * first) == (dedup, dedup)
        for step in (1, 2, 3):
            assert_is(load(store, step=step), step)


def test_requests() -> None:
    """A save requests the catalog, shards, the manifest and the swap; the first save of a job also takes the fence."""
    store = RecordingStore(MemoryStore())
    with CheckpointManager(store) as checkpoints:
        state = {"model": torch.zeros(5)}
        checkpoints.save(1, state, wait=True)
        assert [verb for verb, _ in store.calls] == ["head", "get", "list", "put", "put", "put", "get", "put"]
        store.clear()
        checkpoints.save(2, {"model": torch.ones(5)}, wait=True)
        assert [verb for verb, _ in store.calls] == ["get", "put", "put", "get", "put"]
        assert checkpoints.last_save is not None
        assert checkpoints.last_save.requests == 5
        assert checkpoints.last_save.written_bytes == sum(
            request.size_bytes for request in store.requests if request.key.startswith("shards/")
        )


# ---- errors


def test_an_error_in_the_background_is_raised_by_the_next_call() -> None:
    """An error in the background is raised once, by the next call; the manager goes on, and the run is unchanged."""
    inner = MemoryStore()
    checkpoints = CheckpointManager(refusing(inner, "shards/"))
    for call in (
        lambda: checkpoints.save(2, state_of(2)),
        checkpoints.wait,
        lambda: checkpoints.restore(state_of(0)),
        checkpoints.close,
    ):
        checkpoints.save(1, state_of(1))
        with pytest.raises(SaveFailedError, match=r"shard.*attempts|attempts.*shard") as failed:
            call()
        assert failed.value.details["rank"] == 0
        assert checkpoints.wait() is None
    assert dcp_remote.latest(inner) is None


def test_a_failure_in_the_background_is_logged_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """The next call, which raises it, may come hours later. A call that waits raises the error; nothing is logged."""
    checkpoints = CheckpointManager(refusing(MemoryStore(), "shards/"))

    def errors() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]

    with pytest.raises(SaveFailedError):
        checkpoints.save(1, state_of(1), wait=True)
    assert errors() == []
    checkpoints.save(1, state_of(1))
    wait_until(errors)
    assert ["the save of step 1 has failed" in text for text in errors()] == [True]
    with pytest.raises(SaveFailedError):
        checkpoints.close()


def test_a_handler_of_the_log_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of a save that failed ends by another error: the next call raises that of the save."""

    def refuse(record: logging.LogRecord) -> bool:
        raise OSError(record.getMessage())

    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: raised.append(arguments.exc_type))
    monkeypatch.setattr(logging.getLogger("dcp_remote.manager.background_save"), "filters", [refuse])
    checkpoints = CheckpointManager(refusing(MemoryStore(), "shards/"))
    checkpoints.save(1, state_of(1))
    wait_until(lambda: raised)
    assert not checkpoints._background_saves.is_busy
    with pytest.raises(SaveFailedError, match="shard"):
        checkpoints.close()
    assert raised == [OSError]


def test_a_step_whose_save_failed_counts_as_new() -> None:
    """Its next save goes on in the background: the call returns before the run has taken the step."""
    gate, keys = threading.Event(), list[str]()

    def before(key: str) -> None:
        keys.append(key)
        if len(keys) == 1:
            raise PermissionDeniedError("no")
        assert gate.wait(30), "the call waited for the store"

    with CheckpointManager(HookedStore(MemoryStore(), before)) as checkpoints:
        checkpoints.save(1, state_of(1))
        with pytest.raises(DcpRemoteError, match="no"):
            checkpoints.wait()
        checkpoints.save(1, state_of(1))
        assert checkpoints.last_save is None
        gate.set()
        report = checkpoints.wait()
    assert report is not None
    assert report.step == 1


def test_an_object_that_needs_code() -> None:
    """An object that needs code is refused by key and type; `allow_pickle` on both sides allows it."""
    store = MemoryStore()
    with CheckpointManager(store) as checkpoints, pytest.raises(UnsafeObjectError, match="settings"):
        checkpoints.save(1, {"settings": Settings(), "model": torch.zeros(3)}, wait=True)
    with CheckpointManager(store, allow_pickle=True) as checkpoints:
        checkpoints.save(1, {"settings": Settings()}, wait=True)
        state: dict[str, Any] = {"settings": None}
        assert checkpoints.restore(state) == 1
        assert isinstance(state["settings"], Settings)


class Settings:
    """A class of the user."""


class HangingStore(WrappedStore):
    """Store that does not answer one request until it is released."""

    def __init__(self, store: MemoryStore, hangs: Callable[[Request], bool]) -> None:
        super().__init__(store)
        self._hangs, self.go_on = hangs, threading.Event()

    def _request(self, request: Request, send: Callable[[], Any]) -> Any:
        if not self.go_on.is_set() and self._hangs(request):
            assert self.go_on.wait(60)
        return send()


def test_a_restore_while_a_save_that_was_given_up_hangs() -> None:
    """The thread of a save that hung and was given up does not mark its job, which rolled back, as fenced."""
    is_armed, hung = threading.Event(), set[threading.Thread]()

    def hangs(_request: Request) -> bool:
        is_late = is_armed.is_set() and threading.current_thread().name == "dcp_remote-save"
        if is_late:
            hung.add(threading.current_thread())
        return is_late

    store = HangingStore(MemoryStore(), hangs)
    with CheckpointManager(store) as checkpoints:
        checkpoints.save(1, state_of(1), wait=True)
        checkpoints.save(2, state_of(2), wait=True)
        is_armed.set()
        checkpoints._timeout_seconds = 1.0
        with pytest.raises(SaveTimeoutError):
            checkpoints.save(3, state_of(3), wait=True)
        checkpoints._timeout_seconds = 60.0
        assert checkpoints.restore(state_of(0), 1) == 1
        store.go_on.set()
        hung.pop().join(30)
        checkpoints.save(2, state_of(2), wait=True)
        assert checkpoints.run.steps() == [1, 2]


class InterruptedUploadStore(WrappedStore):
    """Store that raises Ctrl-C while a shard is uploaded, and ends the upload when the test says so."""

    go_on = threading.Event()
    is_first = threading.Lock()

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        if key.startswith("shards/"):
            if InterruptedUploadStore.is_first.acquire(blocking=False):  # another would be a second Ctrl-C
                os.kill(os.getpid(), signal.SIGINT)
            assert InterruptedUploadStore.go_on.wait(60)
        return super().put(key, buffers, condition=condition)


class GoOn(logging.Handler):
    """Log handler that ends the upload once the awaited line is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        if "waiting for requests of the save of step 1; press Ctrl-C to stop waiting" in record.getMessage():
            InterruptedUploadStore.go_on.set()


@pytest.mark.skipif(sys.platform == "win32", reason="has no signals to send")
@pytest.mark.parametrize("has_ended", [True, False])
def test_ctrl_c_in_a_save_says_what_is_waited_for(monkeypatch: pytest.MonkeyPatch, *, has_ended: bool) -> None:
    """Ctrl-C logs what is waited for before it waits: without the line the shard would never be uploaded.

    Also if the thread of the save has ended by then, since the request goes on in another one.
    """
    close = BackgroundSaves.close

    def close_later(saves: BackgroundSaves, error: BaseException | None) -> None:
        if has_ended:
            wait_until(lambda: saves.newest is not None and saves.newest.ended.is_set())
        close(saves, error)

    monkeypatch.setattr(BackgroundSaves, "close", close_later)
    monkeypatch.setattr(InterruptedUploadStore, "go_on", threading.Event())
    monkeypatch.setattr(InterruptedUploadStore, "is_first", threading.Lock())
    handler = GoOn()
    logging.getLogger("dcp_remote.manager.background_save").addHandler(handler)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), CheckpointManager(InterruptedUploadStore(MemoryStore())) as checkpoints:
            checkpoints.save(1, state_of(1), wait=True)
    finally:
        signal.signal(signal.SIGINT, before)
        logging.getLogger("dcp_remote.manager.background_save").removeHandler(handler)
    assert InterruptedUploadStore.go_on.is_set()


def test_the_copy_of_a_state_goes_with_its_save() -> None:
    """The copy of a state is freed with its save: two copies at a time, or a lasting one, would be too much."""
    with CheckpointManager(MemoryStore()) as checkpoints:
        big = torch.zeros(1_000)
        gone = weakref.ref(big)
        checkpoints.save(1, {"a": big}, wait=True)
        del big
        gc.collect()
        assert gone() is None


def test_a_manager_made_too_early(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A manager made before torch.distributed is initialized warns, and refuses to save once it is."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with CheckpointManager(MemoryStore()) as checkpoints:
        assert "WORLD_SIZE is set" in caplog.text
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        with pytest.raises(InvalidArgumentError, match=r"before torch\.distributed was initialized"):
            checkpoints.save(1, state_of(1))
        monkeypatch.undo()


@pytest.mark.skipif(sys.platform == "win32", reason="has no signals to send")
def test_preemption_after_going_back() -> None:
    """Preemption is reported at steps that are done again, also if a step is asked about several times."""
    store = MemoryStore()
    saved(store, 4)
    with CheckpointManager(store) as checkpoints:
        assert not any(checkpoints.reached_preemption(step) for step in range(1, 30))
        assert checkpoints.restore(state_of(0)) == 4
        assert not any(checkpoints.reached_preemption(step) for step in (5, 6, 6))
        os.kill(os.getpid(), signal.SIGTERM)
        assert checkpoints.reached_preemption(6)
        checkpoints.save(6, state_of(6))


def test_leaving_the_block() -> None:
    """Leaving the block waits for the save and raises its error, unless the block itself raised."""
    store = refusing(MemoryStore(), "shards/")
    with pytest.raises(SaveFailedError), CheckpointManager(store) as checkpoints:
        checkpoints.save(1, state_of(1))

    def fails() -> None:
        with CheckpointManager(store) as checkpoints:
            checkpoints.save(1, state_of(1))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fails()


def test_a_state_dict_that_raises() -> None:
    """An error of a state_dict is raised as it is; the manager goes on."""

    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise ZeroDivisionError

        def load_state_dict(self, state: dict[str, Any]) -> None:
            """Do nothing."""

    with CheckpointManager(MemoryStore()) as checkpoints:
        with pytest.raises(ZeroDivisionError):
            checkpoints.save(1, {"broken": Broken()})
        checkpoints.save(1, state_of(1))


@pytest.mark.parametrize("way", ["answers 503", "is silent"])
@pytest.mark.parametrize("key", ["manifest.json", "catalog.json", "manifests/"])
def test_a_restore_asks_no_longer_than_it_has_time(key: str, way: str) -> None:
    """A restore ends at its own deadline, not after the five minutes of a load, and works when it is tried again."""
    inner = MemoryStore()
    with CheckpointManager(inner) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(3)}, wait=True)
    busy = FaultyStore(inner, [Fault(lambda _verb, asked, _number: asked.startswith(key), "request", persistent=True)])
    silent = HangingStore(inner, lambda request: request.key.startswith(key))
    with CheckpointManager(silent if way == "is silent" else busy, timeout_seconds=0.5) as checkpoints:
        began_seconds = time.monotonic()
        with pytest.raises(DcpRemoteError):
            checkpoints.restore({"w": torch.zeros(3)})
        assert time.monotonic() - began_seconds < 30
        silent.go_on.set()
        checkpoints._timeout_seconds = 60.0
        assert way == "answers 503" or checkpoints.restore({"w": torch.zeros(3)}) == 1


def test_the_optimizer_of_a_thinned_checkpoint_is_not_reused() -> None:
    """A thinned checkpoint's optimizer is not reused, though unchanged, not even by the job that wrote it."""
    store = MemoryStore()
    frozen = state_of(1)
    frozen["optim"]["state"]["weight"]["exp_avg"] = torch.arange(50_000.0)
    with CheckpointManager(store) as checkpoints:
        checkpoints.save(1, frozen, wait=True)
        manifest = read_manifest(store)
        thin = drop_keys(manifest, ("optim",))
        key = manifest_key(revision=2, step=1)
        store.put(key, [encode(thin)])

        def change(now: Catalog) -> Catalog | None:
            (entry,) = now.entries
            assert now.revision == 2
            made = replace(entry, manifest=key, began_revision=2, thinned=("optim",), size_bytes=thin.total_bytes)
            return thin_entry(now, made, seen=entry.manifest)

        swap(store, change, deadline=Deadline(10))
        store.delete(sorted(set(manifest.shards.keys) - set(thin.shards.keys)))
        checkpoints.save(2, frozen | {"step": 2}, wait=True)
    assert torch.equal(load(store, step=2)["optim"]["state"]["weight"]["exp_avg"], torch.arange(50_000.0))


def test_a_fence_that_hangs() -> None:
    """A thread that hung while it took the fence does not fence the job that went on without it."""
    inner = MemoryStore()
    store = HangingStore(inner, lambda request: threading.current_thread() is first[0] and request.verb == "get")
    first: list[threading.Thread | None] = [None]
    checkpoints = CheckpointManager(store, timeout_seconds=1.0)
    began = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        if thread.name == "dcp_remote-save" and first[0] is None:
            first[0] = thread
        began(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "run", run)
        with pytest.raises(SaveTimeoutError):
            checkpoints.save(1, state_of(1), wait=True)
    assert first[0] is not None
    checkpoints._background_saves.newest = None  # else the next save would wait half a minute for its thread
    checkpoints._timeout_seconds = 60.0
    checkpoints.save(2, state_of(2), wait=True)
    store.go_on.set()
    first[0].join(30)
    checkpoints.save(3, state_of(3), wait=True)
    checkpoints.close()
    assert CheckpointManager(inner).run.steps() == [2, 3]


@pytest.mark.torture(smoke=False)
def test_a_child_that_is_forked_leaves_the_save_to_its_parent(tmp_path: Path) -> None:
    """A forked child has no thread of the save, and ends as if there were no manager; the parent's save ends."""
    code = f"""
import os, time, torch
from dcp_remote import CheckpointManager, latest
checkpoints = CheckpointManager({str(tmp_path)!r})
checkpoints.save(1, {{"a": torch.zeros(1000)}})
pid = os.fork()
if pid == 0:
    raise SystemExit(5)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
checkpoints.close()
assert latest({str(tmp_path)!r}).step == 1
"""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
