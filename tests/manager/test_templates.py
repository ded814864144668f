"""`Stateful`s that make their template by the names that a checkpoint has."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_remote import CheckpointManager
from dcp_remote.errors import StateMismatchError


class Growing:
    """Values by name, of which a restore takes those that the checkpoint has."""

    def __init__(self, **values: Any) -> None:
        self.values = values
        self.asked: list[Collection[str]] = []

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def make_template(self, names: Collection[str]) -> dict[str, Any]:
        self.asked.append(sorted(names))
        return {name: value for name, value in self.values.items() if name in names}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values |= values


def test_a_template_is_made_of_the_names_that_are_loaded(tmp_path: Path) -> None:
    """Also where the checkpoint has none; names that stay as they are are not among them."""
    with CheckpointManager(tmp_path, progress=False) as checkpoints:
        checkpoints.save(1, {"part": Growing(a=torch.ones(2), b=1), "x": 5}, wait=True)
        part, other = Growing(a=torch.zeros(2), c=3), Growing(z=1)
        state: dict[str, Any] = {"part": part, "other": other, "x": 0}
        assert checkpoints.restore(state, unexpected="ignore") == 1
        assert part.asked == [["a", "b"]]
        assert other.asked == [[]]
        assert part.values["c"] == 3
        assert torch.equal(part.values["a"], torch.ones(2))
        assert other.values == {"z": 1}
        assert state["x"] == 5
        assert checkpoints.restore({"part": part, "x": 0}, exclude="part.a", unexpected="ignore") == 1
        assert part.asked[1:] == [["b"]]
        rename = {"part.a": None, "part.b": "part.c"}.get
        assert checkpoints.restore({"part": part, "x": 0}, rename=lambda name: rename(name, name)) == 1
        assert part.asked[2:] == [["c"]]
        assert part.values["c"] == 1


def test_what_a_template_lacks_is_unexpected(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, progress=False) as checkpoints:
        checkpoints.save(1, {"part": Growing(a=1, b=2)}, wait=True)
        with pytest.raises(StateMismatchError, match=r"unexpected, not in the state: part\.b"):
            checkpoints.restore({"part": Growing(a=0)})
