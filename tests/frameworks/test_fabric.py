"""Strategies of Fabric with the real package on gloo ranks, against an S3 server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp_remote import open_run
from dcp_remote.testing.servers import S3Server
from tests.support.rank_programs import RANKS_TIMEOUT_SECONDS, Ranks

# `make test-frameworks` leaves out what the others hold nearly as well: importing the frameworks takes a while.
LONG = pytest.mark.torture(smoke=False)

EXAMPLES = Path(__file__).parents[2] / "examples"

MODES = [pytest.param("fsdp2", 2)]
MODES += [pytest.param(mode, size, marks=LONG) for mode, size in (("fsdp1", 2), ("zero3", 2), ("ddp", 2), ("plain", 1))]


@pytest.fixture
def train(run_program: Callable[..., Ranks], tmp_path: Path) -> Callable[..., Ranks]:
    """Return a function that runs jobs of `programs/fabric_train.py` on some ranks: `train(2, first={…})`."""

    def run(
        world_size: int,
        *,
        is_checked: bool = True,
        timeout_seconds: float = RANKS_TIMEOUT_SECONDS,
        **jobs: dict[str, Any],
    ) -> Ranks:
        path = tmp_path / f"options-{len(list(tmp_path.glob('options-*')))}.json"
        path.write_text(json.dumps(jobs))
        return run_program("fabric_train.py", world_size, path, is_checked=is_checked, timeout_seconds=timeout_seconds)

    return run


@pytest.mark.parametrize(("mode", "world_size"), MODES)
def test_a_training_goes_on_as_if_it_had_not_ended(
    train: Callable[..., Ranks], bucket_url: str, s3_server: S3Server, mode: str, world_size: int
) -> None:
    """Losses, model, optimizer and all values are those of a whole training; then one rank more loads them.

    The program counts its steps under a name of its own, saves the step that it has loaded, and its last step twice.
    """
    url, job = f"{bucket_url}/run", {"mode": mode, "counter": "step_count", "saves_twice": True}
    ranks = train(
        world_size,
        whole=job,
        begun={**job, "url": url, "max_steps": 4},
        resumed={**job, "url": url, "load": url},
        unloaded={**job, "url": url, "expects_error": True},
    )
    for report in ranks.reports:
        whole, resumed = report["whole"], report["resumed"]
        assert "a save would abandon them. Options: fabric.load(<URL of the run>, state)" in report["unloaded"]["error"]
        assert resumed["losses"] == whole["losses"][4:]
        assert resumed["digests"]["6"] == whole["digests"]["6"]
        assert resumed["digests"]["4"] == report["begun"]["digests"]["4"]
        assert resumed["count"] == whole["count"] == 6
    run = open_run(url, storage_options=s3_server.storage_options)
    named = [("step-2.ckpt",), ("step-4.ckpt", "final-4.ckpt"), ("step-6.ckpt", "final-6.ckpt")]
    assert [info.names for info in run.checkpoints()] == named
    if mode in {"fsdp1", "fsdp2"}:
        more = train(world_size + 1, more={**job, "load": f"{url}/step-4.ckpt", "max_steps": 4})
        for report, output in zip(more.reports, more.outputs, strict=True):
            assert report["more"]["digests"]["4"] == ranks.reports[0]["begun"]["digests"]["4"]
            assert "fabric_rank" not in output
        assert "was saved by another number of ranks, or without these data loaders" in more.outputs[0]


def test_tensor_parallelism_goes_on_as_if_it_had_not_ended(train: Callable[..., Ranks], bucket_url: str) -> None:
    """Two by two ranks; then FSDP2 alone loads what they saved."""
    url = f"{bucket_url}/run"
    job = {"mode": "fsdp2", "hidden": 6, "tensor_parallel": 2}
    ranks = train(
        4,
        whole=job,
        begun={**job, "url": url, "max_steps": 4},
        resumed={**job, "url": url, "load": url},
        other={**job, "tensor_parallel": 1, "load": f"{url}/step-4.ckpt", "max_steps": 4},
    )
    for report in ranks.reports:
        assert report["resumed"]["losses"] == report["whole"]["losses"][4:]
        assert report["resumed"]["digests"]["6"] == report["whole"]["digests"]["6"]
        assert report["other"]["digests"]["4"] == report["begun"]["digests"]["4"]


def test_a_save_on_rank_0_alone_ends(train: Callable[..., Ranks], bucket_url: str) -> None:
    """The founding incident 3: an error that names the rank that does not come, where Fabric's own save hangs."""
    job = {"mode": "fsdp2", "only_rank_0": True, "expects_error": True, "settings": {"arrival_seconds": 3.0}}
    ranks = train(2, alone={**job, "url": f"{bucket_url}/run"}, is_checked=False)
    assert " has not called the save of step 2" in ranks.reports[0]["alone"]["error"], ranks.show()


@LONG
@pytest.mark.timeout(400)
def test_without_this_package_a_save_on_rank_0_alone_hangs(train: Callable[..., Ranks], tmp_path: Path) -> None:
    """Fabric's own save waits for the other rank for ever; both had a minute."""
    job = {"mode": "fsdp2", "stock": True, "only_rank_0": True, "away_seconds": 600, "url": str(tmp_path / "folder")}
    begun = train(2, begun={**job, "only_rank_0": False, "max_steps": 2})
    assert [report["begun"]["error"] for report in begun.reports] == [None, None]
    with pytest.raises(AssertionError, match="did not end within 90 s"):
        train(2, alone={**job, "url": str(tmp_path / "other")}, timeout_seconds=90)


@LONG
def test_other_objects_do_not_take_a_step_that_was_saved(run_program: Callable[..., Ranks], bucket_url: str) -> None:
    """A second save of one step, by Fabric or Trainer, is complete or refused, and never only a name."""
    (report,) = run_program("second_saves.py", 1, f"{bucket_url}/runs").reports
    refused = "CheckpointExistsError"
    assert report["fabric"] == {
        "other model": refused,
        "same name": refused,
        "same name, trained": refused,
        "last save": None,
        "optimizer after weights": refused,
        "second name": None,
        "loss in the name": "InvalidArgumentError",
    }
    assert report["lightning"]["parts"] is report["lightning"]["resumed"] is None
    assert "optim" in report["lightning"]["keys"] == report["lightning"]["weights"]
    assert report["lightning"]["trainers"] == "InvalidArgumentError"  # before the first step
    assert report["lightning"]["starts"] == refused
    # Weights alone whose replacement failed (`on_error="warn"`) are replaced by the next whole save of the step.
    assert all("optim" in entries for entries in report["replaced"].values())
    average = report["average"]
    assert average["resumed"] == average["whole"] != average["part"]  # the averages of Lightning's callback go on


@LONG
def test_the_example(run_program: Callable[..., Ranks], bucket_url: str, s3_server: S3Server) -> None:
    """`examples/fabric.py` on two ranks; then, without its last checkpoint, on one, which trains that part again."""
    url = f"{bucket_url}/run"
    first = run_program(EXAMPLES / "fabric.py", 2, url)
    assert "trained to step 100" in first.outputs[0]
    run = open_run(url, storage_options=s3_server.storage_options)
    assert [info.step for info in run.checkpoints()] == [20, 40, 60, 80, 100]
    run.delete(100, force=True)
    second = run_program(EXAMPLES / "fabric.py", 1, url)
    assert "step 80" not in second.outputs[0]
    assert "trained to step 100" in second.outputs[0]
    assert [info.step for info in run.checkpoints()] == [20, 40, 60, 80, 100]
