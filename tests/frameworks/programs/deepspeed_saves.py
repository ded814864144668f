"""Cases of saves: in the background, by every engine, without a gather, within the budget; ranks that fail."""

from __future__ import annotations

import inspect
from pathlib import Path
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from dcp_remote import open_run
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.integrations.deepspeed import attach, disable, enable
from dcp_remote.integrations.folders import leave_to_trainer
from dcp_remote.integrations.runs import manager_of
from deepspeed_checks import raised
from deepspeed_engines import KINDS, digests, full_state, make_engine, train
from tests.support.rank_programs import report

MiB = 1024**2


def saves_in_the_background(url: str) -> None:
    """Training goes on while the copy is uploaded; saves in one step are one checkpoint with all tags."""
    engine = make_engine(**KINDS["3"])
    attach(engine, progress=False)
    train(engine, 2)
    expected = digests(full_state(engine))
    for tag in ("a", "a", None):
        engine.save_checkpoint(url, tag=tag)
    train(engine, 2)
    manager_of(url).wait()
    (info,) = open_run(url).checkpoints()
    assert (info.step, set(info.names)) == (2, {"a", "global_step2"}), info  # the second was uploaded once
    engine.save_checkpoint(url, tag="a")  # the name moves
    assert engine.load_checkpoint(url, tag="global_step2")[0] is not None
    assert digests(full_state(engine)) == expected
    assert [one.step for one in open_run(url).checkpoints() if "a" in one.names] == [4]


def every_class_is_patched(url: str) -> None:
    """By `enable`, until `disable`; local folders are DeepSpeed's, and no URL becomes a folder."""
    enable(wait=True, progress=False)
    enable(wait=True, progress=False)
    own = inspect.unwrap(DeepSpeedEngine.save_checkpoint)
    assert inspect.signature(DeepSpeedEngine.save_checkpoint) == inspect.signature(own)
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
    engine.save_checkpoint(url, tag="attached")
    other = make_engine(**KINDS["2"])
    for call in (other.save_checkpoint, other.load_checkpoint, other.save_16bit_model):
        assert "attach(engine)" in raised(call, url)


def folders_go_below_a_url(url: str) -> None:
    """By `enable(url)`, each to a run of its own, under any tag; what DeepSpeed has saved itself is still loaded."""
    engine = make_engine(**KINDS["2"])
    train(engine, 1)
    moved = Path("moved").absolute()
    engine.save_checkpoint(str(moved))
    own = digests(full_state(engine))
    enable(url, progress=False)
    train(engine, 1)
    assert engine.load_checkpoint("out/actor") == (None, None)
    for tag in (7, "last", None):  # a number that is not the step, and a word that means the newest checkpoint
        engine.save_checkpoint("out/actor", tag=tag)
    engine.save_checkpoint("out/critic", client_state={"epoch": 3})
    expected = digests(full_state(engine))
    assert {path.name for path in Path("out").rglob("*") if path.is_file()} == {"dcp_remote.txt"}
    assert raised(engine.save_checkpoint, "other/actor").startswith(InvalidArgumentError.__name__)
    assert engine.load_checkpoint(str(moved))[0] == str(moved / "global_step1" / "mp_rank_00_model_states.pt")
    assert digests(full_state(engine)) == own
    for folder, tag in (("out/actor", 7), ("out/actor", "last"), ("out/actor", None), ("out/critic", None)):
        train(engine, 1)
        loaded, client_state = engine.load_checkpoint(folder, tag=tag)
        assert loaded is not None
        assert digests(full_state(engine)) == expected, folder
    assert client_state == {"epoch": 3}
    (info,) = open_run(f"{url}/actor").checkpoints()
    assert set(info.names) == {"folder-7", "folder-last", "global_step2"}
    leave_to_trainer(url)  # whose exports are folders
    engine.save_checkpoint("export")
    assert list(Path("export").glob("*/*optim_states.pt"))
    disable()


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
        # DeepSpeed's own linear layer would round otherwise in all cases that follow in this process.
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "memory_efficient_linear": False},
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


def a_rank_that_raises_in_the_background(url: str) -> None:
    """All ranks raise in the call, at once; nothing is committed, and the next save works."""
    engine = make_engine(**KINDS["3"])
    attach(engine, progress=False)
    train(engine, 1)
    failing = mock.patch.object(engine.lr_scheduler, "state_dict", side_effect=ValueError("no schedule"))
    with failing if dist.get_rank() == 1 else mock.MagicMock():
        message = raised(engine.save_checkpoint, url)
    assert "no schedule" in message, message
    assert dist.get_rank() == 1 or "rank=1" in message, message
    dist.barrier()
    assert open_run(url).latest() is None
    engine.save_checkpoint(url)
    manager_of(url).wait()
    assert open_run(url).latest() is not None


def a_rank_that_does_not_come(url: str) -> None:
    engine = make_engine(**KINDS["3"])
    attach(engine, wait=True, progress=False, arrival_seconds=2.0)
    train(engine, 1)
    message = raised(engine.save_checkpoint, url) if dist.get_rank() == 0 else ""
    dist.barrier()
    assert dist.get_rank() or " has not called the save of step 1" in message, message
    if dist.get_rank() == 1:  # comes late
        assert raised(engine.save_checkpoint, url).partition(":")[0] == "SaveTimeoutError"
    dist.barrier()
    engine.save_checkpoint(url)
    assert open_run(url).latest() is not None


def what_cannot_be_saved_is_refused_in_the_call(url: str) -> None:
    """Values of `client_state` on rank 0, on all ranks; and settings, before the first save."""
    engine = make_engine(**KINDS["2"])
    assert "setting='keep_last'" in raised(attach, engine, keep_last=3)
    attach(engine, progress=False)
    train(engine, 1)
    message = raised(engine.save_checkpoint, url, client_state={"epoch": 1, "model": nn.Linear(2, 2)})
    assert message.startswith("UnsafeObjectError"), message
    assert "client_state" in message, message
    engine.save_checkpoint(url, client_state={"epoch": 1})
    assert engine.load_checkpoint(url)[1] == {"epoch": 1}


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
