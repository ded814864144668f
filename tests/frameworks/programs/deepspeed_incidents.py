"""Cases of the incidents, first without dcp_remote, and of a job that is killed."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from dcp_remote import open_run
from dcp_remote.integrations.deepspeed import attach
from dcp_remote.integrations.runs import manager_of
from deepspeed_checks import raised
from deepspeed_engines import KINDS, digests, full_state, make_engine, train
from tests.support.rank_programs import report


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


def incident_0_of_a_url(url: str) -> None:
    """DeepSpeed's own save takes a URL for a folder, which is refused once this package is imported."""
    engine = make_engine(**KINDS["2"])
    train(engine, 1)
    local = Path("s3:").absolute()
    assert "takes local folders alone" in raised(engine.save_checkpoint, url)
    DeepSpeedEngine.save_checkpoint.__wrapped__(engine, url)
    assert list((local / url.removeprefix("s3://")).glob("global_step1/*optim_states.pt"))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(local)
    dist.barrier()
    attach(engine, wait=True, progress=False)
    engine.save_checkpoint(url)
    assert open_run(url).latest() is not None
    assert not local.exists()


def incident_4_saved(url: str) -> None:
    """Save by DeepSpeed into a folder, and with us; `incident_4_loaded` runs at another number of ranks."""
    engine = make_engine(**KINDS["2"])
    train(engine, 2)
    folder = str(Path("incident-4").absolute())
    engine.save_checkpoint(folder)
    attach(engine, wait=True, progress=False)
    engine.save_checkpoint(url)
    report(saved=digests(full_state(engine)), folder={"INCIDENT_4": folder})


def incident_4_loaded(url: str) -> None:
    engine = make_engine(seed=6, **KINDS["2"])
    message = raised(engine.load_checkpoint, os.environ["INCIDENT_4"])
    assert message.startswith("ZeRORuntimeException"), message
    engine = make_engine(seed=6, **KINDS["2"])
    attach(engine, progress=False)
    engine.load_checkpoint(url.replace("loaded", "saved"))
    report(loaded=digests(full_state(engine)))


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
