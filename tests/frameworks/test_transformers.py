"""`remote(trainer, url)` with the real Trainer: one process, DDP and FSDP2 on gloo ranks, against an S3 server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp_remote import open_run
from dcp_remote.testing.servers import S3Server
from tests.support.rank_programs import Ranks

Jobs = Callable[..., Ranks]


@pytest.fixture
def train(run_program: Callable[..., Ranks], tmp_path: Path) -> Jobs:
    """Return a function that runs jobs of `programs/hf_train.py` on some ranks, one after the other in each process.

    Importing the frameworks takes longer than the trainings, so that a process runs several.
    """

    def run(world_size: int = 1, *, mode: str = "plain", is_checked: bool = True, **jobs: dict[str, Any]) -> Ranks:
        path = tmp_path / f"options-{len(list(tmp_path.glob('options-*')))}.json"
        path.write_text(json.dumps({"mode": mode, "jobs": jobs}))
        return run_program("hf_train.py", world_size, path, is_checked=is_checked)

    return run


def killed_job(url: str) -> dict[str, Any]:
    """Return the options of a job that is killed in the middle of its second save, which a slow link makes long."""
    return {"url": url, "kill_at": 4, "settings": {"storage_options": {"upload_bytes_per_second": 100_000}}}


MODES = [("plain", 1), ("ddp", 2), ("fsdp2", 2)]


@pytest.mark.parametrize(("mode", "world_size"), MODES)
def test_a_killed_training_goes_on_as_if_it_had_not_been_killed(
    train: Jobs, bucket_url: str, s3_server: S3Server, mode: str, world_size: int
) -> None:
    """Losses, state, random states and callbacks are equal to the bit to those of an uninterrupted training."""
    url = f"{bucket_url}/run"
    killed = train(
        world_size, mode=mode, whole={"digest_at": [2, 6]}, killed=killed_job(url), is_checked=False
    )
    assert killed.exit_codes == [-9] * world_size, killed.show()
    run = open_run(url, storage_options=s3_server.storage_options)
    assert [info.names for info in run.checkpoints()] == [("checkpoint-2",)]
    resumed = train(world_size, mode=mode, resumed={"url": url, "resume": True, "digest_at": [6]})
    for before, after in zip(killed.reports, resumed.reports, strict=True):
        whole, later = before["whole"], after["resumed"]
        for part in ("model", "optimizer"):
            assert later["digests"]["2"][part] == whole["digests"]["2"][part], part
        assert later["digests"]["6"] == whole["digests"]["6"]
        assert later["losses"] == whole["losses"]
        assert later["count"] == whole["count"] == 6
        assert later["local"] == []
    assert [info.names for info in run.checkpoints()] == [("checkpoint-2",), ("checkpoint-4",), ("checkpoint-6",)]
    names = set(run.load(keys="files")["files"].names)
    assert {"config.json", "generation_config.json", "trainer_state.json", "training_args.json"} <= names
