"""Checkpoint manager of torchtitan: its own trainer by its command line, on gloo ranks, against an S3 server."""

from __future__ import annotations

import json
import random
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_remote import load, open_run
from dcp_remote.testing.servers import S3Server
from tests.support.rank_programs import ROOT, Ranks

# `make test-frameworks` leaves out what the others hold nearly as well: importing the frameworks takes a while.
LONG = pytest.mark.torture(smoke=False)


@pytest.fixture(autouse=True)
def assets(tmp_path: Path) -> None:
    """Write a tokenizer and texts, which torchtitan's wheel does not have."""
    words, special = [f"w{number}" for number in range(500)], ["<unk>", "<s>", "</s>"]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": text, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for number, text in enumerate(special)
        ],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {
            "type": "WordLevel",
            "vocab": {text: number for number, text in enumerate([*special, *words])},
            "unk_token": "<unk>",
        },
    }
    (tmp_path / "assets" / "data").mkdir(parents=True)
    (tmp_path / "assets" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "assets" / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    generator = random.Random(0)
    texts = [" ".join(generator.choices(words, k=generator.randint(10, 60))) for _ in range(400)]
    lines = "\n".join(json.dumps({"text": text}) for text in texts)
    (tmp_path / "assets" / "data" / "texts.jsonl").write_text(lines)


@pytest.fixture
def train(run_program: Callable[..., Ranks], tmp_path: Path) -> Callable[..., Ranks]:
    """Return a function that runs jobs of `programs/torchtitan_train.py` on some ranks: `train(2, first={…})`."""

    def run(world_size: int, *, is_checked: bool = True, **jobs: dict[str, Any]) -> Ranks:
        path = tmp_path / f"options-{len(list(tmp_path.glob('options-*')))}.json"
        path.write_text(json.dumps(jobs))
        environment = {"HF_HOME": str(tmp_path / "datasets")}
        return run_program("torchtitan_train.py", world_size, path, is_checked=is_checked, environment=environment)

    return run


def job(folder: str, arguments: str = "", *, settings: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Return a job that saves every second step to a folder, by arguments of the command line."""
    own = f"--checkpoint.enable --checkpoint.folder {folder} --checkpoint.interval 2 {arguments}"
    return {"arguments": own.split(), "settings": settings or {}, **options}


def example(url: str) -> dict[str, Any]:
    """Return the job of `examples/torchtitan.md`, with another URL."""
    (command,) = re.findall(r"torchrun (?:.*\\\n)*.*", (ROOT / "examples" / "torchtitan.md").read_text())
    words = shlex.split(command.replace("\\\n", " "))
    arguments = [word.replace("s3://my-bucket/run", url) for word in words[words.index("torchtitan.train") + 1 :]]
    assert url in arguments
    return {"arguments": arguments, "digest_at": []}


def test_a_killed_training_goes_on_as_if_it_had_not_been_killed(
    train: Callable[..., Ranks], bucket_url: str, s3_server: S3Server
) -> None:
    """Losses, model, optimizer, schedule and the position of each rank in its data are those of a whole training."""
    url = f"{bucket_url}/run"
    slow = {"storage_options": {"upload_bytes_per_second": 20_000_000}}
    killed = train(
        2, whole={"arguments": [], "digest_at": [2, 4, 6]}, killed=job(url, settings=slow, kill_at=4), is_checked=False
    )
    assert killed.exit_codes == [-9, -9], killed.show()
    run = open_run(url, storage_options=s3_server.storage_options)
    assert [info.names for info in run.checkpoints()] == [("step-2",)]
    look = "--checkpoint.load_only --checkpoint.load_step 4 --training.steps 5"
    skipping = {"when_busy": "skip", "storage_options": {"upload_bytes_per_second": 5_000_000}}
    skipped = job(f"{bucket_url}/skipped", settings=skipping, digest_at=[])
    resumed = train(2, resumed=job(url), looked=job(url, look, digest_at=[]), skipped=skipped)
    for before, after in zip(killed.reports, resumed.reports, strict=True):
        whole, later = before["whole"], after["resumed"]
        assert later["digests"] == {"loaded": whole["digests"]["2"], "6": whole["digests"]["6"]}
        assert later["loader"]["6"] == whole["loader"]["6"]
        assert later["losses"] == whole["losses"][2:]
        # The step after the save of step 4 comes before the copies.
        assert [count > 20 for count in later["late_copies"]] == [True, True]
        assert after["looked"]["digests"]["loaded"] == whole["digests"]["4"]
    assert killed.reports[0]["whole"]["loader"]["6"] != killed.reports[1]["whole"]["loader"]["6"]
    assert [info.step for info in run.checkpoints()] == [2, 4, 6]
    # The last save is not left out, and returns before it is committed, and even copied.
    steps = open_run(f"{bucket_url}/skipped", storage_options=s3_server.storage_options).steps()
    assert steps[-1] == 6
    assert [len(report["skipped"]["late_copies"]) for report in resumed.reports] == [len(steps)] * 2


@LONG
@pytest.mark.timeout(600)
def test_what_two_ranks_saved_others_load(train: Callable[..., Ranks], bucket_url: str) -> None:
    """Three ranks, one, and tensor parallelism; the data begins anew. A seed checkpoint of one rank, on two."""
    url = f"{bucket_url}/run"
    (saved, _) = train(2, saved=job(url, "--training.steps 2", digest_at=[2])).reports
    seed, load_only = f"{bucket_url}/seed", "--checkpoint.load_only --training.steps"
    more = job(url, f"{load_only} 3", digest_at=[])
    tensor_parallel = job(url, f"{load_only} 3 --parallelism.tensor_parallel_degree 2", digest_at=[])
    others = [
        train(3, more=more),
        train(1, more=more, seed=job(seed, "--checkpoint.create_seed_checkpoint")),
        train(2, more=tensor_parallel, grown=job(seed, f"{load_only} 1", digest_at=[])),
    ]
    for ranks in others:
        for report in ranks.reports:
            assert report["more"]["digests"]["loaded"] == saved["saved"]["digests"]["2"]
            assert len(report["more"]["losses"]) == 1
        assert "another number of data parallel ranks" in ranks.outputs[0]
    (alone,) = others[1].reports
    for report in others[2].reports:
        assert report["grown"]["digests"]["loaded"]["model"] == alone["seed"]["digests"]["seed"]["model"]


@LONG
@pytest.mark.timeout(600)
def test_options_of_torchtitan_mean_the_same(train: Callable[..., Ranks], bucket_url: str, s3_server: S3Server) -> None:
    """Retention, the first step, the last save, going back, loading in part, loading only, and other runs."""
    url, kept, initial = (
        f"{bucket_url}/run",
        f"{bucket_url}/kept",
        "--checkpoint.load_only --checkpoint.initial_load_path",
    )
    last = "--checkpoint.last_save_model_only --checkpoint.export_dtype bfloat16"
    part = "--checkpoint.exclude_from_loading optimizer,lr_scheduler,dataloader,train_state --training.steps 1"
    ranks = train(
        2,
        example=example(f"{bucket_url}/example"),
        kept=job(kept, "--checkpoint.interval 1 --checkpoint.keep_latest_k 2 --training.steps 5", digest_at=[]),
        first=job(
            url,
            f"--checkpoint.interval 9 --checkpoint.enable_first_step_checkpoint {last} --training.steps 2",
            digest_at=[1, 2],
        ),
        newest=job(url, expects_error=True),
        only=job(url, "--checkpoint.load_only --checkpoint.load_step 1 --training.steps 2", digest_at=[2]),
        part=job(
            url,
            f"--checkpoint.load_only --checkpoint.load_step 1 {part}",
        ),
        weights=job(f"{bucket_url}/a", f"{initial} {url} --training.steps 1"),
        everything=job(
            f"{bucket_url}/b", f"{initial} {url}/step-1 --checkpoint.no-initial_load_model_only --training.steps 2"
        ),
        back=job(url, "--checkpoint.load_step 1 --training.steps 2", digest_at=[2]),
    )
    for name, steps in (("kept", [4, 5]), ("example", [5, 6])):
        run = open_run(f"{bucket_url}/{name}", storage_options=s3_server.storage_options)
        assert [info.step for info in run.checkpoints()] == steps
    run = open_run(url, storage_options=s3_server.storage_options)
    assert [(info.step, info.names) for info in run.checkpoints()] == [(1, ("step-1",)), (2, ("step-2",))]
    for report in ranks.reports:
        one, two = report["first"]["digests"]["1"], report["first"]["digests"]["2"]
        assert "StateMismatchError" in report["newest"]["error"]
        assert "--checkpoint.load_step" in report["newest"]["error"]
        assert report["only"]["digests"] == {"loaded": one, "2": two}
        assert report["part"]["digests"]["loaded"]["model"] == one["model"]
        assert report["part"]["digests"]["loaded"]["rest"] != one["rest"]
        assert len(report["part"]["losses"]) == 1
        assert report["weights"]["digests"]["loaded"]["model"] not in {one["model"], two["model"]}  # of bfloat16
        assert report["everything"]["digests"]["loaded"] == one
        assert report["everything"]["losses"] == report["only"]["losses"] == report["back"]["losses"]
        assert report["back"]["digests"] == {"loaded": one, "2": two}


@LONG
def test_weights_come_from_hugging_face_and_go_there(
    train: Callable[..., Ranks], bucket_url: str, s3_server: S3Server
) -> None:
    """By torchtitan's own converter; torchtitan refuses the last save in this form, and we a folder that is no URL."""
    url = f"{bucket_url}/run"
    last = "--checkpoint.last_save_model_only --checkpoint.export_dtype bfloat16 --training.steps 1"
    ranks = train(
        2,
        saved=job(url, last, digest_at=[1]),
        same=job(f"{bucket_url}/same", f"--checkpoint.initial_load_path {url} --training.steps 1", digest_at=[]),
        again=job(f"{bucket_url}/again", "--training.steps 1", export_from=url, digest_at=[]),
        refused=job(url, "--checkpoint.last_save_model_only --checkpoint.last_save_in_hf", expects_error=True),
        local=job("checkpoint", expects_error=True),
    )
    for report in ranks.reports:
        assert report["again"]["digests"]["loaded"]["model"] == report["same"]["digests"]["loaded"]["model"]
        assert report["refused"]["error"] == "SystemExit: 2"
        assert "checkpoint.folder must be the URL of a run" in report["local"]["error"]
        assert report["local"]["losses"] == []
    assert "last_save_in_hf is not supported with a remote" in ranks.outputs[0]
    model = load(url, keys="model.*", storage_options=s3_server.storage_options)["model"]
    assert {value.dtype for value in model.values()} == {torch.bfloat16}


@LONG
def test_checkpoints_of_torchtitan_come_and_go(train: Callable[..., Ranks], bucket_url: str, tmp_path: Path) -> None:
    """A folder of torchtitan's own manager is loaded into a run, and a checkpoint of the run into torchtitan."""
    url, own, load_only = f"{bucket_url}/run", tmp_path / "outputs" / "own", "--checkpoint.load_only"
    stock = job("own", "--training.steps 2", digest_at=[2])
    stock.pop("settings")
    back = job("own", f"{load_only} --checkpoint.exclude_from_loading dataloader --training.steps 3", convert_from=url)
    back.pop("settings")
    path = f"--checkpoint.initial_load_path {own}/step-2 --checkpoint.no-initial_load_model_only --training.steps 4"
    ranks = train(2, stock=stock, come=job(url, path, digest_at=[4]), back=back)
    for report in ranks.reports:
        assert report["come"]["digests"]["loaded"] == report["stock"]["digests"]["2"]
        assert report["come"]["loader"]["loaded"] == report["stock"]["loader"]["2"]
        assert report["back"]["digests"]["loaded"] == report["come"]["digests"]["4"]


@LONG
def test_a_rank_that_does_not_save_is_an_error_on_all(train: Callable[..., Ranks], bucket_url: str) -> None:
    """At once where the rank raises, after `arrival_seconds` where it does not come."""
    short: dict[str, Any] = {"settings": {"arrival_seconds": 3.0}, "expects_error": True}
    ranks = train(
        2, late=job(f"{bucket_url}/a", late_at=2, **short), failing=job(f"{bucket_url}/b", fail_at=2, **short)
    )
    for report in ranks.reports:
        assert "the save of step 2" in report["late"]["error"]
        assert "boo" in report["failing"]["error"]
        assert report["late"]["save_seconds"] < 20
        assert report["failing"]["save_seconds"] < 20
    assert re.search(r" has not called the save of step 2 within \d+ s", ranks.reports[0]["late"]["error"])
