"""Train a small Llama with Accelerate, once for each job of an option file; report losses and digests by job."""

from __future__ import annotations

import functools
import logging
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, ProjectConfiguration, set_seed

import hf_models
from dcp_remote.errors import DcpRemoteError
from dcp_remote.integrations.accelerate import disable, enable, load_state, save_state
from dcp_remote.integrations.runs import close_managers

logging.basicConfig(level=logging.INFO)


class Average:
    """Object that is registered for checkpoints."""

    def __init__(self) -> None:
        """Begin without losses."""
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the losses so far."""
        return {"losses": list(self.losses), "last": torch.tensor(self.losses[-1:])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from other losses."""
        self.losses = list(state_dict["losses"])


@functools.cache
def make_plugins(mode: str) -> dict[str, Any]:
    """Return the plugins of a kind; of these, Accelerate keeps the first for the whole process."""
    if mode == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
        return {"fsdp_plugin": plugin}
    if mode != "zero3":
        return {}
    return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=hf_models.zero_config(mode))}


def make_accelerator(mode: str, options: dict[str, Any]) -> Accelerator:
    """Return an accelerator of a kind."""
    is_first = not AcceleratorState._shared_state
    given = dict(make_plugins(mode)) if is_first or mode != "zero3" else {}
    if options.get("project_dir"):
        given["project_config"] = ProjectConfiguration(
            project_dir=options["project_dir"], automatic_checkpoint_naming=True, total_limit=2
        )
    loader = DataLoaderConfiguration(
        use_stateful_dataloader=options.get("is_stateful", False), use_seedable_sampler=True
    )
    return Accelerator(cpu=mode in ("plain", "ddp"), dataloader_config=loader, **given)


def train(mode: str, options: dict[str, Any]) -> dict[str, Any]:  # noqa: C901, PLR0912, PLR0915  # a user's script
    """Train as a job's options say; return what the test compares."""
    set_seed(3)
    accelerator = make_accelerator(mode, options)
    model: Any = hf_models.make_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
    # With a generator of its own, the loader does not draw from torch's random numbers when it is iterated.
    data: Any = hf_models.make_data(12)
    loader: Any = torch.utils.data.DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(4))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    average = Average()
    accelerator.register_for_checkpointing(average)
    url, step, found = options.get("url"), 0, {}
    settings = options.get("settings", {})

    def digest_parts() -> dict[str, str]:
        if mode == "zero3":
            return hf_models.engine_digests(model)
        return {"model": hf_models.model_digest(model), "optimizer": hf_models.optimizer_digest(model, optimizer)}

    def note() -> None:
        found[step] = {
            **digest_parts(),
            "scheduler": hf_models.digest_values(scheduler.state_dict()),
            "random": hf_models.random_digest(),
        }

    warned = hf_models.Warnings()
    result: dict[str, Any] = {"digests": found, "warnings": warned.texts}
    began_seconds = time.monotonic()
    try:
        if options.get("resume"):
            step = load_state(accelerator, options["resume"], **settings)
            note()
        if options.get("is_enabled"):
            enable(**settings)
        while step < options.get("steps", 6):
            done = step % len(loader)
            if not options.get("is_stateful"):
                loader.set_epoch(step // len(loader))  # of the loader without some batches, the epoch is not counted
            batches = loader if options.get("is_stateful") or not done else accelerator.skip_first_batches(loader, done)
            for batch in batches:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                step += 1
                average.losses.append(loss.item())
                if step in options.get("digest_at", [6]):
                    note()
                if step % 2 == 0 and options.get("project_dir"):
                    accelerator.save_state()
                elif step % 2 == 0 and url and options.get("is_enabled"):
                    accelerator.save_state(f"{url}/step-{step}")
                elif step % 2 == 0 and url:
                    save_state(accelerator, f"{url}/step-{step}", **settings)
                if step == options.get("kill_at"):
                    hf_models.kill_soon()
                if step == options.get("steps", 6):
                    break
        began_seconds = time.monotonic()
        if options.get("call"):
            exec(options["call"], {"accelerator": accelerator, "save_state": save_state, "load_state": load_state})
    except (DcpRemoteError, ValueError, TypeError) as error:
        if not options.get("expects_error"):
            raise
        result |= {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - began_seconds}
    finally:
        close_managers()
        disable()
        warned.end()
    return result | {
        "losses": average.losses,
        "step": step,
        "wrapped": type(model).__name__,
        "iteration": getattr(loader, "iteration", None),
        "folders": sorted(path.name for path in Path().glob("*:")),
    }


if __name__ == "__main__":
    hf_models.run_jobs(train)
