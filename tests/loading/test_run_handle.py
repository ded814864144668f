"""`open_run`: what one process reads and changes of a run, with which permissions and requests, beside retention."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

import dcp_remote
from dcp_remote import CheckpointInfo, CheckpointManager, RemoteReader, Retention, Run, load, open_run
from dcp_remote.common.arrays import Buffer
from dcp_remote.errors import (
    CheckpointGoneError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
)
from dcp_remote.format.catalog import CATALOG_KEY
from dcp_remote.run.gc import remove_orphans
from dcp_remote.storage import MemoryStore, ObjectStore
from dcp_remote.storage.base import Condition, Version
from dcp_remote.storage.wrapper import Request, WrappedStore
from dcp_remote.testing import FaultyStore, RecordingStore, nth
from tests.support.runs import a_run, assert_tidy, fence, keys, named, save, steps
from tests.support.simulated_ranks import load_as_ranks

_Answer = TypeVar("_Answer")


pytestmark = pytest.mark.usefixtures("short_pauses")


def state_of(step: int) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((6, 3), float(step))},
        "optim": {"m": torch.full((6,), step / 2), "groups": [{"lr": 0.1}]},
        "step": step,
    }


def trained(store: ObjectStore, *numbers: int, **options: Any) -> None:
    """Save these steps as one job, each with its loss, a name and a note."""
    with CheckpointManager(store, **options) as checkpoints:
        for step in numbers:
            checkpoints.save(
                step, state_of(step), metrics={"loss": 1 / step}, user={"note": step}, name=f"checkpoint-{step}"
            )


class ReadOnly(WrappedStore):
    """Store on which this process may read objects, and nothing else."""

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        raise PermissionDeniedError("An injected 403.", key=key)

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        raise PermissionDeniedError("An injected 403.")

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        if request.verb == "list":
            raise PermissionDeniedError("An injected 403.")
        return send()


# ---- reading


def test_what_an_evaluation_needs() -> None:
    """Open a run with no permission but to read objects: everything that reads works, by step and by name."""
    store = MemoryStore()
    trained(store, 1, 2, 4)
    run = open_run(ReadOnly(store))
    assert isinstance(run, Run)
    assert [(info.step, info.names, dict(info.metrics)) for info in run.checkpoints()] == [
        (step, (f"checkpoint-{step}",), {"loss": 1 / step}) for step in (1, 2, 4)
    ]
    newest = run.latest()
    assert newest is not None
    assert (newest.step, newest.pinned, newest.thinned, newest.abandoned) == (4, False, (), False)
    assert run.wait_for_newer(2, timeout_seconds=1.0) == newest
    assert run.wait_for_newer(4, timeout_seconds=0.01, poll_seconds=0.005) is None
    assert [run.exists(which) for which in (1, "checkpoint-2", 3, "checkpoint-3")] == [True, True, False, False]
    assert run.user() == {"note": 4}
    assert run.user("checkpoint-2") == {"note": 2}
    assert run.load()["step"] == 4
    assert run.load("checkpoint-2", keys="step") == {"step": 2}
    assert torch.equal(run.load(1)["model"]["w"], state_of(1)["model"]["w"])
    template = state_of(0)
    load_as_ranks([template], lambda: RemoteReader(ReadOnly(store), step="checkpoint-2"))
    assert template["step"] == 2
    for write in (run.pin, run.delete, partial(run.name, name="best")):
        with pytest.raises(PermissionDeniedError):
            write(1)


def test_a_run_that_has_not_begun() -> None:
    """Open an empty URL, without permission to list: nothing is there, and nothing is an error but what must exist."""
    run = open_run(ReadOnly(MemoryStore()))
    assert (run.checkpoints(), run.latest(), run.best("loss"), run.exists(1)) == ([], None, None, False)
    for call in (run.load, run.user, partial(run.load, 1), partial(run.pin, 1), partial(run.delete, 1)):
        with pytest.raises(CheckpointNotFoundError):
            call()


def test_a_checkpoint_by_itself_is_no_run() -> None:
    """Open the URL of a checkpoint by itself: said by every method that lists, and not taken for an empty run."""
    store = MemoryStore()
    store.put("manifest.json", [b"x"])
    run = open_run(store)
    for call in (run.checkpoints, run.latest, partial(run.best, "loss"), partial(run.exists, 1)):
        with pytest.raises(InvalidArgumentError, match="checkpoint by itself, not a run"):
            call()


def test_costs() -> None:
    """Count requests: opening costs none, each look at the catalog one, notes two for a step."""
    store = MemoryStore()
    trained(store, 1, 2)
    recording = RecordingStore(store)
    run = open_run(recording)
    assert recording.count() == 0
    for call in (run.checkpoints, run.latest, partial(run.best, "loss"), partial(run.exists, 1)):
        call()
        assert recording.calls == [("get", CATALOG_KEY)]
        recording.clear()
    run.user(1)
    assert recording.count("get") == recording.count() == 2


def test_the_best() -> None:
    """Ask for the best of a metric: abandoned checkpoints do not count, and of equals the newest is better."""
    store = MemoryStore()
    for step, loss, accuracy in ((1, 3.0, 0.5), (2, 1.0, 0.5), (3, 1.0, 0.4)):
        save(store, step, metrics=(("loss", loss), ("accuracy", accuracy)))
    save(store, 9, metrics=(("loss", 0.0),))
    fence(store)
    save(store, 4, abandons=3)
    run = open_run(store)
    best = [run.best("loss"), run.best("loss", largest=True), run.best("accuracy", largest=True), run.best("accuracy")]
    assert [info.step for info in best if info is not None] == [3, 1, 2, 3]
    with pytest.raises(InvalidArgumentError, match="True or False"):
        run.best("loss", largest="yes")  # type: ignore[arg-type]


def test_a_metric_that_no_checkpoint_has(caplog: pytest.LogCaptureFixture) -> None:
    """Mistype a metric: None, and a line that lists those that there are."""
    store = MemoryStore()
    save(store, 1, metrics=(("loss", 1.0), ("accuracy", 0.5)))
    assert open_run(store).best("los") is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "no checkpoint has the metric 'los'; they have accuracy, loss" in line


def test_only_loading_imports_torch(tmp_path: Path) -> None:
    """Use everything but `load` in a fresh interpreter: torch is not imported, which takes seconds."""
    trained(dcp_remote.storage.LocalStore(tmp_path), 1, 2)
    code = f"""if True:
        import sys, dcp_remote
        run = dcp_remote.open_run({str(tmp_path)!r})
        assert run.wait_for_newer(1, timeout_seconds=1).step == run.latest().step == 2
        run.best("loss"), run.exists(1), run.user(1), run.name(1, "best"), run.pin("best"), run.delete(1, force=True)
        assert dcp_remote.is_remote("s3://b") and dcp_remote.latest({str(tmp_path)!r}).step == 2
        print("torch" in sys.modules)
    """
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "False"


# ---- beside retention


class Meanwhile(WrappedStore):
    """Store in which another process acts once, before the first request whose key begins so.

    With `denies`, the store refuses what is missing, as S3 does without a grant to list.
    """

    def __init__(self, store: ObjectStore, prefix: str, act: Callable[[], object], *, denies: bool = False) -> None:
        super().__init__(store)
        self._before, self._acts, self._lock = prefix, [act], threading.Lock()
        self._denies = denies

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        # Other requests wait, since a load sends several at once.
        with self._lock:
            if request.key.startswith(self._before) and self._acts:
                self._acts.pop()()
        try:
            return send()
        except ObjectNotFoundError as error:
            if self._denies and request.key.startswith(("manifests/", "shards/")):
                raise PermissionDeniedError("The store refused.", key=request.key) from error
            raise


@pytest.mark.parametrize("denies", [False, True], ids=["missing", "refused"])
@pytest.mark.parametrize("between", ["manifests/", "shards/"], ids=["catalog and manifest", "manifest and shards"])
def test_what_is_read_and_goes_names_the_next(between: str, denies: bool) -> None:
    """Delete a checkpoint in the middle of a load, by every way of loading: the error names the steps to read."""

    def restore(store: ObjectStore) -> object:
        with CheckpointManager(store) as checkpoints:
            return checkpoints.restore(state_of(0), 2)

    ways: list[Callable[[ObjectStore], object]] = [
        lambda store: open_run(store).load(2),
        lambda store: load(store, step="checkpoint-2"),
        restore,
        lambda store: load_as_ranks([state_of(0)], lambda: RemoteReader(store, step=2)),
    ]
    for way in ways:
        inner = MemoryStore()
        trained(inner, 1, 2, 4, 8)
        store = Meanwhile(inner, between, partial(open_run(inner).delete, 2), denies=denies)
        with pytest.raises(CheckpointGoneError) as caught:
            way(store)
        error = caught.value
        assert isinstance(error, CheckpointNotFoundError)
        assert "retired (deleted) while it was being read. Load another one, or step 4." in str(error)
        assert (error.details["step"], error.details["next"], error.details["newest"]) == (2, 4, 8)


@pytest.mark.parametrize("is_catalog_refused", [False, True])
@pytest.mark.parametrize("refused", ["manifests/", "shards/"])
def test_a_refusal_of_what_is_there_is_raised(refused: str, is_catalog_refused: bool) -> None:
    """Refuse manifest or shards of a checkpoint that is live, and then perhaps the catalog: the first error stays."""
    store = MemoryStore()
    trained(store, 1)
    refusing = {refused}

    class Refusing(WrappedStore):
        def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
            if request.key.startswith(tuple(refusing)):
                if is_catalog_refused:
                    refusing.add("catalog")
                raise PermissionDeniedError("The store refused.", key=request.key)
            return send()

    with pytest.raises(PermissionDeniedError) as caught:
        load(Refusing(store), step=1)
    assert str(caught.value.details["key"]).startswith(refused)


@pytest.mark.parametrize(
    "show",
    [lambda run: run.wait_for_newer(4, timeout_seconds=1), Run.latest, lambda run: run.best("loss")],
    ids=["wait_for_newer", "latest", "best"],
)
def test_what_goes_between_the_listing_and_the_load_is_gone(show: Callable[[Run], CheckpointInfo]) -> None:
    """A checkpoint that was shown and then deleted is gone, with the newest step; a step that was not is not found."""
    store = MemoryStore()
    trained(store, 1, 2, 4, 8)
    run = open_run(store)
    shown = show(run)
    open_run(store).delete(shown.step, force=True)
    with pytest.raises(CheckpointGoneError) as caught:
        run.load(shown.step)
    assert (caught.value.details["step"], caught.value.details["newest"]) == (shown.step, 4 if shown.step == 8 else 8)
    with pytest.raises(CheckpointNotFoundError) as missed:
        run.load(7)
    assert not isinstance(missed.value, CheckpointGoneError)


def test_what_is_read_and_goes_in_other_ways() -> None:
    """Replace, thin, or delete the newest checkpoint in the middle of a load: each is said."""
    store = MemoryStore()
    trained(store, 1, 2)

    def overwrite() -> None:
        with CheckpointManager(store, resumed_from=2, dedup=False) as checkpoints:
            checkpoints.save(2, state_of(5), overwrite=True)

    with pytest.raises(CheckpointGoneError, match=r"replaced by another save of its step .* Load again; no newer"):
        open_run(Meanwhile(store, "shards/", overwrite)).load(2)

    def thin() -> None:
        with CheckpointManager(
            store, resumed_from=2, retention=Retention(keep_optimizer_last=1, keep_named=False)
        ) as c:
            c.save(3, state_of(3))

    with pytest.raises(CheckpointGoneError, match=r"was thinned .* Load again, or step 3") as caught:
        open_run(Meanwhile(store, "shards/", thin)).load(2)
    assert caught.value.details["newest"] == 3
    assert open_run(store).load(2)["step"] == 5
    with pytest.raises(CheckpointGoneError, match="no newer checkpoint is live"):
        open_run(Meanwhile(store, "shards/", partial(open_run(store).delete, 3, force=True))).load(3)


# ---- deleting


def test_a_deleted_checkpoint_takes_what_no_other_uses() -> None:
    """Delete by step and by name, where others reuse shards: the bucket holds what live checkpoints name."""
    store = a_run(1, 2, 3)
    run = open_run(store)
    run.name(2, "checkpoint-2")
    run.delete(1)
    assert steps(store) == [2, 3]
    assert keys(store) == named(store)
    run.delete("checkpoint-2")
    assert steps(store) == [3]
    assert_tidy(store)
    with pytest.raises(CheckpointNotFoundError, match="steps='3'"):
        run.delete(2)


def test_objects_that_may_not_be_deleted(caplog: pytest.LogCaptureFixture) -> None:
    """Deny deletions: the checkpoint is gone, and a line says that gc has to remove its objects."""

    class Keeping(WrappedStore):
        def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
            return {key: PermissionDeniedError("An injected 403.") for key in keys}

    store = a_run(1, 2)
    with caplog.at_level(logging.WARNING):
        open_run(Keeping(store)).delete(1)
    assert steps(store) == [2]
    assert "objects of a deleted checkpoint are left to `dcp-remote gc`" in caplog.text
    assert remove_orphans(store, grace_seconds=0).old
    assert keys(store) == named(store)


def test_a_save_that_reuses_what_is_deleted_begins_again() -> None:
    """Delete the checkpoint that a save under way reuses: the save uploads all, and is committed."""
    store = MemoryStore()
    trained(store, 1)

    def delete() -> None:
        open_run(store).delete(1, force=True)

    busy = Meanwhile(store, "manifests/step-000000000002", delete)
    with CheckpointManager(busy) as checkpoints:
        assert checkpoints.restore(state_of(0)) == 1
        checkpoints.save(2, state_of(1))  # the model's values are those of step 1
        report = checkpoints.wait()
    assert report is not None
    assert report.attempts == 2
    assert steps(store) == [2]
    assert torch.equal(load(store)["model"]["w"], state_of(1)["model"]["w"])


# ---- the manager has the same


def test_a_manager_has_the_methods_of_a_run() -> None:
    """Use them through a manager, names wherever a step is taken."""
    store = MemoryStore()
    with CheckpointManager(store) as checkpoints:
        assert (checkpoints.run.checkpoints(), checkpoints.run.latest(), checkpoints.run.exists(1)) == ([], None, False)
        for step in (1, 2, 3):
            checkpoints.save(step, state_of(step), metrics={"loss": step}, user={"note": step}, wait=True)
        best = checkpoints.run.best("loss")
        assert best is not None
        checkpoints.run.name(best.step, ["best", "epoch=1-step=1.ckpt"])
        checkpoints.run.pin("best")
        assert checkpoints.run.user("best") == {"note": 1}
        assert checkpoints.run.exists("epoch=1-step=1.ckpt")
        with pytest.raises(InvalidArgumentError, match="pinned"):
            checkpoints.run.delete("best")
        checkpoints.run.unpin("best")
        checkpoints.run.unname("epoch=1-step=1.ckpt")
        checkpoints.run.name("best", "checkpoint-1")
        checkpoints.run.delete(2)
        assert [(info.step, info.names) for info in checkpoints.run.checkpoints()] == [
            (1, ("best", "checkpoint-1")),
            (3, ()),
        ]
        assert checkpoints.run.steps() == [1, 3]
        state = state_of(0)
        assert checkpoints.restore(state, "checkpoint-1") == 1
        assert state["step"] == 1


def test_calls_of_a_run_are_no_requests_of_a_save() -> None:
    """Look at the run beside a save: the report counts as many requests as without."""
    requests: list[int] = []
    for looks in (0, 20):
        with CheckpointManager(MemoryStore(), dedup=False) as checkpoints:
            checkpoints.save(1, state_of(1))
            for _ in range(looks):
                checkpoints.run.steps()
            report = checkpoints.wait()
            assert report is not None
            requests.append(report.requests)
    assert requests[0] == requests[1]


# ---- retention by a function


def test_a_function_decides_what_is_deleted() -> None:
    """Pass a function as retention: it sees names and metrics, and what it returns is deleted, with its objects."""
    store = MemoryStore()
    seen: list[list[tuple[int, tuple[str, ...]]]] = []

    def all_but_the_best_two(checkpoints: Sequence[dcp_remote.CheckpointInfo]) -> list[int]:
        seen.append([(info.step, info.names) for info in checkpoints])
        return [info.step for info in sorted(checkpoints, key=lambda info: info.metrics["loss"])[2:]]

    with CheckpointManager(store, retention=all_but_the_best_two, dedup=False) as checkpoints:
        for step, loss in ((1, 0.1), (2, 0.5), (3, 0.4), (4, 0.9)):
            checkpoints.save(step, state_of(step), metrics={"loss": loss}, name=f"checkpoint-{step}", wait=True)
            if step == 2:
                checkpoints.run.pin(2)
    # The newest stays, though it is the worst; so does the pinned.
    assert steps(store) == [1, 2, 3, 4]
    assert seen[-1][0] == (1, ("checkpoint-1",))
    with CheckpointManager(store, retention=all_but_the_best_two, dedup=False) as checkpoints:
        checkpoints.restore(state_of(0))
        checkpoints.run.unpin(2)
        checkpoints.save(5, state_of(5), metrics={"loss": 0.0})
    assert checkpoints.retention_failures == 0
    assert steps(store) == [1, 5]
    assert keys(store) == named(store)


@pytest.mark.parametrize(
    "returned", [None, "step", [1.0], [True], ["1"], 1, ZeroDivisionError, SystemExit, KeyboardInterrupt]
)
def test_a_function_that_fails_fails_no_save(returned: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Raise in the function, or return no steps: the saves are committed, nothing is deleted, each failure counted."""

    def failing(checkpoints: Sequence[dcp_remote.CheckpointInfo]) -> Any:
        if isinstance(returned, type):
            raise returned
        return returned

    store = MemoryStore()
    with CheckpointManager(store, retention=failing) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step), wait=True)
            checkpoints._coordinator.background_deletions.wait(30.0)  # type: ignore[union-attr]  # rank 0
    assert steps(store) == [1, 2]
    assert checkpoints.retention_failures == 2
    assert caplog.text.count("checkpoints that retention does not keep were not deleted") == 2


@pytest.mark.parametrize("retention", [3, "keep_last=3", {"keep_last": 3}, Retention, [Retention()]])
def test_what_is_no_retention(retention: Any) -> None:
    """Pass a value of another type: refused by the constructor, with what to write."""
    with pytest.raises(InvalidArgumentError, match=r"Retention\(keep_last=3\), or a function"):
        CheckpointManager(MemoryStore(), retention=retention)


# ---- an empty run


@pytest.mark.parametrize("has_catalog", [False, True])
def test_restore_says_what_lies_at_an_empty_run(caplog: pytest.LogCaptureFixture, *, has_catalog: bool) -> None:
    """Restore where only another tool's checkpoint lies: None and a warning, or an error with `must_exist`."""
    store = MemoryStore()
    store.put(".metadata", [b"x"])
    store.put("__0_0.distcp", [b"x"])
    if has_catalog:
        fence(store)
    with CheckpointManager(store) as checkpoints:
        assert checkpoints.restore(state_of(0)) is None
        (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert "no checkpoint here yet; the job starts from nothing" in line
        assert ("A checkpoint of torch's own writer lies there" in line) is not has_catalog
        with pytest.raises(
            CheckpointNotFoundError, match="is live" if has_catalog else "torch's own writer lies there"
        ):
            checkpoints.restore(state_of(0), must_exist=True)
        with pytest.raises(CheckpointNotFoundError):
            checkpoints.restore(state_of(0), "best")
        checkpoints.save(1, state_of(1))
        assert checkpoints.restore(state_of(0), must_exist=True) == 1


def test_an_empty_run_is_looked_at_once() -> None:
    """Restore in an empty run: one LIST of a page more than the look for a lost catalog; in a run, no LIST."""
    store = RecordingStore(MemoryStore())
    with CheckpointManager(store) as checkpoints:
        assert checkpoints.restore(state_of(0)) is None
        assert store.calls == [("head", "manifest.json"), ("get", CATALOG_KEY), ("list", "manifests/"), ("list", "")]
        checkpoints.save(1, state_of(1), wait=True)
        store.clear()
        checkpoints.restore(state_of(0))
        assert store.count("list") == 0


def test_calls_wait_for_their_timeout_alone() -> None:
    """Fail every request: `latest`, a run's calls and a load end by `timeout_seconds`, and refuse wrong ones."""
    store = FaultyStore(a_run(1), [nth(1, "request", persistent=True)])
    run = open_run(store, timeout_seconds=0.01)
    calls: list[Callable[[], object]] = [
        partial(dcp_remote.latest, store, timeout_seconds=0.01),
        partial(load, store, timeout_seconds=0.01),
        *(run.latest, run.checkpoints, run.user, run.load, partial(run.pin, 1), partial(run.delete, 1)),
    ]
    for call in calls:
        with pytest.raises(StorageError):
            call()
    for wrong in (0, -1, float("inf"), "1"):
        with pytest.raises(InvalidArgumentError, match="timeout_seconds"):
            open_run(store, timeout_seconds=wrong)  # type: ignore[arg-type]  # the mistakes that are tested
        with pytest.raises(InvalidArgumentError, match="timeout_seconds"):
            dcp_remote.latest(store, timeout_seconds=wrong)  # type: ignore[arg-type]  # the same


def test_a_url_in_place_of_a_store() -> None:
    with pytest.raises(InvalidArgumentError, match="open_run"):
        Run("s3://bucket/run")  # type: ignore[arg-type]
