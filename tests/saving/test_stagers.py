"""`dcp.async_save` in a thread, with each of torch's stagers: the state is committed as it was staged."""

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
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from dcp_remote import RemoteWriter, load
from tests.support.training import assert_same, full

pytestmark = pytest.mark.torture

State: TypeAlias = dict[str, Any]

WAIT_SECONDS = 60.0


class GatedPlanner(DefaultSavePlanner):
    """Planner that shows the writer nothing of the state until the gate is opened."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self._gate = gate

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        assert self._gate.wait(WAIT_SECONDS)
        return super().finish_plan(new_plan)


def state_of_training() -> State:
    """Return tensors of several kinds, some of them views of one memory, and objects."""
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
    """Change every value of a state in place."""
    for position, tensor in enumerate([*state["model"].values(), state["optim"]["step"]]):
        tensor.detach().fill_(10 * number + position)
    state["optim"]["history"].append(number)
    state["optim"]["group"]["lr"] = 0.1 * number
    state["optim"]["group"]["betas"][0] = float(number)


def start(state: State, writer: RemoteWriter, **settings: Any) -> tuple[Future[None] | None, Future[object]]:
    """Call `async_save`; return the future of the staging (None if it is synchronous) and that of the upload."""
    answer = dcp.async_save(state, storage_writer=writer, no_dist=True, **settings)
    if isinstance(answer, AsyncSaveResponse):
        return answer.staging_completion, cast("Future[object]", answer.upload_completion)
    return None, cast("Future[object]", answer)


def save_and_change(state: State, writer: RemoteWriter, stager: AsyncStager | None) -> None:
    """Save, and change the state as soon as it is staged, before the writer reads any of it."""
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
    """Save one state three times, changed in between; each checkpoint is the state at its save."""
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
    """A stager used for three saves reuses its memory."""
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


class CloningStager(AsyncStager):
    """Stager of a user that copies synchronously."""

    def stage(self, state_dict: State) -> State:
        return copy.deepcopy(state_dict)

    def synchronize_staging(self) -> None:
        """Do nothing: the copy is made."""

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


class LaterStager(CloningStager):
    """Stager of a user that copies in its own thread, and returns a future."""

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
    """The blocking stager of torch, two of a user, and none: torch then creates a `DefaultStager` for each save."""
    three_saves(make(), lambda number: RemoteWriter(tmp_path / str(number)), tmp_path)


class StagingWriter(RemoteWriter):
    """Writer that is its own stager: torch recognizes a stager by these five names."""

    _synchronize_after_execute = True
    should_synchronize_after_execute = True

    def stage(self, state_dict: State) -> State:
        return copy.deepcopy(state_dict)

    def synchronize_staging(self) -> None:
        """Do nothing: the copy is made."""

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


def test_a_writer_that_stages_for_itself(tmp_path: Path) -> None:
    """`RemoteWriter` itself must not be a stager by accident: torch would then not copy the state."""
    assert isinstance(StagingWriter(tmp_path), AsyncStager)
    assert not isinstance(RemoteWriter(tmp_path), AsyncStager)
    three_saves(None, lambda number: StagingWriter(tmp_path / str(number)), tmp_path)


class FailingStager(CloningStager):
    """Stager whose future fails, like a copy from a lost device."""

    def stage(self, state_dict: State) -> Any:
        failed: Future[State] = Future()
        failed.set_exception(RuntimeError("the device is gone"))
        return failed


def test_a_stager_that_fails_in_the_background(tmp_path: Path) -> None:
    """The future of the upload raises the error, and nothing is written; torch lets the staging's future succeed."""
    _, upload = start({"x": torch.ones(3)}, RemoteWriter(tmp_path / "none"), async_stager=FailingStager())
    with pytest.raises(RuntimeError, match="the device is gone"):
        upload.result(WAIT_SECONDS)
    assert list(tmp_path.iterdir()) == []


def test_saves_of_one_state_that_overlap(tmp_path: Path) -> None:
    """Three saves, each with its own stager, wait for one gate; each checkpoint is the state at its own save."""
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
