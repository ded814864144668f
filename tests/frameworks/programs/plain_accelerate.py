"""Training with Accelerate that saves to folders by itself and knows nothing of dcp_remote, as many public programs do.

Arguments: the folder of outputs, the number of steps, and what to resume from: the path of a checkpoint's folder, or
`latest`, for the folder of the highest step in the folder of outputs. Set `KILL_AT` to be killed after a step.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, set_seed

output, steps, resume = sys.argv[1], int(sys.argv[2]), sys.argv[3]
set_seed(1)
accelerator = Accelerator(
    cpu=True,
    project_config=ProjectConfiguration(project_dir=output),
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
)
data = torch.utils.data.TensorDataset(torch.randn(12, 8), torch.randn(12, 1))
network: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
adam = torch.optim.AdamW(network.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(4))
model, optimizer, batches, scheduler = accelerator.prepare(
    network, adam, loader, torch.optim.lr_scheduler.StepLR(adam, 2, gamma=0.9)
)

done = 0
if resume == "latest":
    folders = [name for name in os.listdir(output) if name.startswith("step_")] if os.path.isdir(output) else []
    folders.sort(key=lambda name: int(name.split("_")[1]))
    resume = os.path.join(output, folders[-1]) if folders else ""
if resume:
    accelerator.load_state(resume)
    done = int(os.path.basename(resume).split("_")[1])
    sys.stdout.write(f"resumed from {done}\n")
for epoch in range(done // len(batches), -(-steps // len(batches))):
    batches.set_epoch(epoch)
    first = done - epoch * len(batches)
    for inputs, targets in accelerator.skip_first_batches(batches, first) if first else batches:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        done += 1
        if done % 2 == 0:
            accelerator.save_state(os.path.join(output, f"step_{done}"), safe_serialization=False)
        if done == int(os.environ.get("KILL_AT", "0")):
            os.kill(os.getpid(), signal.SIGKILL)
        if done == steps:
            break
    accelerator.save_state(os.path.join(output, f"epoch_{epoch}"))
    accelerator.save_state(os.path.join(output, "last"))
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    weights = sum(
        float(parameter.detach().double().sum()) for parameter in accelerator.unwrap_model(model).parameters()
    )
    sys.stdout.write(f"steps {done} weights {weights!r}\n")
accelerator.end_training()
