"""Give URLs to an Accelerator before and after `enable`; save by automatic names, resume, save again; save folders.

Folders are those of a program that cannot be changed, with `enable(url)`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import nn

from dcp_remote.errors import CheckpointNotFoundError, DcpRemoteError, InvalidArgumentError
from dcp_remote.integrations.accelerate import disable, enable, save_state
from dcp_remote.integrations.folders import leave_to_trainer
from dcp_remote.integrations.runs import close_managers
from tests.support.rank_programs import leave_process_group, report


def make_accelerator(url: str, total_limit: int | None = 2) -> Accelerator:
    """Return an accelerator with one model, that names its checkpoints."""
    project = ProjectConfiguration(project_dir=url, automatic_checkpoint_naming=True, total_limit=total_limit)
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.prepare(nn.Linear(2, 2))
    return accelerator


def save_twice(url: str) -> str | None:
    """Save one step under two names, load it and save it again; report the error of a save after training went on."""
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
    _, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    accelerator.save_state(f"{url}/step_1")
    accelerator.save_state(f"{url}/epoch_0", step=1)
    accelerator.load_state(url)
    accelerator.save_state(f"{url}/step_1")
    optimizer.step()
    try:
        accelerator.save_state(f"{url}/step_1")
    except DcpRemoteError as error:
        return str(error)
    return None


def save_too_soon(url: str) -> list[str | None]:
    """Save while a slow save is under way, which leaves the second one out; return what both calls return."""
    settings: dict[str, Any] = {"when_busy": "skip", "storage_options": {"upload_bytes_per_second": 5_000}}
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    return [save_state(accelerator, f"{url}/step_{step}", **settings) for step in (1, 2)]


def use_folders(url: str) -> None:
    """Save to folders and load them, with `enable(url)`: below the URL, but for those of Accelerate itself."""

    def expect(function: Callable[..., Any], *arguments: Any, error: type[Exception] = InvalidArgumentError) -> str:
        with pytest.raises(error) as raised:
            function(*arguments)
        return str(raised.value)

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    accelerator.prepare(model)
    disable()
    accelerator.save_state("own/step_1")
    enable(url)
    for step, folder in enumerate(("out/step_1", "out/100", "out/best", "out/step_1/", "other/best")):
        model.weight.data.fill_(step)
        accelerator.save_state(folder, safe_serialization=False)
    for folder, value in {"out/best": 2.0, "other/best": 4.0, "moved/out/best": 2.0, "out/100": 1.0}.items():
        accelerator.load_state(folder, map_location="cpu")
        assert model.weight.data.unique().tolist() == [value]
    accelerator.load_state("own/step_1")
    assert 1.0 not in model.weight.data
    assert "folder-100, " in expect(accelerator.load_state, "out/absent", error=CheckpointNotFoundError)
    assert "Remove the hooks" in expect(accelerator.register_save_state_pre_hook, print)
    found = make_accelerator("project", total_limit=None)  # makes the folders of what the run has
    assert (Path("project") / "checkpoints" / "best" / "dcp_remote.txt").is_file()
    found.load_state()
    found.save_state()
    assert list(Path("project").rglob("*.safetensors")) == []
    close_managers()
    leave_to_trainer(url)
    accelerator.save_state("export")
    assert Path("export/model.safetensors").is_file()
    disable()


def main() -> None:
    """Report the errors of what is refused, and let others end the program."""
    url = sys.argv[1]
    plain = Accelerator(cpu=True)
    model = plain.prepare(nn.Linear(2, 2))
    refused = []
    for call in (plain.save_state, plain.load_state, lambda url: plain.save_model(model, url)):
        try:
            call(f"{url}/run/step-1")
        except DcpRemoteError as error:
            refused.append(type(error).__name__)
    enable()
    accelerator = make_accelerator(url)
    for _ in range(3):
        accelerator.save_state()
    close_managers()
    resumed = make_accelerator(url)
    resumed.load_state()
    resumed.save_state()
    twice = save_twice(f"{url}/twice")
    too_soon = save_too_soon(f"{url}/too-soon")
    close_managers()
    use_folders(f"{url}/folders")
    report(refused=refused, twice=twice, too_soon=too_soon)
    leave_process_group()


if __name__ == "__main__":
    main()
