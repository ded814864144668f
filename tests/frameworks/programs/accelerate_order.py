"""Report the order of samples in each epoch: whole, and stopped after two epochs and resumed. Argument: URL."""

from __future__ import annotations

import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from dcp_remote import latest
from dcp_remote.integrations.accelerate import load_state, save_state
from dcp_remote.integrations.runs import close_managers
from tests.support.rank_programs import leave_process_group, report


def orders(url: str, epochs: int, options: dict[str, Any]) -> list[list[int]]:
    """Train up to an epoch, with a checkpoint after each; return this rank's samples by epoch."""
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    model: Any = torch.nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    samples: Any = [torch.tensor([float(number)]) for number in range(8)]
    loader: Any = DataLoader(samples, batch_size=1, shuffle=True, **options)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    start = load_state(accelerator, url) if latest(url) else 0
    found = []
    for epoch in range(start, epochs):
        found.append([int(sample) for sample in loader])
        save_state(accelerator, f"{url}/epoch-{epoch + 1}")
    close_managers()
    return found


def main() -> None:
    """Run with a generator of the loader's own, and without."""
    for name in ("own", "none"):
        url = f"{sys.argv[1]}/{name}"

        def options(is_own: bool = name == "own") -> dict[str, Any]:
            return {"generator": torch.Generator().manual_seed(3)} if is_own else {}

        whole = orders(f"{url}-whole", 4, options())
        parts = orders(url, 2, options()) + orders(url, 4, options())
        report(**{name: {"whole": whole, "parts": parts}})
    leave_process_group()


if __name__ == "__main__":
    main()
