"""`dcp.async_save` in a thread, staged in every way that torch has: what is committed is the state as it was staged."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from dcp_remote import RemoteWriter, load
from dcp_remote.errors import SaveFailedError
from dcp_remote.storage import LocalStore
from dcp_remote.storage.base import Buffer, Condition, Version
from tests.distributed.training import assert_same, full

pytestmark = pytest.mark.torture

State: TypeAlias = dict[str, Any]

WAIT_SECONDS = 60.0

NEEDS_AN_ACCELERATOR = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="this is about hosts without an accelerator"
)


class GatedPlanner(DefaultSavePlanner):
    """Lets the writer see nothing of the state until somebody opens the gate."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self._gate = gate

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        assert self._gate.wait(WAIT_SECONDS)
        return super().finish_plan(new_plan)


def state_of_training() -> State:
    """Tensors of several kinds, some of them views of one memory, and objects."""
    shared = torch.zeros(24)
    return {
        "model": {
            "weight": torch.zeros(5, 7),
            "parameter": torch.nn.Parameter(torch.zeros(3)),
            "head": shared[:6],
            "tail": shared[6:].reshape(3, 6).t(),
            "half": torch.zeros(9, dtype=torch.bfloat16),
            "empty": torch.zeros(0, 4),
            "large": torch.zeros(20_000),
        },
        "optim": {"step": torch.tensor(0), "history": [], "group": {"lr": 0.0, "betas": [0.0, 0.0]}},
    }


def change(state: State, number: int) -> None:
    """Go on training: everything changes where it lies."""
    for position, tensor in enumerate([*state["model"].values(), state["optim"]["step"]]):
        tensor.detach().fill_(10 * number + position)
    state["optim"]["history"].append(number)
    state["optim"]["group"]["lr"] = 0.1 * number
    state["optim"]["group"]["betas"][0] = float(number)


def start(state: State, writer: RemoteWriter, **settings: Any) -> tuple[Future[None] | None, Future[object]]:
    """`async_save`: the future of the staging, if that goes on in the background, and the one of the upload."""
    answer = dcp.async_save(state, storage_writer=writer, no_dist=True, **settings)
    if isinstance(answer, AsyncSaveResponse):
        return answer.staging_completion, cast("Future[object]", answer.upload_completion)
    return None, cast("Future[object]", answer)


def save_and_change(state: State, writer: RemoteWriter, stager: AsyncStager | None) -> None:
    """Save, and change the state the moment it is staged, before the writer has looked at anything."""
    gate = threading.Event()
    try:
        staging, upload = start(state, writer, async_stager=stager, planner=GatedPlanner(gate))
        if staging is not None:
            staging.result(WAIT_SECONDS)
        change(state, 99)
    finally:
        gate.set()
    upload.result(WAIT_SECONDS)


def three_saves(stager: AsyncStager | None, make_writer: Callable[[int], RemoteWriter], url: Path) -> None:
    """The same state again and again, as training does it; each checkpoint is the state of its moment."""
    state = state_of_training()
    for number in (1, 2, 3):
        change(state, number)
        expected = full(copy.deepcopy(state))
        save_and_change(state, make_writer(number), stager)
        assert_same(full(load(url / str(number))), expected, label=str(number))


MODES = list(itertools.product([False, True], repeat=3))


@pytest.mark.filterwarnings("ignore:Ignoring pin_memory flag:UserWarning")  # torch's, where there is no CUDA
@pytest.mark.parametrize(("pinned", "shared", "in_background"), MODES)
def test_the_default_stager_in_each_of_its_modes(
    pinned: bool, shared: bool, in_background: bool, tmp_path: Path
) -> None:
    """One stager for three saves, whose memory it uses again."""
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=pinned,
            use_shared_memory=shared,
            use_async_staging=in_background,
            use_non_blocking_copy=torch.accelerator.is_available(),
        )
    )
    try:
        three_saves(stager, lambda number: RemoteWriter(tmp_path / str(number)), tmp_path)
    finally:
        stager.close()


@NEEDS_AN_ACCELERATOR
@pytest.mark.filterwarnings("ignore:Ignoring pin_memory flag:UserWarning")
@pytest.mark.parametrize(("pinned", "shared", "in_background"), MODES)
def test_modes_of_the_default_stager_that_need_an_accelerator(pinned: bool, shared: bool, in_background: bool) -> None:
    """Copies that do not block: torch refuses the stager itself, so that nothing is ever saved through it."""
    with pytest.raises(AssertionError, match="requires that the current accelerator is available"):
        DefaultStager(StagingOptions(pinned, shared, in_background, use_non_blocking_copy=True))


class CloningStager(AsyncStager):
    """A user's own, which copies at once."""

    def stage(self, state_dict: State) -> State:
        return copy.deepcopy(state_dict)

    def synchronize_staging(self) -> None:
        """The copy is made."""

    def close(self) -> None:
        """Nothing to let go of."""


class LaterStager(CloningStager):
    """A user's own, which copies in a thread of its own and gives torch a future."""

    def stage(self, state_dict: State) -> Any:
        pool = ThreadPoolExecutor(1)
        future = pool.submit(self._copy, state_dict)
        pool.shutdown(wait=False)
        return future

    def _copy(self, state_dict: State) -> State:
        time.sleep(0.05)  # so that torch gets the future of a copy that is still to be made
        return copy.deepcopy(state_dict)


@pytest.mark.parametrize("make", [BlockingAsyncStager, CloningStager, LaterStager, lambda: None])
def test_other_stagers(make: Callable[[], AsyncStager | None], tmp_path: Path) -> None:
    """The blocking one of torch, two of a user's own, and none: torch then makes a `DefaultStager` for each save."""
    three_saves(make(), lambda number: RemoteWriter(tmp_path / str(number)), tmp_path)


class StagingWriter(RemoteWriter):
    """A writer that is its own stager, as torch allows: it asks for these five names alone."""

    _synchronize_after_execute = True
    should_synchronize_after_execute = True

    def stage(self, state_dict: State) -> State:
        return copy.deepcopy(state_dict)

    def synchronize_staging(self) -> None:
        """The copy is made."""

    def close(self) -> None:
        """Nothing to let go of."""


def test_a_writer_that_stages_for_itself(tmp_path: Path) -> None:
    """And `RemoteWriter` itself is none by accident: torch would not copy the state then."""
    assert isinstance(StagingWriter(tmp_path), AsyncStager)
    assert not isinstance(RemoteWriter(tmp_path), AsyncStager)
    three_saves(None, lambda number: StagingWriter(tmp_path / str(number)), tmp_path)


@NEEDS_AN_ACCELERATOR
def test_a_stager_that_fails(tmp_path: Path) -> None:
    """The blocking one of torch pins what it caches: its error is raised by `async_save`, and nothing was written."""
    stager = BlockingAsyncStager(cache_staged_state_dict=True)
    with pytest.raises(RuntimeError, match="Cannot access accelerator device"):
        start({"x": torch.ones(3)}, RemoteWriter(tmp_path / "none"), async_stager=stager)
    assert list(tmp_path.iterdir()) == []


class FailingStager(CloningStager):
    """Its future fails, as that of a copy from a lost device does."""

    def stage(self, state_dict: State) -> Any:
        failed: Future[State] = Future()
        failed.set_exception(RuntimeError("the device is gone"))
        return failed


def test_a_stager_that_fails_in_the_background(tmp_path: Path) -> None:
    """The upload's future raises it, and nothing was written; the staging's is told by torch that all is well."""
    _, upload = start({"x": torch.ones(3)}, RemoteWriter(tmp_path / "none"), async_stager=FailingStager())
    with pytest.raises(RuntimeError, match="the device is gone"):
        upload.result(WAIT_SECONDS)
    assert list(tmp_path.iterdir()) == []


class GatedStore(LocalStore):
    """Waits in the middle of putting a shard, until somebody opens the gate."""

    reached: threading.Semaphore
    gate: threading.Event

    def put(self, key: str, buffers: Any, *, condition: Condition = "any") -> Version:
        if key.startswith("shards/"):
            self.reached.release()
            assert self.gate.wait(WAIT_SECONDS)
        return super().put(key, cast("list[Buffer]", buffers), condition=condition)


def test_a_stager_that_is_used_again_too_early(tmp_path: Path) -> None:
    """Its memory is the first save's, which is still being sent: that one fails, and the second is whole.

    torch copies into the same memory again without a word. A save may only use a stager whose last upload is done.
    """
    store = GatedStore(tmp_path / "first")
    store.reached, store.gate = threading.Semaphore(0), threading.Event()
    state = state_of_training()
    dcp.save(state, storage_writer=RemoteWriter(tmp_path / "alone"), no_dist=True)
    shards = len(list(LocalStore(tmp_path / "alone").list("shards/")))
    stager = DefaultStager(StagingOptions(*4 * [False]))
    change(state, 1)
    try:
        _, first = start(state, RemoteWriter(store), async_stager=stager)
        for _ in range(shards):  # what is digested only after the change is just that: the second's
            assert store.reached.acquire(timeout=WAIT_SECONDS)
        change(state, 2)
        expected = full(copy.deepcopy(state))
        _, second = start(state, RemoteWriter(tmp_path / "second"), async_stager=stager)
        second.result(WAIT_SECONDS)
    finally:
        store.gate.set()
    with pytest.raises(CheckpointException) as caught:
        first.result(WAIT_SECONDS)
    stager.close()
    error = caught.value.failures[0][0]
    assert isinstance(error, SaveFailedError)
    assert "changed while it was being saved" in str(error)
    assert list(store.list()) == []
    assert_same(full(load(tmp_path / "second")), expected)


def test_saves_of_one_state_that_overlap(tmp_path: Path) -> None:
    """With a stager each, as torch makes them, three saves wait for one gate; each is the state of its own moment."""
    gate = threading.Event()
    state, uploads, expected = state_of_training(), [], []
    try:
        for number in (1, 2, 3):
            change(state, number)
            expected.append(full(copy.deepcopy(state)))
            writer = RemoteWriter(tmp_path / str(number))
            uploads.append(start(state, writer, planner=GatedPlanner(gate))[1])
    finally:
        gate.set()
    for number, upload in enumerate(uploads):
        upload.result(WAIT_SECONDS)
        assert_same(full(load(tmp_path / str(number + 1))), expected[number])
