"""Removal of checkpoints that Lightning no longer wants."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dcp_remote import CheckpointManager
from dcp_remote.errors import StorageError
from dcp_remote.integrations.lightning_removal import Removals
from dcp_remote.integrations.runs import CheckpointPath, close_managers, manager_of

RUN = "memory://integrations/removal"


@pytest.fixture(autouse=True)
def no_manager_is_left() -> Iterator[None]:
    yield
    close_managers()


def test_a_removal_that_fails_is_tried_again() -> None:
    """An error would stop rank 0 alone, which removes; the newest stays until another is committed."""
    is_down = True

    def get_manager(url: str) -> CheckpointManager:
        if is_down:
            raise StorageError("The store is down.", url=url)
        return manager_of(url)

    manager = manager_of(RUN)
    for step in (1, 2, 3):
        manager.save(step, {"x": torch.full((3,), float(step))}, name=f"step={step}", wait=True)
    removals = Removals(get_manager)
    for step in (1, 3):
        removals.add(CheckpointPath(RUN, f"step={step}"))
    removals.carry_out()
    assert [info.step for info in manager.run.checkpoints()] == [1, 2, 3]
    is_down = False
    removals.carry_out()
    assert [(info.step, info.names) for info in manager.run.checkpoints()] == [(2, ("step=2",)), (3, ())]
    manager.save(4, {"x": torch.zeros(3)}, name="step=2", wait=True)
    removals.carry_out(CheckpointPath(RUN, "step=4"), 5)
    assert [info.step for info in manager.run.checkpoints()] == [2, 4]
