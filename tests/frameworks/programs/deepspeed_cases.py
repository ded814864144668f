"""Cases of `attach` and `enable`, each a function, run one after another on the same ranks; failures are reported.

deepspeed_cases.py <url> <names of cases, by commas>
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dcp_remote
from dcp_remote import CheckpointManager, RemoteReader, open_run, training_state
from dcp_remote.errors import CheckpointNotFoundError, InvalidArgumentError, StateMismatchError
from dcp_remote.integrations.deepspeed import attach, disable, enable, engine_state
from dcp_remote.integrations.runs import close_managers, manager_of
from deepspeed_engines import KINDS, Net, batch, digests, evaluate, full_state, make_engine, train
from tests.support.rank_programs import report

MiB = 1024**2


def raised(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Return class and text of the error of a call; "" if there is none."""
    try:
        function(*arguments, **options)
    except Exception as error:  # noqa: BLE001  # whatever it is, is compared
        return f"{type(error).__name__}: {error}"
    return ""


# ---- what a save and a load do


def options_of_a_load(url: str) -> None:
    """As of DeepSpeed's own: what is not asked for stays as it is, and results are those that callers expect."""
    engine = make_engine(**KINDS["3"])
    own = [inspect.signature(getattr(engine, name)) for name in ("save_checkpoint", "load_checkpoint")]
    attach(engine, wait=True, progress=False)
    assert [inspect.signature(getattr(engine, name)) for name in ("save_checkpoint", "load_checkpoint")] == own
    assert engine.load_checkpoint(url) == (None, None)
    train(engine, 2)
    assert engine.save_checkpoint(url, tag="two", client_state={"epoch": [1, 2]}) is True
    two = digests(full_state(engine))
    train(engine, 1)
    assert engine.save_checkpoint(url) is True
    three = digests(full_state(engine))
    assert engine.load_checkpoint(url, tag="two") == (f"{url}/two", {"epoch": [1, 2]})
    assert digests(full_state(engine)) == two
    assert (engine.global_steps, engine.lr_scheduler.last_epoch) == (2, 2)
    assert engine.load_checkpoint(url) == (f"{url}/3", {})  # the newest, though an older one was loaded since
    assert digests(full_state(engine)) == three
    assert engine.load_checkpoint(url, tag="global_step3")[0] == f"{url}/global_step3"

    other = make_engine(seed=9, **KINDS["1"])
    attach(other, progress=False)
    fresh = full_state(other) if other.optimizer.state else None
    assert fresh is None  # before its first step
    assert other.load_checkpoint(url, tag="two", load_module_only=True) == (f"{url}/two", {"epoch": [1, 2]})
    assert (other.global_steps, other.lr_scheduler.last_epoch, dict(other.optimizer.optimizer.state)) == (0, 0, {})
    assert other.optimizer.param_groups[0]["lr"] == 0.02
    assert other.load_checkpoint(url, load_optimizer_states=False, load_lr_scheduler_states=False)[0] == f"{url}/3"
    assert (other.global_steps, other.lr_scheduler.last_epoch, dict(other.optimizer.optimizer.state)) == (3, 0, {})
    assert other.load_checkpoint(url, tag="two")[0] == f"{url}/two"
    assert digests(full_state(other)) == two
    manager_of(f"{url}-weights", progress=False).save(1, {"model": engine_state(engine)["model"]}, wait=True)
    message = raised(other.load_checkpoint, f"{url}-weights")
    assert "load_optimizer_states=False" in message, message
    assert other.load_checkpoint(f"{url}-weights", load_module_only=True) == (f"{url}-weights/1", {})
    missing = raised(other.load_checkpoint, url, tag="never")
    assert missing.startswith(CheckpointNotFoundError.__name__), missing


def saves_in_the_background(url: str) -> None:
    """Training goes on while the copy is uploaded; two saves in one step are one checkpoint with both names."""
    engine = make_engine(**KINDS["3"])
    attach(engine, progress=False)
    train(engine, 2)
    expected = digests(full_state(engine))
    for tag in ("a", "a", None):
        engine.save_checkpoint(url, tag=tag)
    train(engine, 2)
    manager_of(url).wait()
    (info,) = open_run(url).checkpoints()
    assert (info.step, set(info.names)) == (2, {"a", "global_step2"}), info
    engine.save_checkpoint(url, tag="a")  # the name moves
    assert engine.load_checkpoint(url, tag="global_step2")[0] is not None
    assert digests(full_state(engine)) == expected
    assert [one.step for one in open_run(url).checkpoints() if "a" in one.names] == [4]


def frozen_parameters_are_left_out(url: str) -> None:
    engine = make_engine(**KINDS["3"])
    attach(engine, wait=True, progress=False)
    train(engine, 1)
    engine.save_checkpoint(url, exclude_frozen_parameters=True)
    saved = dcp_remote.load(url, keys="model.*")["model"]
    assert not [name for name in saved if name.startswith("frozen")]
    other = make_engine(seed=4, **KINDS["2"])
    attach(other, progress=False)
    own = full_state_of_copies(other)
    message = raised(other.load_checkpoint, url)
    assert message.startswith(StateMismatchError.__name__), message
    assert "model.frozen.weight" in message, message
    assert full_state_of_copies(other).keys() == own.keys()
    assert all(torch.equal(value, own[name]) for name, value in full_state_of_copies(other).items())
    assert other.load_checkpoint(url, load_module_strict=False)[0] is not None
    now = full_state_of_copies(other)
    assert torch.equal(now["frozen.weight"], own["frozen.weight"])
    assert torch.equal(now["embed.weight"], saved["embed.weight"].bfloat16())


def full_state_of_copies(engine: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.data.clone() for name, parameter in engine.module.named_parameters()}


def every_class_is_patched(url: str) -> None:
    """By `enable`, until `disable`; local folders are DeepSpeed's, and no URL becomes a folder."""
    original = DeepSpeedEngine.save_checkpoint
    enable(wait=True, progress=False)
    enable(wait=True, progress=False)
    assert inspect.signature(DeepSpeedEngine.save_checkpoint) == inspect.signature(original)
    engine = make_engine(**KINDS["2"])
    train(engine, 1)
    engine.save_checkpoint(url)
    expected = digests(full_state(engine))
    folder = Path("local").absolute()
    engine.save_checkpoint(str(folder), tag="x")
    assert (folder / "latest").read_text() == "x"
    assert list(folder.glob("x/*optim_states.pt"))
    train(engine, 1)
    assert engine.load_checkpoint(str(folder))[0] == str(folder / "x" / "mp_rank_00_model_states.pt")
    assert engine.load_checkpoint(url)[0] == f"{url}/1"
    assert digests(full_state(engine)) == expected
    for save in (engine.save_16bit_model, engine.save_checkpoint):
        mistyped = "s3:/bucket/run" if save == engine.save_checkpoint else url
        assert raised(save, mistyped).startswith(InvalidArgumentError.__name__)
    attach(engine, progress=False, wait=True)
    engine.save_checkpoint(str(folder), tag="y")
    assert (folder / "latest").read_text() == "y"
    disable()
    assert DeepSpeedEngine.save_checkpoint is original


def nothing_is_gathered(url: str) -> None:
    """A save calls no collective of torch, and none of DeepSpeed's functions that gather."""
    for kind in ("3", "2", "1", "3-offload", "0"):
        engine = make_engine(**KINDS[kind])
        attach(engine, wait=True, progress=False)
        train(engine, 1)
        forbidden = mock.Mock(side_effect=AssertionError("gathered"))
        names = [name for name in dir(dist) if name.startswith(("all_", "gather", "broadcast", "reduce", "barrier"))]
        patches = [mock.patch.object(dist, name, forbidden) for name in names if callable(getattr(dist, name))]
        patches += [
            mock.patch.object(deepspeed.comm, name, forbidden) for name in names if hasattr(deepspeed.comm, name)
        ]
        patches += [
            mock.patch.object(deepspeed.zero.GatheredParameters, "__init__", forbidden),
            mock.patch.object(DeepSpeedEngine, "_zero3_consolidated_16bit_state_dict", forbidden),
            mock.patch.object(DeepSpeedEngine, "module_state_dict", forbidden),
        ]
        for patch in patches:
            patch.start()
        try:
            engine.save_checkpoint(f"{url}/{kind}")
        finally:
            for patch in patches:
                patch.stop()
        assert len(patches) > 20
        engine.destroy()


def memory_stays_within_the_budget(url: str) -> None:
    """Above the shard: a copy of it, which is kept, and the budget; the second save needs the budget alone."""
    budget, width = 16 * MiB, 1024
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(20)))
    config = {
        "train_batch_size": dist.get_world_size(),
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": True},
        "steps_per_print": 1_000_000,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    attach(engine, memory_budget_bytes=budget, progress=False, dedup=False)
    figures = {}
    shard = 12 * 20 * width * width // dist.get_world_size()
    for step in range(3):
        loss = engine(torch.ones(1, width).bfloat16()).float().square().mean()
        engine.backward(loss)
        engine.step()
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = resident("VmRSS:")
        engine.save_checkpoint(url)
        manager_of(url).wait()
        figures[f"save {step}"] = round((resident("VmHWM:") - before) / MiB)
    report(memory=figures | {"shard": round(shard / MiB), "budget": budget // MiB})


def resident(field: str) -> int:
    with Path("/proc/self/status").open(encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) * 1024


# ---- other programs


def others_load_it(url: str) -> None:
    """Plain `dcp.load`, `dcp_remote.load` and FSDP2 load what ZeRO-3 saved; ZeRO loads what FSDP2 saved."""
    engine = make_engine(**KINDS["3"])
    attach(engine, wait=True, progress=False)
    train(engine, 3)
    engine.save_checkpoint(url)
    full = full_state(engine)
    template: dict[str, Any] = {
        "model": {name: torch.zeros_like(full[f"fp32 {name}"]) for name in ("embed.weight", "hidden.bias", "gain")},
        "optim": {"state": {"hidden.weight": {"exp_avg": torch.zeros(10, 7)}}},
    }
    dcp.load(template, storage_reader=RemoteReader(url))
    assert all(torch.equal(value, full[f"fp32 {name}"]) for name, value in template["model"].items())
    assert torch.equal(template["optim"]["state"]["hidden.weight"]["exp_avg"], full["exp_avg hidden.weight"])
    weights = dcp_remote.load(url, keys="model.*", dtype=torch.bfloat16)["model"]
    assert torch.equal(weights["head.weight"], weights["embed.weight"])
    assert all(torch.equal(weights[name], full[f"copy {name}"]) for name in ("embed.weight", "frozen.weight"))
    assert dcp_remote.load(url, keys="deepspeed.*")["deepspeed"]["global_steps"] == 3

    model, optimizer, scheduler = fsdp2_training(seed=8)
    state = training_state(model=model, optimizer=optimizer, scheduler=scheduler, random_states=False)
    with CheckpointManager(url, progress=False) as checkpoints:
        assert checkpoints.restore(state, unexpected="ignore", dtype="convert") == 3
        for name, parameter in model.named_parameters():
            key = "fp32" if parameter.requires_grad else "copy"
            assert torch.equal(parameter.full_tensor(), full[f"{key} {name}"].float()), name
            for moment in ("exp_avg", "exp_avg_sq") if parameter.requires_grad else ():
                assert torch.equal(optimizer.state[parameter][moment].full_tensor(), full[f"{moment} {name}"]), name
        assert {float(one["step"]) for one in optimizer.state.values()} == {3.0}
        assert scheduler.last_epoch == 3
        loss = model(batch(3))
        loss.backward()
        optimizer.step()
        checkpoints.save(4, state, wait=True)
    close_managers()
    for kind in ("3", "2"):
        again = make_engine(seed=2, **KINDS[kind])
        attach(again, progress=False)
        assert again.load_checkpoint(url) == (f"{url}/4", {})
        now = full_state(again)
        for name, parameter in model.named_parameters():
            assert torch.equal(now[f"copy {name}"], parameter.full_tensor().bfloat16()), name
            if parameter.requires_grad:
                assert torch.equal(now[f"fp32 {name}"], parameter.full_tensor()), name
                assert torch.equal(now[f"exp_avg {name}"], optimizer.state[parameter]["exp_avg"].full_tensor()), name
        assert again.global_steps == 0  # FSDP2 has no counters of DeepSpeed
        close_managers()


def fsdp2_training(seed: int) -> tuple[Any, torch.optim.Optimizer, Any]:
    model: Any = fully_shard(Net(seed), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in trained if one.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1 / (1 + step)] * 2)


# ---- what is equal to the bit after a resume in another stage


def stages_go_on_alike(url: str) -> None:
    """Without clipping of gradients, on two ranks, stages 1 and 2 go on as stage 3 would have done."""
    engine = make_engine(**KINDS["3"], clipping=0.0)
    attach(engine, wait=True, progress=False)
    train(engine, 3)
    engine.save_checkpoint(url)
    losses = train(engine, 3)
    expected = digests(full_state(engine))
    for kind in ("1", "2", "3"):
        other = make_engine(seed=4, **KINDS[kind], clipping=0.0)
        attach(other, progress=False)
        other.load_checkpoint(url)
        assert train(other, 3) == losses, kind
        assert digests(full_state(other)) == expected, kind
        close_managers()


def linear_layers_of_stage_3(url: str) -> None:
    """By default, stage 3 rounds a linear layer's product to 16 bits before it adds the bias, and others do not.

    This is why a loss after a resume in another stage is some steps of bf16 away, though the state is equal. The layer
    is replaced in the whole process: the engine of stage 0 then agrees with that of stage 3.
    """
    engine = make_engine(**KINDS["0"])
    attach(engine, wait=True, progress=False)
    train(engine, 3)
    engine.save_checkpoint(url)
    expected, loss = full_state(engine), evaluate(engine)
    for is_efficient in (False, True):
        other = make_engine(seed=4, **KINDS["3"], memory_efficient_linear=is_efficient)
        attach(other, progress=False)
        other.load_checkpoint(url)
        assert digests(full_state(other)) == digests(expected)
        assert (evaluate(other) == loss) is not is_efficient
    assert evaluate(engine) == evaluate(other) != loss


# ---- failures


def a_rank_that_raises(url: str) -> None:
    """All ranks raise at once, nothing is committed, and the next save works."""
    engine = make_engine(**KINDS["3"])
    attach(engine, wait=True, progress=False)
    train(engine, 1)
    failing = mock.patch.object(engine.lr_scheduler, "state_dict", side_effect=ValueError("no schedule"))
    with failing if dist.get_rank() == 1 else mock.MagicMock():
        message = raised(engine.save_checkpoint, url)
    assert "no schedule" in message, message
    assert open_run(url).latest() is None
    engine.save_checkpoint(url)
    failing = mock.patch.object(engine.module, "state_dict", side_effect=ValueError("no module"))
    with failing if dist.get_rank() == 0 else mock.MagicMock():
        message = raised(engine.load_checkpoint, url)
    assert "no module" in message, message
    assert engine.load_checkpoint(url)[0] is not None


def a_rank_that_does_not_come(url: str) -> None:
    engine = make_engine(**KINDS["3"])
    attach(engine, wait=True, progress=False, arrival_seconds=2.0)
    train(engine, 1)
    message = raised(engine.save_checkpoint, url) if dist.get_rank() == 0 else ""
    dist.barrier()
    assert dist.get_rank() or "Rank 1 has not called the save of step 1" in message, message
    if dist.get_rank() == 1:  # comes late
        assert raised(engine.save_checkpoint, url).partition(":")[0] == "SaveTimeoutError"
    dist.barrier()
    engine.save_checkpoint(url)
    assert open_run(url).latest() is not None


def partitions_on_nvme_are_refused(url: str) -> None:
    """By an engine that says that they are there: the operator that swaps is not compiled here."""
    engine = make_engine(**KINDS["3"])
    train(engine, 1)
    attach(engine, wait=True, progress=False)
    engine.optimizer.swap_optimizer = True
    assert "NVMe" in raised(engine.save_checkpoint, url)
    assert open_run(url).latest() is None


def parallelism_is_refused(url: str) -> None:
    """Pipelines, whose ranks hold other layers. Last, since DeepSpeed makes no other engine in the process then."""
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    module = deepspeed.pipe.PipelineModule(
        layers=layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform"
    )
    config = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 1_000_000}
    optimizer = torch.optim.AdamW(module.parameters())
    pipeline, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    assert "pipeline parallelism" in raised(attach, pipeline)
    enable(wait=True, progress=False)
    try:
        assert "pipeline parallelism" in raised(pipeline.save_checkpoint, url)
        assert "pipeline parallelism" in raised(pipeline.load_checkpoint, url)
    finally:
        disable()
    assert "deepspeed.initialize" in raised(attach, module)


# ---- the incidents


def incident_0(url: str) -> None:
    """Two saves of one tag with an offload folder: DeepSpeed's own fail, on each rank.

    The swapper, which needs a compiled operator, is replaced; the code that copies is DeepSpeed's.
    """
    engine = make_engine(**KINDS["3"])
    train(engine, 1)
    swapped = Path(f"swapped-{dist.get_rank()}").absolute()
    swapped.mkdir()
    (swapped / "0.tensor.swp").write_bytes(b"moments")
    engine.zero_nvme_offload_optimizer = lambda: True
    engine.optimizer.optimizer_swapper = SimpleNamespace(swap_folder=str(swapped))
    folder = str(Path("incident").absolute())
    engine.save_checkpoint(folder, tag="global_step1")
    assert raised(engine.save_checkpoint, folder, tag="global_step1").startswith("FileExistsError")
    dist.barrier()
    attach(engine, wait=True, progress=False)
    for _ in range(2):
        engine.save_checkpoint(url, tag="global_step1")
    (info,) = open_run(url).checkpoints()
    assert info.names == ("global_step1",)


def incident_4_saved(url: str) -> None:
    """Save by DeepSpeed into a folder, and with us; `incident_4_loaded` runs at another number of ranks."""
    engine = make_engine(**KINDS["2"])
    train(engine, 2)
    engine.save_checkpoint(str(Path("incident-4").absolute()))
    attach(engine, wait=True, progress=False)
    engine.save_checkpoint(url)
    report(saved=digests(full_state(engine)))


def incident_4_loaded(url: str) -> None:
    engine = make_engine(seed=6, **KINDS["2"])
    message = raised(engine.load_checkpoint, str(Path("incident-4").absolute()))
    assert message.startswith("ZeRORuntimeException"), message
    engine = make_engine(seed=6, **KINDS["2"])
    attach(engine, progress=False)
    engine.load_checkpoint(url.replace("loaded", "saved"))
    report(loaded=digests(full_state(engine)))


# ---- a job that is killed


def is_not_killed(url: str) -> None:
    report(losses=train(make_engine(**KINDS["3"]), 6))


def is_killed(url: str) -> None:
    """All ranks are killed while the second save is under way, which is slowed down."""
    engine = make_engine(**KINDS["3"])
    attach(engine, progress=False, storage_options={"upload_bytes_per_second": 3_000})
    losses = train(engine, 2)
    engine.save_checkpoint(url)
    manager_of(url).wait()
    losses += train(engine, 2)
    engine.save_checkpoint(url)
    report(losses=losses)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def goes_on(url: str) -> None:
    engine = make_engine(seed=3, **KINDS["3"])
    attach(engine, progress=False)
    path, _ = engine.load_checkpoint(url.replace("goes_on", "is_killed"))
    report(path=path, step=engine.global_steps, losses=train(engine, 6 - engine.global_steps))


CASES = {
    function.__name__: function
    for function in (
        options_of_a_load,
        saves_in_the_background,
        frozen_parameters_are_left_out,
        every_class_is_patched,
        nothing_is_gathered,
        memory_stays_within_the_budget,
        others_load_it,
        a_rank_that_raises,
        a_rank_that_does_not_come,
        partitions_on_nvme_are_refused,
        parallelism_is_refused,
        stages_go_on_alike,
        linear_layers_of_stage_3,
        incident_0,
        incident_4_saved,
        incident_4_loaded,
        is_not_killed,
        is_killed,
        goes_on,
    )
}


def main() -> None:
    url, names = sys.argv[1:3]
    deepspeed.init_distributed("gloo")
    for name in names.split(","):
        began = time.monotonic()
        try:
            CASES[name](f"{url}/{name}")
            close_managers()
        except BaseException:
            report(**{name: traceback.format_exc()})
            raise
        report(**{name: "passed"})
        sys.stdout.write(f"{name}: {time.monotonic() - began:.1f} s\n")


if __name__ == "__main__":
    main()
