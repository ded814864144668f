"""Sources that an attacker, or a torch of another kind, has written: each is read right, or refused by our own errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dcp_remote import import_checkpoint, load

QUIET: dict[str, Any] = {"progress": False}


def test_empty_dicts_are_kept(tmp_path: Path) -> None:
    """In dicts and at the end of lists, as a native save keeps them; `SGD` has an empty `state`."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"optimizer": optimizer.state_dict(), "d": {}, "l": [5, {}], "n": {"a": {}, "b": [], "c": [[], {}]}}
    torch.save(state, tmp_path / "a.pt")
    import_checkpoint(tmp_path / "a.pt", tmp_path / "run", step=1, **QUIET)
    loaded = load(tmp_path / "run")
    assert loaded == state
    optimizer.load_state_dict(loaded["optimizer"])
