"""`remote(trainer, url)` with the real Trainer: one process, DDP and FSDP2 on gloo ranks, against an S3 server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp_remote import load, open_run
from tests.support.rank_programs import Ranks

Train = Callable[..., Ranks]


@pytest.fixture
def train(run_program: Callable[..., Ranks], tmp_path: Path) -> Train:
    """Return a function that trains on some ranks, with the options of `programs/hf_train.py`."""

    def run(world_size: int = 1, *, is_checked: bool = True, **options: Any) -> Ranks:
        options.setdefault("mode", "plain")
        path = tmp_path / f"options-{len(list(tmp_path.glob('options-*')))}.json"
        path.write_text(json.dumps(options))
        return run_program("hf_train.py", world_size, path, is_checked=is_checked)

    return run


MODES = [("plain", 1), ("ddp", 2), ("fsdp2", 2)]


@pytest.mark.parametrize(("mode", "world_size"), MODES)
def test_a_killed_training_goes_on_as_if_it_had_not_been_killed(
    train: Train, bucket_url: str, mode: str, world_size: int
) -> None:
    """Killed in the middle of its second save: losses, state and random states are equal to the bit from there on."""
    whole = train(world_size, mode=mode, digest_at=[2, 6]).reports
    url = f"{bucket_url}/run"
    killed = train(
        world_size,
        mode=mode,
        url=url,
        kill_at=4,
        settings={"storage_options": {"upload_bytes_per_second": 100_000}},
        is_checked=False,
    )
    assert killed.exit_codes == [-9] * world_size, killed.show()
    run = open_run(url)
    assert [info.names for info in run.checkpoints()] == [("checkpoint-2",)]
    resumed = train(world_size, mode=mode, url=url, resume=True, digest_at=[6]).reports
    for rank in range(world_size):
        loaded, uninterrupted = resumed[rank]["digests"]["2"], whole[rank]["digests"]["2"]
        assert loaded["model"] == uninterrupted["model"]
        assert loaded["optimizer"] == uninterrupted["optimizer"]
        assert resumed[rank]["digests"]["6"] == whole[rank]["digests"]["6"]
        assert resumed[rank]["losses"] == whole[rank]["losses"]
        assert resumed[rank]["count"] == 6
        assert resumed[rank]["local"] == []
    assert [info.names for info in run.checkpoints()] == [("checkpoint-2",), ("checkpoint-4",), ("checkpoint-6",)]
    names = set(load(url, keys=["files", "trainer"])["files"].names)
    assert {"config.json", "generation_config.json", "trainer_state.json", "training_args.json"} <= names
