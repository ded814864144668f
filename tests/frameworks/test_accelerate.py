"""`save_state` and `load_state` of Accelerate: one process, DDP, FSDP2 and ZeRO-3 on gloo ranks, with an S3 server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp_remote import open_run
from dcp_remote.testing.servers import S3Server
from tests.support.rank_programs import Ranks
from tests.support.training_jobs import Jobs, jobs_of, killed_job

# `make test-frameworks` leaves out what the others hold nearly as well: importing the frameworks takes a while.
LONG = pytest.mark.torture(smoke=False)


@pytest.fixture
def train(run_program: Callable[..., Ranks], tmp_path: Path) -> Jobs:
    """Return a function that runs jobs of `programs/accelerate_train.py` on some ranks."""
    return jobs_of("accelerate_train.py", run_program, tmp_path)


@pytest.mark.parametrize(
    ("mode", "world_size"),
    [("fsdp2", 2), *(pytest.param(mode, size, marks=LONG) for mode, size in (("plain", 1), ("ddp", 2), ("zero3", 2)))],
)
def test_a_killed_training_goes_on_as_if_it_had_not_been_killed(
    train: Jobs, bucket_url: str, s3_server: S3Server, mode: str, world_size: int
) -> None:
    """Losses, state and random states are equal to the bit to those of an uninterrupted training, without a gather.

    Under ZeRO-3 every function that gathers fails.
    """
    url = f"{bucket_url}/run"
    killed = train(
        world_size, mode=mode, whole={"digest_at": [2, 6]}, killed=killed_job(url, kill_at=5, steps=9), is_checked=False
    )
    assert killed.exit_codes == [-9] * world_size, killed.show()
    run = open_run(url, storage_options=s3_server.storage_options)
    assert [info.names for info in run.checkpoints()] == [("step-2",)]
    resumed = train(world_size, mode=mode, resumed={"url": url, "resume": url})
    for rank, (before, after) in enumerate(zip(killed.reports, resumed.reports, strict=True)):
        whole, later = before["whole"], after["resumed"]
        assert later["digests"] == whole["digests"]
        # Of registered objects the main process's are saved, as by Accelerate.
        assert later["losses"][2 * bool(rank) :] == whole["losses"][2 * bool(rank) :]
        assert later["iteration"] == whole["iteration"]
        assert later["warnings"] == []
    assert [info.names for info in run.checkpoints()] == [("step-2",), ("step-4",), ("step-6",)]


def test_without_this_package_a_url_becomes_a_local_folder(train: Jobs, bucket_url: str) -> None:
    """Accelerate's own methods save into a folder `s3:` and load from it; with `enable` they take the bucket."""
    url = f"{bucket_url}/run"
    folder = url.replace("//", "/")
    call = (
        f"own = type(accelerator)\nown.save_state.__wrapped__(accelerator, '{url}/step-2')\nimport shutil, os\n"
        f"assert os.path.isfile('{folder}/step-2/model.safetensors')\n"
        f"own.load_state.__wrapped__(accelerator, '{url}/step-2')\nshutil.rmtree('s3:')"
    )
    jobs: dict[str, Any] = {
        "without": {"steps": 2, "call": call},
        "whole": {"steps": 8, "digest_at": [4, 8]},
        "enabled": {"steps": 4, "is_enabled": True, "url": url},
        "resumed": {"steps": 8, "is_enabled": True, "url": url, "resume": f"{url}/step-4", "digest_at": [8]},
        "named": {"steps": 4, "project_dir": f"{bucket_url}/project", "is_enabled": True},
        "stateful": {"steps": 4, "is_stateful": True, "url": f"{url}-stateful"},
        "from_stateful": {"steps": 8, "is_stateful": True, "resume": f"{url}-stateful/step-4", "digest_at": [8]},
    }
    (reports,) = train(**jobs).reports
    whole = reports["whole"]
    for name in ("resumed", "from_stateful"):
        assert reports[name]["digests"] == whole["digests"], name
        assert reports[name]["losses"] == whole["losses"], name
    assert all(report["folders"] == [] for report in reports.values())


def test_wrong_calls(train: Jobs, bucket_url: str, s3_server: S3Server) -> None:
    """Each says what to write."""
    url = f"{bucket_url}/run"
    calls = {
        "no_step": f"save_state(accelerator, '{url}/last')",
        "no_run": "save_state(accelerator, 's3://bucket')",
        "hooks": f"accelerator.register_save_state_pre_hook(print)\nsave_state(accelerator, '{url}/step-9')",
        "absent": f"load_state(accelerator, '{url}/step-99')",
        "others": (
            "accelerator.register_for_checkpointing(type(accelerator._custom_objects[0])())\n"
            f"load_state(accelerator, '{url}')"
        ),
    }
    calls["model"] = f"import torch\naccelerator.prepare(torch.nn.Linear(3, 3))\nload_state(accelerator, '{url}')"
    jobs = {name: {"steps": 0, "call": call, "expects_error": True} for name, call in calls.items()}
    named: dict[str, Any] = {"steps": 6, "project_dir": f"{bucket_url}/project", "is_enabled": True}
    (reports,) = train(saved={"steps": 2, "url": url}, **jobs, named=named).reports
    for name, message in {
        "no_step": "A checkpoint has a step: end its name",
        "no_run": "This is not the URL of a checkpoint in a run",
        "hooks": "work on files of a local folder",
        "absent": "CheckpointNotFoundError",
        "others": "another number of these than the accelerator; nothing was loaded",
        "model": "\nOptions: load_state(…, weights_only=True) loads models alone. url=",
    }.items():
        assert message in reports[name]["error"], name
    project = open_run(f"{bucket_url}/project/checkpoints", storage_options=s3_server.storage_options)
    assert [info.names for info in project.checkpoints()] == [("checkpoint_1",), ("checkpoint_2",)]


def test_a_rank_that_fails_in_a_save(train: Jobs, bucket_url: str) -> None:
    """All ranks raise in the call, though the save goes on in the background."""
    url = f"{bucket_url}/run"
    call = (
        "if not accelerator.is_main_process:\n    accelerator._custom_objects[0].losses = None\n"
        f"save_state(accelerator, '{url}/step-3')"
    )
    job = {"steps": 2, "url": url, "call": call, "expects_error": True}
    main, rank_1 = (report["job"] for report in train(2, mode="ddp", job=job).reports)
    assert rank_1["error"].startswith("TypeError")
    assert " failed; the save of step 3 was given up" in main["error"]
    assert main["seconds"] < 10


@LONG
def test_a_save_on_the_main_process_alone(train: Jobs, bucket_url: str) -> None:
    """It ends within 40 s, in the call, by an error that names the rank which did not come."""
    url = f"{bucket_url}/run"
    call = (
        f"import time\nif accelerator.is_main_process:\n    save_state(accelerator, '{url}/step-3')\n"
        "else:\n    time.sleep(45)"
    )
    job = {"steps": 2, "url": url, "call": call, "expects_error": True}
    main, rank_1 = (report["job"] for report in train(2, mode="ddp", job=job).reports)
    assert "rank 1" in main["error"].lower()
    assert 25 < main["seconds"] < 40
    assert "error" not in rank_1


@LONG
def test_other_numbers_of_ranks_load_the_same_state(train: Jobs, bucket_url: str) -> None:
    """FSDP2 on two ranks; into three, and one process. State is equal to the bit."""
    url = f"{bucket_url}/run"
    saved = train(2, mode="fsdp2", saved={"url": url, "steps": 2, "digest_at": [2]}).reports[0]["saved"]
    for mode, world_size in (("fsdp2", 3), ("plain", 1)):
        loaded = train(world_size, mode=mode, loaded={"resume": url, "steps": 3}).reports[0]["loaded"]
        for part in ("model", "optimizer", "scheduler"):
            assert loaded["digests"]["2"][part] == saved["digests"]["2"][part], (mode, part)


@LONG
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_order_of_samples_goes_on(run_program: Callable[..., Ranks], bucket_url: str, world_size: int) -> None:
    """After a checkpoint at the end of an epoch, with the sampler that Accelerate uses by default."""
    for found in run_program("accelerate_order.py", world_size, f"{bucket_url}/run").reports:
        for name in ("own", "none"):
            assert found[name]["parts"] == found[name]["whole"]
            assert len({tuple(epoch) for epoch in found[name]["whole"]}) > 1


def test_the_example(run_program: Callable[..., Ranks], bucket_url: str, s3_server: S3Server) -> None:
    """Two ranks, then one, which goes on where they stopped."""
    url, example = f"{bucket_url}/run", Path(__file__).parents[2] / "examples" / "accelerate_fsdp2.py"
    run_program(example, 2, "--url", url, "--steps", 10)
    resumed = run_program(example, 1, "--url", url, "--steps", 20)
    assert "loaded step 10" in resumed.outputs[0]
    checkpoints = open_run(url, storage_options=s3_server.storage_options).checkpoints()
    assert [info.step for info in checkpoints] == [10, 20]


def test_no_url_is_taken_for_a_folder(run_program: Callable[..., Ranks], bucket_url: str, s3_server: S3Server) -> None:
    """Without `enable` it is refused; a resumed job with `total_limit` saves and deletes as before; a step twice."""
    (report,) = run_program("accelerate_urls.py", 1, bucket_url).reports
    assert report["refused"] == ["InvalidArgumentError"] * 3
    run = open_run(f"{bucket_url}/checkpoints", storage_options=s3_server.storage_options)
    assert [info.step for info in run.checkpoints()] == [2, 3]
    twice = open_run(f"{bucket_url}/twice", storage_options=s3_server.storage_options)
    assert [info.names for info in twice.checkpoints()] == [("step_1", "epoch_0")]
    assert "Save another step. Options: save_state(…, overwrite=True) replaces it. url=" in report["twice"]
    assert report["too_soon"] == [f"{bucket_url}/too-soon/step_1", None]
    folders = open_run(f"{bucket_url}/folders", storage_options=s3_server.storage_options)
    named = {info.step: info.names for info in folders.checkpoints()}
    ends = {step: ["/".join(name.split("/")[-2:]) for name in names] for step, names in named.items()}
    assert ends[104] == ["checkpoint_6", "checkpoints/checkpoint_6"]
    assert (ends[1], ends[100], ends[101]) == ([], ["folder-100", "out/100"], ["out/best"])
    assert (ends[102], ends[103]) == (["step_1", "out/step_1"], ["best", "other/best"])
