"""Strategies of Lightning's Trainer and of Fabric, with the real packages on gloo ranks, against an S3 server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp_remote import load, open_run
from dcp_remote.testing.servers import S3Server
from tests.support.rank_programs import Ranks

# `make test-frameworks` leaves out what the others hold nearly as well: importing the frameworks takes a while.
LONG = pytest.mark.torture(smoke=False)

MODES = [pytest.param("fsdp1", 2)]
MODES += [pytest.param(mode, size, marks=LONG) for mode, size in (("fsdp2", 2), ("zero3", 2), ("ddp", 2), ("plain", 1))]


@pytest.fixture
def train(run_program: Callable[..., Ranks], tmp_path: Path) -> Callable[..., Ranks]:
    """Return a function that runs jobs of `programs/lightning_train.py` on some ranks: `train(2, first={…})`."""

    def run(world_size: int, *, is_checked: bool = True, **jobs: dict[str, Any]) -> Ranks:
        path = tmp_path / f"options-{len(list(tmp_path.glob('options-*')))}.json"
        path.write_text(json.dumps(jobs))
        return run_program("lightning_train.py", world_size, path, is_checked=is_checked)

    return run


@pytest.mark.parametrize(("mode", "world_size"), MODES)
def test_a_killed_training_goes_on_as_if_it_had_not_been_killed(
    train: Callable[..., Ranks], bucket_url: str, s3_server: S3Server, mode: str, world_size: int
) -> None:
    """Losses, model, optimizer, callbacks and the position of each rank in its data are those of a whole training.

    Then the last checkpoint is loaded on one rank more, from which two steps are trained.
    """
    url = f"{bucket_url}/run"
    job: dict[str, Any] = {"mode": mode, "stateful": True, "saver": {"save_last": True}}
    slow = {"storage_options": {"upload_bytes_per_second": 100_000}}
    killed = train(
        world_size,
        whole={**job, "digest_at": [2, 6]},
        killed={**job, "url": url, "kill_at": 4, "settings": slow},
        is_checked=False,
    )
    assert killed.exit_codes == [-9] * world_size, killed.show()
    run = open_run(url, storage_options=s3_server.storage_options)
    assert [set(info.names) for info in run.checkpoints()] == [{"epoch=0-step=2.ckpt", "last.ckpt"}]
    # With a slash, which Lightning would take for another folder.
    resumed = train(world_size, resumed={**job, "url": f"{url}/", "ckpt_path": "last", "digest_at": [6]})
    for before, after in zip(killed.reports, resumed.reports, strict=True):
        whole, later = before["whole"], after["resumed"]
        assert later["digests"]["2"] == whole["digests"]["2"]
        assert later["digests"]["6"] == whole["digests"]["6"]
        assert later["losses"] == whole["losses"][2:]
        assert later["count"] == whole["count"] == 6
        assert later["local"] == []
    assert [info.step for info in run.checkpoints()] == [2, 4, 6]
    assert "last.ckpt" in run.checkpoints()[-1].names
    about = run.load(keys="lightning")["lightning"]
    assert about["hyper_parameters"]["width"] == {"hidden": 5}
    assert "leaky_relu" in about["hyper_parameters"]["activation"]
    if mode != "plain":
        more = train(world_size + 1, more={"mode": mode, "url": url, "ckpt_path": f"{url}/epoch=0-step=4.ckpt"})
        digests = {json.dumps(one["more"]["digests"]["4"]) for one in more.reports}
        assert len(digests) == (world_size + 1 if mode == "zero3" else 1)  # of each rank's own part
        assert [info.step for info in run.checkpoints() if not info.abandoned] == [2, 4, 6]


def test_old_checkpoints_go_and_the_best_stay(
    train: Callable[..., Ranks], bucket_url: str, s3_server: S3Server
) -> None:
    """`save_top_k` by a metric with a slash in names; the last is kept beside the best."""
    url = f"{bucket_url}/run"
    saver = {"monitor": "loss", "save_top_k": 2, "save_last": True, "filename": "{step}-{loss:.4f}"}
    (report,) = train(1, whole={"mode": "plain", "url": url, "max_steps": 8, "saver": saver}).reports
    losses = report["whole"]["losses"]
    saved = {step: losses[step - 1] for step in (2, 4, 6, 8)}
    best = sorted(saved, key=saved.__getitem__)[:2]
    run = open_run(url, storage_options=s3_server.storage_options)
    assert {info.step for info in run.checkpoints()} == {*best, 8}
    assert run.best("loss") is not None
    assert report["whole"]["best"].startswith(f"{url}/step={min(saved, key=saved.__getitem__)}-loss=")


def test_a_training_that_would_not_be_saved_is_refused(train: Callable[..., Ranks], bucket_url: str) -> None:
    """It starts anew where the run has checkpoints; `start_over` leaves these behind. An empty run has no `last`."""
    url = f"{bucket_url}/run"
    job: dict[str, Any] = {"mode": "ddp", "url": url, "max_steps": 2}
    ranks = train(
        2,
        first={**job, "ckpt_path": "last"},
        again={**job, "expects_error": True},
        over={**job, "settings": {"start_over": True}},
    )
    for report in ranks.reports:
        assert "error" not in report["first"]
        assert "This run has checkpoints already" in report["again"]["error"]
        assert report["again"]["losses"] == []
        assert "error" not in report["over"]


def test_a_save_on_one_rank_alone_ends(train: Callable[..., Ranks], bucket_url: str) -> None:
    """The founding incident 3: the rank that calls gets an error that names the other, and so does a rank's failure."""
    job: dict[str, Any] = {"mode": "fsdp1", "settings": {"arrival_seconds": 3.0}, "expects_error": True}
    ranks = train(
        2,
        alone={**job, "url": f"{bucket_url}/alone", "save_on_rank_0_at": 3, "saver": {"every_n_train_steps": 100}},
        is_checked=False,
    )
    assert " has not called the save of step 3" in ranks.reports[0]["alone"]["error"], ranks.show()


@LONG
def test_weights_of_a_training_are_read_by_a_plain_script(
    train: Callable[..., Ranks], bucket_url: str, s3_server: S3Server
) -> None:
    """Under the names of the module, whatever the strategy was."""
    url = f"{bucket_url}/run"
    train(2, saved={"mode": "fsdp2", "url": url, "max_steps": 2})
    model = load(url, keys="model.*", storage_options=s3_server.storage_options)["model"]
    shapes = {name: tuple(value.shape) for name, value in model.items()}
    assert shapes == {"first.weight": (5, 8), "first.bias": (5,), "second.weight": (2, 5)}


@LONG
def test_the_example(run_program: Callable[..., Ranks], bucket_url: str, s3_server: S3Server) -> None:
    """`examples/lightning_fsdp.py` on two ranks, and on one, which finds that all epochs are trained."""
    script, url = Path(__file__).parents[2] / "examples" / "lightning_fsdp.py", f"{bucket_url}/run"
    first = run_program(script, 2, url)
    assert "trained to step 80" in first.outputs[0]
    second = run_program(script, 1, url)
    assert "Restored all states" in second.outputs[0]
    (info,) = open_run(url, storage_options=s3_server.storage_options).checkpoints()
    assert (info.step, "last.ckpt" in info.names) == (80, True)


def test_the_command_line_of_lightning(
    run_program: Callable[..., Ranks], bucket_url: str, s3_server: S3Server, tmp_path: Path
) -> None:
    """A configuration of LightningCLI names the strategy and the run; the program imports nothing of this package."""
    url = f"{bucket_url}/run"
    (report,) = run_program("lightning_cli.py", 1, url).reports
    assert report["ended"] == [4, 6]
    newest = open_run(url, storage_options=s3_server.storage_options).latest()
    assert newest is not None
    assert (newest.step, set(newest.names)) == (6, {"epoch=0-step=6.ckpt", "last.ckpt"})
    assert (tmp_path / "saved.yaml").exists()
