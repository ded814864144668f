"""Save a small model under one framework, or load what all others saved; report digests by job.

exchange.py <file of jobs>: a list of {"name", "mode", "url", "action": "save" | "resume" | "weights"}

Every sample of every batch is the same, so that neither the order of data nor the number of ranks counts.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from dcp_remote import CheckpointManager, ModelState, training_state
from dcp_remote.errors import DcpRemoteError
from dcp_remote.integrations.runs import close_managers
from tests.support.rank_programs import leave_process_group, report

SAVED_STEP, LAST_STEP = 2, 4
LEARNING_RATE = 0.05
BATCH = 3

Digests = dict[str, str]
State = dict[str, torch.Tensor]


class Net(nn.Module):
    """Two layers of odd sizes, so that shards are uneven and some are empty."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(8, 5), nn.Linear(5, 3, bias=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        loss: torch.Tensor = self.second(torch.tanh(self.first(x))).square().mean()
        return {"loss": loss}


class Job:
    """One training: saves after the second step, or loads before the third; then trains to the fourth.

    Attributes:
        mode: Framework, and after a hyphen how it shards: "deepspeed-3".
        url: URL of the run, or of the checkpoint to load.
        action: "save", "resume", or "weights".
        digests: Digests of model and optimizer, by name: as saved or loaded, and after the fourth step.
    """

    def __init__(self, mode: str, url: str, action: str) -> None:
        self.framework, _, self.sharding = mode.partition("-")
        self.url, self.action = url, action
        self.own_url = url if action == "save" else f"{url}-{mode}-{action}"
        self.digests: list[Digests] = []

    @property
    def seed(self) -> int:
        return 0 if self.action == "save" else 1

    @property
    def first_step(self) -> int:
        return 0 if self.action == "save" else SAVED_STEP

    def note(self, state: State) -> None:
        """Note the state after the second or the fourth step, under names without wrappers' prefixes."""
        self.digests.append({name: _digest(value) for name, value in sorted(state.items())})

    def train(self, step: Callable[[], None], save: Callable[[], object], read: Callable[[], State]) -> None:
        """Train in a loop of the script's own."""
        if self.action != "save":
            self.note(read())
        if self.action == "weights":
            return
        for number in range(self.first_step, LAST_STEP):
            step()
            if number + 1 == SAVED_STEP:
                save()
                self.note(read())
        self.note(read())


def _digest(value: torch.Tensor) -> str:
    return repr([number.hex() for number in value.double().flatten().tolist()])


def one_batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 8).expand(BATCH, 8)


def whole_state(model: nn.Module, optimizer: Any) -> State:
    """Return the values of model and optimizer, whole."""
    options = StateDictOptions(full_state_dict=True)
    weights: Any = get_model_state_dict(model, options=options)
    state: State = {f"fp32 {name.removeprefix('module.')}": value for name, value in weights.items()}
    if optimizer is not None:
        states: Any = get_optimizer_state_dict(model, optimizer, options=options)["state"]
        for name, values in states.items():
            state |= {f"{key} {name.removeprefix('module.')}": values[key] for key in ("exp_avg", "exp_avg_sq")}
    return state


def engine_state(engine: Any) -> State:
    """Return the same of an engine of DeepSpeed, by DeepSpeed's own functions."""
    import deepspeed_engines

    optimizer = engine.optimizer
    has_states = any(getattr(optimizer, "optimizer", optimizer).state.values())
    if has_states:
        state = deepspeed_engines.full_state(engine)
        return {name: value for name, value in state.items() if not name.startswith("copy ")}
    shapes = {name: value.shape for name, value in Net(0).named_parameters()}
    return {
        f"fp32 {name}": deepspeed_engines._full(engine, parameter, "fp32").view(shapes[name])
        for name, parameter in engine.module.named_parameters()
    }


def make_optimizer(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)


def shard(model: Any, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for part in (model.first, model.second, model):
        fully_shard(part, mesh=mesh)
    return model


# ---- frameworks


def run_script(job: Job) -> None:
    """Train in a plain script: FSDP2, DDP or one process."""
    if job.sharding != "plain" and not dist.is_initialized():
        dist.init_process_group("gloo")
    model: Any = Net(job.seed)
    if job.sharding == "fsdp2":
        model = shard(model, dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    elif job.sharding == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = make_optimizer(model.parameters())

    def step() -> None:
        loss = model(one_batch())["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    state = training_state(model=model, optimizer=optimizer, random_states=False)
    with CheckpointManager(job.url) as checkpoints:
        if job.action == "resume":
            checkpoints.restore(state, SAVED_STEP, unexpected="ignore", dtype="convert", go_on=False, must_exist=True)
        elif job.action == "weights":
            weights = {"model": ModelState(model)}
            checkpoints.restore(weights, SAVED_STEP, unexpected="ignore", dtype="convert", go_on=False, must_exist=True)
        job.train(
            step,
            lambda: checkpoints.save(SAVED_STEP, state, wait=True),
            lambda: whole_state(model, None if job.action == "weights" else optimizer),
        )


def run_deepspeed(job: Job) -> None:
    """Train with an engine of DeepSpeed."""
    import deepspeed

    from dcp_remote.integrations.deepspeed import attach

    deepspeed.init_distributed("gloo")
    model = Net(job.seed)
    config = _zero_config(job) | {"steps_per_print": 1_000_000}
    engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model.parameters()), config=config)
    attach(engine, wait=True, progress=False)

    def step() -> None:
        loss = engine(one_batch())["loss"]
        engine.backward(loss)
        engine.step()

    if job.action != "save":
        path, _ = engine.load_checkpoint(job.url, str(SAVED_STEP), load_module_only=job.action == "weights")
        assert path is not None
    job.train(step, lambda: engine.save_checkpoint(job.url), lambda: engine_state(engine))


def run_accelerate(job: Job) -> None:
    """Train with Accelerate in a loop of one's own."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DeepSpeedPlugin

    import hf_models
    from dcp_remote.integrations.accelerate import load_state, save_state

    given: dict[str, Any] = {}
    if job.sharding != "plain":
        hf_models.use_gloo_ranks()
    if job.sharding == "fsdp2":
        given["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Linear"],
            cpu_ram_efficient_loading=False,
        )
    elif job.sharding == "zero3" and not AcceleratorState._shared_state:  # kept for the whole process
        given["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=_zero_config(job))
    accelerator = Accelerator(cpu=job.sharding == "plain", **given)
    model: Any = Net(job.seed)
    model, optimizer = accelerator.prepare(model, make_optimizer(model.parameters()))

    def step() -> None:
        loss = model(one_batch())["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    def read() -> State:
        if job.sharding == "zero3":
            return engine_state(model)
        from dcp_remote.integrations.wrappers import unwrap_optimizer

        return whole_state(model, None if job.action == "weights" else unwrap_optimizer(optimizer))

    if job.action != "save":
        load_state(accelerator, f"{job.url}/{SAVED_STEP}", weights_only=job.action == "weights")

    def save() -> None:
        save_state(accelerator, f"{job.url}/step-{SAVED_STEP}", wait=True)

    job.train(step, save, read)


def run_trainer(job: Job) -> None:
    """Train with the Trainer of Transformers."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import hf_models
    from dcp_remote.integrations.transformers import load_weights, remote

    given: dict[str, Any] = {"use_cpu": job.sharding == "plain"}
    if job.sharding != "plain":
        hf_models.use_gloo_ranks()
        given["ddp_backend"] = "gloo"
    if job.sharding == "fsdp2":
        given["fsdp"] = "full_shard auto_wrap"
        given["fsdp_config"] = {"version": 2, "transformer_layer_cls_to_wrap": ["Linear"]}
    elif job.sharding == "zero3":
        given["deepspeed"] = _zero_config(job)
    folder = Path(f"trainer-{os.getpid()}")

    class Watch(TrainerCallback):  # type: ignore[misc]  # Transformers may not be installed
        """Callback that notes the state after the second step."""

        def note(self, model: Any, optimizer: Any) -> None:
            from dcp_remote.integrations.wrappers import unwrap_optimizer

            if job.sharding == "zero3":
                job.note(engine_state(trainer.model_wrapped))
            else:
                job.note(whole_state(model, unwrap_optimizer(optimizer)))

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if job.action == "resume":
                self.note(kwargs["model"], kwargs["optimizer"])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == LAST_STEP or (job.action == "save" and state.global_step == SAVED_STEP):
                self.note(kwargs["model"], kwargs["optimizer"])

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=LAST_STEP,
        save_steps=SAVED_STEP,
        per_device_train_batch_size=BATCH,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=0.0,
        report_to=[],
        disable_tqdm=True,
        **given,
    )
    model = Net(job.seed)
    data = [{"x": one_batch()[0]}] * 64
    trainer: Any = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Watch()])
    trainer = remote(trainer, job.own_url)
    if job.action == "weights":
        load_weights(model, f"{job.url}/{SAVED_STEP}")
        job.note(whole_state(model, None))
        return
    trainer.train(resume_from_checkpoint=f"{job.url}/{SAVED_STEP}" if job.action == "resume" else None)
    shutil.rmtree(folder, ignore_errors=True)


def run_lightning(job: Job) -> None:  # noqa: C901  # a user's script
    """Train with Lightning's Trainer."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_models import ENVIRONMENT, WORLD_SIZE, make_accelerator, make_strategy

    os.environ.update(ENVIRONMENT)

    class Module(pl.LightningModule):  # type: ignore[misc]  # Lightning may not be installed
        """The same two layers, under the same names."""

        def __init__(self) -> None:
            super().__init__()
            net = Net(job.seed)
            self.first, self.second, self.is_sharded = net.first, net.second, False

        def configure_model(self) -> None:
            if job.sharding == "fsdp2" and not self.is_sharded:
                shard(self, self.device_mesh["data_parallel"])
                self.is_sharded = True

        def training_step(self, batch: Any, index: int) -> Any:
            return self.second(torch.tanh(self.first(batch[0]))).square().mean()

        def validation_step(self, batch: Any, index: int) -> None:
            """Do nothing."""

        def configure_optimizers(self) -> Any:
            return make_optimizer(self.parameters())

    class Watch(Callback):  # type: ignore[misc]  # as above
        """Callback that notes the state after the second step."""

        def note(self, trainer: Any) -> None:
            if job.sharding.startswith("zero"):
                job.note(engine_state(trainer.strategy.model))
            else:
                job.note(whole_state(trainer.strategy.model, trainer.optimizers[0] if trainer.optimizers else None))

        def on_train_start(self, trainer: Any, module: Any) -> None:
            if job.action == "resume":
                self.note(trainer)

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            if job.action == "weights":
                self.note(trainer)

        def on_train_batch_end(self, trainer: Any, module: Any, *arguments: Any) -> None:
            if trainer.global_step == LAST_STEP or (job.action == "save" and trainer.global_step == SAVED_STEP):
                self.note(trainer)

    strategy = make_strategy(job.sharding, {})  # first: its import lets the callback take a URL
    saver = ModelCheckpoint(dirpath=job.own_url, every_n_train_steps=SAVED_STEP, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator=make_accelerator(job.sharding),
        devices=1 if job.sharding == "plain" else WORLD_SIZE,
        strategy=strategy,
        callbacks=[Watch(), saver],
        max_steps=LAST_STEP,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        limit_val_batches=1 if job.action == "weights" else 0,
        num_sanity_val_steps=0,
    )
    data = DataLoader(TensorDataset(one_batch()[:1].repeat(64, 1)), batch_size=BATCH)
    source = None if job.action == "save" else f"{job.url}/{SAVED_STEP}"
    if job.action == "weights":
        trainer.validate(Module(), data, ckpt_path=source, verbose=False)
    else:
        trainer.fit(Module(), data, ckpt_path=source)


def run_fabric(job: Job) -> None:
    """Train with Fabric."""
    from lightning.fabric import Fabric

    from lightning_models import ENVIRONMENT, WORLD_SIZE, make_accelerator, make_strategy

    os.environ.update(ENVIRONMENT)
    strategy = make_strategy(
        job.sharding, {}, is_fabric=True, parallelize_fn=lambda model, mesh: shard(model, mesh["data_parallel"])
    )
    fabric = Fabric(
        accelerator=make_accelerator(job.sharding),
        devices=1 if job.sharding == "plain" else WORLD_SIZE,
        strategy=strategy,
    )
    fabric.launch()
    model: Any = Net(job.seed)
    if job.sharding == "fsdp2":
        model = fabric.setup_module(model)
        optimizer: Any = fabric.setup_optimizers(make_optimizer(model.parameters()))
    else:
        model, optimizer = fabric.setup(model, make_optimizer(model.parameters()))

    def step() -> None:
        loss = model(one_batch())["loss"]
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    state = {"model": model, "optimizer": optimizer}
    if job.action == "resume":
        fabric.load(f"{job.url}/{SAVED_STEP}", state, strict=False)
    elif job.action == "weights":
        fabric.load_raw(f"{job.url}/{SAVED_STEP}", model)
    job.train(
        step,
        lambda: fabric.save(f"{job.url}/step-{SAVED_STEP}.ckpt", state),
        lambda: whole_state(model._forward_module, None if job.action == "weights" else optimizer.optimizer),
    )


RUNNERS = {
    "script": run_script,
    "deepspeed": run_deepspeed,
    "accelerate": run_accelerate,
    "trainer": run_trainer,
    "lightning": run_lightning,
    "fabric": run_fabric,
}


def _zero_config(job: Job) -> dict[str, Any]:
    stage = int(job.sharding[-1])
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": stage, **({"memory_efficient_linear": False} if stage == 3 else {})},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def main() -> None:
    """Run the jobs, each of which is reported by its name."""
    for one in json.loads(Path(sys.argv[1]).read_text()):
        job = Job(one["mode"], one["url"], one["action"])
        if job.sharding == "plain":
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                os.environ.pop(name, None)
        error = None
        try:
            RUNNERS[job.framework](job)
        except DcpRemoteError as caught:
            if job.action == "save":
                raise
            error = f"{type(caught).__name__}: {caught}"
        close_managers()
        report(**{one["name"]: {"digests": job.digests, "error": error}})
    leave_process_group()


if __name__ == "__main__":
    main()
