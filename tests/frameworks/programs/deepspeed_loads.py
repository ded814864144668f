"""Cases of loads: what is asked for, what is missing, other programs, other stages."""

from __future__ import annotations

import inspect
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dcp_remote
from dcp_remote import CheckpointManager, Opaque, PerRank, RandomStates, RemoteReader, open_run, training_state
from dcp_remote.errors import CheckpointNotFoundError, StateMismatchError
from dcp_remote.integrations.deepspeed import attach, engine_state
from dcp_remote.integrations.runs import close_managers, manager_of
from deepspeed_checks import raised, warnings_of
from deepspeed_engines import KINDS, SAMPLES, Net, base_of, batch, digests, evaluate, full_state, make_engine, train


def options_of_a_load(url: str) -> None:
    """As of DeepSpeed's own: what is not asked for stays as it is, and results are those that callers expect."""
    engine = make_engine(**KINDS["3"])
    own = [inspect.signature(getattr(engine, name)) for name in ("save_checkpoint", "load_checkpoint")]
    attach(engine, wait=True, progress=False)
    assert [inspect.signature(getattr(engine, name)) for name in ("save_checkpoint", "load_checkpoint")] == own
    assert engine.load_checkpoint(url) == (None, None)
    train(engine, 2)
    assert engine.save_checkpoint(url, tag="two", client_state={"epoch": [1, 2]}) is True
    assert "Pass the run as load_dir" in raised(engine.load_checkpoint, f"{url}/two")
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


def frozen_parameters_are_left_out(url: str) -> None:
    engine = make_engine(**KINDS["3"])
    attach(engine, wait=True, progress=False)
    train(engine, 1)
    engine.save_checkpoint(url, exclude_frozen_parameters=True)
    saved = dcp_remote.load(url, keys="model.*")["model"]
    assert not [name for name in saved if name.startswith("frozen")]
    message = raised(engine.save_checkpoint, url, "whole")
    assert message.startswith("CheckpointExistsError"), message
    assert "Options: each engine of a job saves to a run of its own." in message, message
    other = make_engine(seed=4, **KINDS["2"])
    attach(other, progress=False)
    own = full_state_of_copies(other)
    message = raised(other.load_checkpoint, url)
    assert message.startswith(StateMismatchError.__name__), message
    assert "model.frozen.weight" in message, message
    assert "\nOptions: load_module_strict=False leaves alone" in message, message
    assert full_state_of_copies(other).keys() == own.keys()
    assert all(torch.equal(value, own[name]) for name, value in full_state_of_copies(other).items())
    assert other.load_checkpoint(url, load_module_strict=False)[0] is not None
    now = full_state_of_copies(other)
    assert torch.equal(now["frozen.weight"], own["frozen.weight"])
    assert torch.equal(now["embed.weight"], saved["embed.weight"].bfloat16())


def full_state_of_copies(engine: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.data.clone() for name, parameter in engine.module.named_parameters()}


def a_usual_load_warns_of_nothing(url: str) -> None:
    """Nor does a save, nor a load of weights alone, between precisions, or of a checkpoint that a Trainer saved."""
    engine = make_engine(**KINDS["3-fp16"])
    attach(engine, wait=True, progress=False)
    train(engine, 1)
    assert warnings_of(engine.save_checkpoint, url, client_state={"epoch": 1}) == []
    for options in ({}, {"load_module_only": True}, {"load_optimizer_states": False}):
        assert warnings_of(engine.load_checkpoint, url, **options) == []
        other = make_engine(seed=4, **KINDS["2"])
        attach(other, progress=False)
        assert warnings_of(other.load_checkpoint, url, **options) == []
        assert other.global_steps == (0 if "load_module_only" in options else 1)
    trainer = {"files": Opaque({"a.json": b"{}"}), "trainer": Opaque({"step": 1}), "random": PerRank(RandomStates())}
    manager_of(f"{url}-trainer", progress=False).save(1, engine_state(engine) | trainer, wait=True)
    assert warnings_of(engine.load_checkpoint, f"{url}-trainer") == []
    without_scaler = make_engine(seed=4, **KINDS["0-fp32"])
    attach(without_scaler, wait=True, progress=False)
    train(without_scaler, 1)
    assert warnings_of(without_scaler.load_checkpoint, url) == []
    without_scaler.save_checkpoint(f"{url}-fp32")
    assert warnings_of(engine.load_checkpoint, f"{url}-fp32") == []


def an_engine_for_evaluation(url: str) -> None:
    """In bf16 and without an optimizer: it has the wrapper of DeepSpeed's optimizer, without parameters."""
    engine = make_engine(**KINDS["3"])
    attach(engine, wait=True, progress=False)
    train(engine, 1)
    engine.save_checkpoint(url)
    for stage in (0, 3):
        config = {
            "train_batch_size": SAMPLES,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage, "memory_efficient_linear": False},
        }
        other, *_ = deepspeed.initialize(model=Net(9), config=config)
        attach(other, progress=False)
        assert other.load_checkpoint(url, load_module_only=True)[0] == f"{url}/1"
        assert evaluate(other) == evaluate(engine)


class Counted(nn.LayerNorm):
    """Layer with an extra state that is a tensor, made anew for each call, as those of Transformer Engine."""

    count = 0

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.count)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.count = int(state)


def an_extra_state_that_is_a_tensor(url: str) -> None:
    """Set by a load, as one that is an object."""
    engine = make_engine(**KINDS["2"])
    attach(engine, wait=True, progress=False)
    layer = engine.module.norm
    layer.__class__, layer.count = Counted, 7
    engine.save_checkpoint(url)
    layer.count = 0
    engine.load_checkpoint(url)
    assert layer.count == 7


def a_parameter_of_another_shape(url: str) -> None:
    """Left as it is, with its state, by a manager that restores the state of the engine."""
    engine = make_engine(**KINDS["3"])
    attach(engine, wait=True, progress=False)
    train(engine, 1)
    engine.save_checkpoint(url)
    model = Net(9)
    model.gain = nn.Parameter(torch.full((2,), 5.0))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = {
        "train_batch_size": SAMPLES,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "memory_efficient_linear": False},
        "zero_allow_untested_optimizer": True,
    }
    other, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(trained), config=config)
    attach(other, progress=False)
    message = raised(other.load_checkpoint, url, load_optimizer_states=False)
    assert "model.gain" in message, message
    assert "CheckpointManager.restore(engine_state(engine), exclude=…" in message, message
    with CheckpointManager(url, progress=False) as manager:
        state = {"model": engine_state(other)["model"]}
        assert manager.restore(state, exclude="*gain", unexpected="ignore", dtype="convert", go_on=False) == 1
    now = full_state_of_copies(other)
    assert torch.equal(now["gain"], torch.full((2,), 5.0).bfloat16())
    saved = dcp_remote.load(url, keys="model.*")["model"]
    assert torch.equal(now["embed.weight"], saved["embed.weight"].bfloat16())
    assert torch.equal(now["hidden.bias"], saved["hidden.bias"].bfloat16())


def what_is_missing_is_an_error(url: str) -> None:
    """A parameter, the optimizer or the scheduler; what the module lacks is one, too, or a warning if not strict."""
    engine = make_engine(**KINDS["2"])
    attach(engine, wait=True, progress=False)
    train(engine, 1)
    own = digests(full_state(engine))
    whole = engine_state(engine)
    model = whole["model"].state_dict()
    part = {name: value for name, value in model.items() if name != "hidden.bias"}
    for name, state, expected in (
        ("parameter", whole | {"model": part}, "model.hidden.bias"),
        ("optimizer", {key: whole[key] for key in whole if key != "optim"}, "load_optimizer_states=False"),
        ("scheduler", {key: whole[key] for key in whole if key != "scheduler"}, "load_lr_scheduler_states=False"),
        ("ghost", whole | {"model": model | {"ghost": torch.zeros(3)}}, "ghost"),
    ):
        manager_of(f"{url}-{name}", progress=False).save(1, state, wait=True)
        message = raised(engine.load_checkpoint, f"{url}-{name}")
        assert message.startswith(StateMismatchError.__name__), (name, message)
        assert expected in message, (name, message)
    assert digests(full_state(engine)) == own
    warnings = warnings_of(engine.load_checkpoint, f"{url}-ghost", load_module_strict=False)
    assert dist.get_rank() or "ghost" in "".join(warnings), warnings  # logged by the coordinator


def going_back_and_saving_by_another_tag(url: str) -> None:
    """The step of an abandoned checkpoint is saved anew, and gets its tags; a run has one checkpoint of a step."""
    engine = make_engine(**KINDS["2"])
    attach(engine, wait=True, progress=False)
    for step, tag in ((1, "one"), (2, "two"), (3, None), (4, "four")):
        train(engine, 1)
        engine.save_checkpoint(url, tag=tag, client_state={"branch": step})
    engine.load_checkpoint(url, tag="two")
    train(engine, 1)
    engine.save_checkpoint(url, tag="best", client_state={"branch": "new"})
    assert engine.load_checkpoint(url) == (f"{url}/3", {"branch": "new"})
    assert engine.load_checkpoint(url, tag="best") == (f"{url}/best", {"branch": "new"})
    train(engine, 1)
    engine.save_checkpoint(url, tag="again", client_state={"branch": "new"})
    live = [(info.step, set(info.names)) for info in open_run(url).checkpoints() if not info.abandoned]
    assert live == [(1, {"one"}), (2, {"two"}), (3, {"best", "global_step3"}), (4, {"again", "four"})], live
    assert engine.load_checkpoint(url)[1] == {"branch": "new"}


def saved_before_the_first_step(url: str) -> None:
    """Loaded into a trained engine, which is then as it was at the beginning: its optimizer has no state.

    In stage 0 with 16 bits DeepSpeed makes the states at the beginning.
    """
    for kind in ("0-fp32", "1-32", "2", "3", "3-offload"):
        engine = make_engine(**KINDS[kind])
        attach(engine, wait=True, progress=False)
        engine.save_checkpoint(f"{url}/{kind}")
        assert not any(base_of(engine).state.values())
        losses = train(engine, 2)
        expected = digests(full_state(engine))
        for _ in range(2):
            assert engine.load_checkpoint(f"{url}/{kind}")[0] is not None
            assert (engine.global_steps, engine.lr_scheduler.last_epoch) == (0, 0)
            assert not any(base_of(engine).state.values()), kind
            assert train(engine, 2) == losses, kind
            assert digests(full_state(engine)) == expected, kind
        engine.destroy()
        close_managers()


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
        assert again.load_checkpoint(url) == (f"{url}/4", {})  # which has no counters of DeepSpeed
        now = full_state(again)
        for name, parameter in model.named_parameters():
            assert torch.equal(now[f"copy {name}"], parameter.full_tensor().bfloat16()), name
            if parameter.requires_grad:
                assert torch.equal(now[f"fp32 {name}"], parameter.full_tensor()), name
                assert torch.equal(now[f"exp_avg {name}"], optimizer.state[parameter]["exp_avg"].full_tensor()), name
        assert (again.global_steps, again.global_samples, again.lr_scheduler.last_epoch) == (4, 4 * SAMPLES, 3)
        close_managers()
    attach(again, wait=True, progress=False)
    again.load_checkpoint(url)
    train(again, 1)
    again.save_checkpoint(url)
    assert [info.step for info in open_run(url).checkpoints()] == [3, 4, 5]


def fsdp2_training(seed: int) -> tuple[Any, torch.optim.Optimizer, Any]:
    model: Any = fully_shard(Net(seed), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in trained if one.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1 / (1 + step)] * 2)


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
