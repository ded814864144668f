"""Give URLs to an Accelerator before and after `enable`; save by automatic names, resume, save again."""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import nn

from dcp_remote.errors import DcpRemoteError
from dcp_remote.integrations.accelerate import enable
from dcp_remote.integrations.runs import close_managers
from tests.support.rank_programs import leave_process_group, report


def make_accelerator(url: str) -> Accelerator:
    """Return an accelerator with one model, that names its checkpoints."""
    project = ProjectConfiguration(project_dir=url, automatic_checkpoint_naming=True, total_limit=2)
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
        return type(error).__name__
    return None


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
    report(refused=refused, twice=save_twice(f"{url}/twice"))
    close_managers()
    leave_process_group()


if __name__ == "__main__":
    main()
