"""Save other objects, or more of them, in a step that this process has saved; report what each checkpoint holds."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dcp_remote import load
from dcp_remote.errors import DcpRemoteError
from dcp_remote.integrations import fabric as remote_fabric
from dcp_remote.integrations import lightning as remote_lightning
from dcp_remote.integrations.runs import close_managers, wait_for_saves
from tests.support.rank_programs import leave_process_group, report
from tests.support.refused_shards import refuse_shards

warnings.filterwarnings("ignore")


class Module(pl.LightningModule):  # type: ignore[misc]  # Lightning may not be installed
    """Layer whose weights begin at one number."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.layer = layer(weight)

    def training_step(self, batch: Any, index: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def layer(weight: float) -> nn.Linear:
    """Return a layer whose weights are one number."""
    made = nn.Linear(2, 2)
    nn.init.constant_(made.weight, weight)
    return made


def error_of(call: Callable[[], object]) -> str | None:
    """Return the name of the error of a call, and wait for what it saves; None without an error."""
    try:
        call()
        close_managers()
    except DcpRemoteError as error:
        return type(error).__name__
    return None


def save_by_fabric(url: str) -> dict[str, Any]:
    """Save by Fabric: another model, a name with a number that is no step, and the optimizer after the weights."""
    fabric = Fabric(accelerator="cpu", devices=1, strategy=remote_fabric.RemoteSingleDeviceStrategy(device="cpu"))
    first, second = fabric.setup(layer(1.0)), fabric.setup(layer(2.0))
    own = layer(3.0)
    trained, optimizer = fabric.setup(own, torch.optim.AdamW(own.parameters()))

    def save_twice(name: str, states: list[dict[str, Any]], then: Callable[[], object] = int) -> str | None:
        def save() -> None:
            for number, state in enumerate(states):
                if number:
                    then()
                fabric.save(f"{url}/{name}/{f'save{number}-' if 'step' in state else name}", state)

        return error_of(save)

    return {
        "other model": save_twice("models", [{"model": first, "step": 1}, {"model": second, "step": 1}]),
        "same name": save_twice("resnet50", [{"model": first}, {"model": first}]),
        "same name, trained": save_twice(
            "unet64", [{"model": trained, "optimizer": optimizer}] * 2, then=optimizer.step
        ),
        "last save": save_twice("step30", [{"model": trained, "optimizer": optimizer}] * 2),
        "optimizer after weights": save_twice(
            "parts", [{"model": trained, "step": 1}, {"model": trained, "optimizer": optimizer, "step": 1}]
        ),
        "second name": save_twice("names", [{"model": first, "step": 1}] * 2),
        "loss in the name": error_of(lambda: fabric.save(f"{url}/loss/loss=0.52.ckpt", {"model": first})),
    }


def save_by_lightning(url: str) -> dict[str, Any]:
    """Save by Lightning: weights alone and then all of a step; and a second trainer."""
    data = DataLoader(TensorDataset(torch.randn(16, 2)), batch_size=2)

    def fit(weight: float, run: str, *savers: dict[str, Any], max_steps: int = 4, **settings: Any) -> None:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=remote_lightning.RemoteSingleDeviceStrategy(device="cpu", checkpoint_settings=settings),
            callbacks=[
                ModelCheckpoint(dirpath=f"{url}/{run}", save_top_k=-1, **{"every_n_train_steps": 4, **saver})
                for saver in savers
            ],
            max_steps=max_steps,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(weight), data, ckpt_path="last" if max_steps > 4 else None)

    weights = {"filename": "weights-{step}", "save_weights_only": True, "every_n_train_steps": 2}
    parts = [weights, {"filename": "all-{step}", "save_last": True}]
    outcome: dict[str, Any] = {"parts": error_of(lambda: fit(1.0, "parts", *parts))}
    outcome["keys"] = sorted(load(f"{url}/parts", step="all-step=4.ckpt"))
    outcome["weights"] = sorted(load(f"{url}/parts", step="weights-step=4.ckpt"))
    outcome["resumed"] = error_of(lambda: fit(1.0, "parts", *parts, max_steps=8))
    starts: dict[str, dict[str, Any]] = {"trainers": {}, "starts": {"start_over": True}}
    for run, settings in starts.items():
        fit(1.0, run, {"filename": "{step}"}, **settings)  # its manager stays open
        outcome[run] = error_of(partial(fit, 5.0, run, {"filename": "{step}"}, **settings))
        close_managers()
    return outcome


def replace_weights(url: str) -> dict[str, Any]:
    """Save weights alone, then all by a save that fails, then all under a third name; return the entries of each."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=remote_lightning.RemoteSingleDeviceStrategy(device="cpu", checkpoint_settings={"on_error": "warn"}),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(1.0), DataLoader(TensorDataset(torch.randn(4, 2))))
    trainer.save_checkpoint(f"{url}/weights.ckpt", weights_only=True)
    wait_for_saves()
    refuses = refuse_shards()
    refuses.set()
    trainer.save_checkpoint(f"{url}/all.ckpt")
    wait_for_saves()
    refuses.clear()
    trainer.save_checkpoint(f"{url}/again.ckpt")
    close_managers()
    return {name: sorted(load(url, step=f"{name}.ckpt")) for name in ("weights", "all", "again")}


def resume_average(url: str) -> dict[str, Any]:
    """Train with averaged weights in one part and in two; return the weights and the averages of both."""
    data = DataLoader(TensorDataset(torch.arange(16.0).view(8, 2) / 16), batch_size=1)

    def fit(run: str, max_steps: int) -> list[float]:
        average = WeightAveraging(avg_fn=lambda average, value, count: (average + value) / 2)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=remote_lightning.RemoteSingleDeviceStrategy(device="cpu"),
            callbacks=[average, ModelCheckpoint(dirpath=f"{url}/{run}", every_n_train_steps=8, save_last=True)],
            max_steps=max_steps,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        torch.manual_seed(0)
        module = Module(1.0)
        trainer.fit(module, data, ckpt_path="last")
        close_managers()
        return [value for parameter in module.parameters() for value in parameter.flatten().tolist()]

    whole, part = fit("whole", 16), fit("parts", 8)
    return {"whole": whole, "part": part, "resumed": fit("parts", 16)}


def main() -> None:
    """Run all; Lightning removes the variables of ranks when a training has ended."""
    environment = dict(os.environ)
    report(fabric=save_by_fabric(f"{sys.argv[1]}/fabric"))
    os.environ.update(environment)
    report(lightning=save_by_lightning(f"{sys.argv[1]}/lightning"))
    report(replaced=replace_weights(f"{sys.argv[1]}/replaced"))
    report(average=resume_average(f"{sys.argv[1]}/average"))
    leave_process_group()


if __name__ == "__main__":
    main()
