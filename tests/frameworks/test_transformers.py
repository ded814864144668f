"""`remote(trainer, url)` with the real Trainer: one process, DDP and FSDP2 on gloo ranks, against an S3 server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_remote import CheckpointManager, open_run
from dcp_remote.testing.servers import S3Server
from tests.support.rank_programs import Ranks
from tests.support.training_jobs import Jobs, jobs_of, killed_job


@pytest.fixture
def train(run_program: Callable[..., Ranks], tmp_path: Path) -> Jobs:
    """Return a function that runs jobs of `programs/hf_train.py` on some ranks."""
    return jobs_of("hf_train.py", run_program, tmp_path)


# `make test-frameworks` leaves out what the others hold nearly as well: importing the frameworks takes a while.
LONG = pytest.mark.torture(smoke=False)

MODES = [("fsdp2", 2), ("zero3", 2), pytest.param("plain", 1, marks=LONG)]
MODES += [pytest.param(mode, 2, marks=LONG) for mode in ("ddp", "fsdp1", "zero1", "zero2")]

# Threads, sockets, plans and the interpreter's own.
OTHER_MEMORY_MIB = 24

# Modes in which Trainer by itself gathers the model for a checkpoint, or lets the engine save.
GATHERED = {"fsdp1", "fsdp2", "zero1", "zero2", "zero3"}


@pytest.mark.parametrize(("mode", "world_size"), MODES)
def test_a_killed_training_goes_on_as_if_it_had_not_been_killed(
    train: Jobs, bucket_url: str, s3_server: S3Server, mode: str, world_size: int
) -> None:
    """Losses, state, random states and callbacks are equal to the bit to those of an uninterrupted training.

    Under FSDP2 and ZeRO every function that gathers fails, and so do a collective of torch in a save, and the engine's
    own saves, of which Trainer makes several.
    """
    url = f"{bucket_url}/run"
    jobs: dict[str, Any] = {"whole": {"digest_at": [2, 4, 6], "arguments": {"save_strategy": "no"}}}
    if mode in GATHERED:  # what Trainer does by itself
        config = {"state_dict_type": "FULL_STATE_DICT"}
        jobs["alone"] = {"arguments": {"max_steps": 2}, "fsdp_config": config, "expects_error": True}
    if mode == "fsdp2":
        job = {"url": f"{bucket_url}/gathering", "is_users": True, "gathers": True}
        jobs["gathering"] = job | {"arguments": {"max_steps": 2}, "expects_error": True}
    killed = train(world_size, mode=mode, **jobs, killed=killed_job(url, kill_at=4), is_checked=False)
    assert killed.exit_codes == [-9] * world_size, killed.show()
    run = open_run(url, storage_options=s3_server.storage_options)
    assert [info.names for info in run.checkpoints()] == [("checkpoint-2",)]
    job = {"url": url, "resume": True, "settings": {"overlap": True}}
    look = {"url": url, "resume": f"{url}/checkpoint-4", "arguments": {"max_steps": 5, "save_strategy": "no"}}
    resumed = train(world_size, mode=mode, resumed={**job, "digest_at": [6]}, finished=job, looked=look)
    for before, after in zip(killed.reports, resumed.reports, strict=True):
        assert mode not in GATHERED or "gathers the model" in before["alone"]["error"]
        assert mode != "fsdp2" or "a save calls collectives of torch" in before["gathering"]["error"]
        whole, later = before["whole"], after["resumed"]
        for part in ("model", "optimizer"):
            assert later["digests"]["2"][part] == whole["digests"]["2"][part], part
        assert later["digests"]["6"] == whole["digests"]["6"]
        assert later["losses"] == whole["losses"]
        assert later["count"] == whole["count"] == 6  # of a callback with a state
        # The step after the save of step 4 comes before the copies.
        assert [count > 20 for count in later["late_copies"]] == [True] * 2 * (mode in {"plain", "ddp", "fsdp2"})
        for part in ("model", "optimizer"):
            assert after["looked"]["digests"]["4"][part] == whole["digests"]["4"][part], part
        assert later["local"] == []
        # A finished job that is started again trains nothing, as Trainer alone would.
        finished = after["finished"]
        assert finished["digests"].keys() == {"6"}
        assert (finished["step"], finished["losses"]) == (6, whole["losses"])
        assert later["warnings"] == finished["warnings"] == []
    assert [info.names for info in run.checkpoints()] == [("checkpoint-2",), ("checkpoint-4",), ("checkpoint-6",)]
    names = set(run.load(keys="files")["files"].names)
    assert {"config.json", "generation_config.json", "trainer_state.json", "training_args.json"} <= names


def test_old_checkpoints_go_and_the_best_stays(train: Jobs, bucket_url: str, s3_server: S3Server) -> None:
    """`save_total_limit` and `load_best_model_at_end`; training goes on after the best model was loaded.

    The largest loss counts as the best, so that an early checkpoint is.
    """
    url = f"{bucket_url}/run"
    given = {"learning_rate": 0.3, "lr_scheduler_type": "constant"}
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 2}
    best |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    jobs: dict[str, Any] = {
        "whole": {
            "arguments": {**given, "max_steps": 10, "eval_strategy": "steps", "eval_steps": 2},
            "digest_at": [2, 4, 6, 8],
        },
        "rotated": {
            "url": url,
            "arguments": {**given, **best},
            "trainings": [{"resume": None, "max_steps": 8}, {"resume": True, "max_steps": 10}],
        },
    }
    (reports,) = train(**jobs).reports
    whole, rotated = reports["whole"], reports["rotated"]
    step = int(max(whole["eval_losses"], key=whole["eval_losses"].__getitem__))
    assert step < 8, "a checkpoint that rotation would delete"
    assert rotated["best_after"] == [f"{url}/checkpoint-{step}"] * 2
    assert rotated["models_after"] == [whole["digests"][str(step)]["model"]] * 2
    assert rotated["losses"] == whole["losses"]
    run = open_run(url, storage_options=s3_server.storage_options)
    assert [info.step for info in run.checkpoints()] == [step, 10]
    metrics = run.checkpoints()[-1].metrics
    assert metrics["best_global_step"] == step
    assert metrics["eval_loss"] == whole["eval_losses"]["10"]


def test_a_best_checkpoint_whose_save_failed(train: Jobs, bucket_url: str, s3_server: S3Server) -> None:
    """Training goes on (`on_error="warn"`), and keeps its last model where the best one is not in the run.

    Under `when_busy="skip"` a slow save leaves others out, but neither the best one nor the last.
    """
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    best |= {"metric_for_best_model": "eval_loss", "learning_rate": 0.0}  # the best is the first of equal losses
    rules = {"when_busy": "skip", "on_error": "warn"}
    slow = {"when_busy": "skip", "storage_options": {"upload_bytes_per_second": 100_000}}
    jobs: dict[str, Any] = {
        "failed": {"url": f"{bucket_url}/failed", "settings": rules, "arguments": best, "refused_at": 2},
        "resumed": {
            "url": f"{bucket_url}/failed",
            "resume": True,
            "settings": rules,
            "arguments": {**best, "max_steps": 8},
        },
        "slow": {"url": f"{bucket_url}/slow", "settings": slow, "arguments": {"save_steps": 1}},
    }
    (reports,) = train(**jobs).reports
    for name in ("failed", "resumed"):
        assert reports[name]["best_after"] == [f"{bucket_url}/failed/checkpoint-2"]
        assert any("there is no checkpoint-2" in text for text in reports[name]["warnings"])
    runs = [open_run(f"{bucket_url}/{name}", storage_options=s3_server.storage_options) for name in ("failed", "slow")]
    saved, (first, *_, last) = ([info.step for info in run.checkpoints()] for run in runs)
    assert saved == [4, 6, 8]
    assert (first, last) == (1, 6)
    assert any("of step 2 was left out" in text for text in reports["slow"]["warnings"])


def test_forms_of_a_resume_and_refusals(train: Jobs, bucket_url: str, s3_server: S3Server) -> None:
    """One process: by the URL of a checkpoint, from another run, by a name; a model alone; and wrong calls."""
    url, other, weights, foreign = (f"{bucket_url}/{name}" for name in ("run", "other", "weights", "foreign"))
    with CheckpointManager(foreign, storage_options=s3_server.storage_options) as manager:
        manager.save(3, {"model": {"weight": torch.zeros(2)}})
    given = {"lr_scheduler_type": "constant", "max_steps": 4}
    jobs: dict[str, Any] = {
        "first": {"url": url, "is_users": True, "arguments": given, "digest_at": [2, 3]},
        "into_another_run": {"url": other, "resume": f"{url}/checkpoint-2", "arguments": given},
        "back": {"url": url, "resume": f"{url}/2", "arguments": {**given, "max_steps": 3, "save_steps": 3}},
        "by_name": {
            "url": f"{url}/",
            "resume": "checkpoint-3",
            "arguments": {**given, "per_device_train_batch_size": 4},
        },
        "finished": {"url": other, "resume": True, "arguments": {**given, "save_strategy": "epoch"}},
        "weights": {"url": weights, "arguments": {**given, "max_steps": 2, "save_only_model": True}},
        "from_weights": {"url": weights, "resume": f"{weights}/", "arguments": given},
        "weights_again": {
            "url": f"{bucket_url}/weights-again",
            "resume": f"{url}/checkpoint-3",
            "settings": {"save_only_model": True},
            "arguments": given,
        },
        "other": {"url": url, "resume": True, "has_another_parameter": True, "expects_error": True, "arguments": given},
        "local": {"arguments": {**given, "max_steps": 2, "output_dir": "local"}},
        "from_local": {
            "url": f"{bucket_url}/from-local",
            "resume": "last",
            "arguments": {**given, "output_dir": "local"},
        },
        "fresh": {"url": url, "expects_error": True, "arguments": given},
        "absent": {"url": url, "resume": f"{url}/checkpoint-99", "expects_error": True, "arguments": given},
        # A text, as a command line gives it.
        "foreign": {"url": foreign, "resume": "True", "expects_error": True, "arguments": given},
        "output": {"expects_error": True, "arguments": {**given, "output_dir": f"{url}/output"}},
        "limits": {
            "url": url,
            "expects_error": True,
            "settings": {"retention": "mine"},
            "arguments": {**given, "save_total_limit": 1},
        },
        "evaluated": {"weights_from": f"{url}/checkpoint-3", "arguments": {**given, "max_steps": 1}},
        "noticed": {
            "url": f"{bucket_url}/noticed",
            "notice_at": 3,
            "settings": {"notice_seconds": 60},
            "arguments": {**given, "max_steps": 50, "save_steps": 100},
        },
        "overlapped": {
            "url": f"{bucket_url}/overlapped",
            "is_quiet": True,
            "arguments": given,
            "then": {"url": f"{bucket_url}/overlapped", "resume": True, "arguments": {**given, "max_steps": 8}},
        },
        "normed": {"url": f"{bucket_url}/normed", "is_quiet": True, "max_norm": 0.1, "arguments": given},
        "constrained": {"url": f"{bucket_url}/constrained", "is_quiet": True, "oft": True, "arguments": given},
        "enabled": {"url": f"{bucket_url}/enabled", "is_enabled": True, "is_users": True, "arguments": given},
    }
    (reports,) = train(**jobs).reports
    first = reports["first"]
    run = open_run(url, storage_options=s3_server.storage_options)
    assert "tokens_state.json" in run.load(2, keys="files")["files"].names

    for part in ("model", "optimizer"):  # random states are set later, once Trainer has skipped the batches
        assert reports["into_another_run"]["digests"]["2"][part] == first["digests"]["2"][part]
    assert reports["into_another_run"]["losses"] == first["losses"]
    assert [info.step for info in open_run(other, storage_options=s3_server.storage_options).checkpoints()] == [4]

    # Step 4 was abandoned by going back to 2, and was saved again.
    assert reports["back"]["losses"] == {step: first["losses"][step] for step in ("1", "2", "3")}
    assert [(info.step, info.abandoned) for info in run.checkpoints()] == [(2, False), (3, False), (4, False)]
    assert any("trained with 2 samples a step, and this job has 4" in text for text in reports["by_name"]["warnings"])

    entries = open_run(weights, storage_options=s3_server.storage_options).load(2)
    assert sorted(entries) == ["files", "model", "trainer"]
    assert reports["from_weights"]["step"] == 4
    assert any("saved without optim, random, scheduler" in text for text in reports["from_weights"]["warnings"])

    assert "another" in reports["other"]["error"]
    assert reports["other"]["error"].startswith("StateMismatchError: The checkpoint does not fit the state")
    assert "\nOptions: load_weights(model, url, exclude=…) takes the weights that fit" in reports["other"]["error"]
    assert reports["from_local"]["losses"] == first["losses"]
    for part in ("model", "optimizer"):
        assert reports["weights_again"]["digests"]["3"][part] == first["digests"]["3"][part]
    assert reports["finished"]["step"] == 4  # although the end of an epoch saves
    assert reports["finished"]["warnings"] == []
    for name in ("first", "into_another_run", "weights_again", "from_local"):
        assert ["no checkpoint here yet" in text for text in reports[name]["warnings"]] == [True], name

    assert reports["evaluated"]["digests"]["0"]["model"] == first["digests"]["3"]["model"]

    # Of users' code that may change weights between a save and the next step, the state is copied before.
    assert [count > 20 for count in reports["overlapped"]["late_copies"]] == [True, True]
    assert first["late_copies"] == []
    # So it is where the forward pass changes weights; where an optimizer of an earlier trainer is watched, the save
    # waits for the copies.
    assert reports["normed"]["late_copies"] == reports["constrained"]["late_copies"] == []
    assert reports["overlapped"]["then"]["step"] == 8
    assert [count > 10 for count in reports["overlapped"]["then"]["late_copies"]] == [True, True]

    # SIGTERM saves and stops.
    step = reports["noticed"]["step"]
    assert 3 <= step < 50
    noticed = open_run(f"{bucket_url}/noticed", storage_options=s3_server.storage_options)
    assert [info.step for info in noticed.checkpoints()] == [step]

    messages = {
        "fresh": "InvalidArgumentError: This run has checkpoints already. Pass resume_from_checkpoint=True",
        "absent": "CheckpointNotFoundError",
        "foreign": "InvalidArgumentError: This checkpoint was not saved by a Trainer",
        "output": "InvalidArgumentError: output_dir must be a local folder",
        "limits": "InvalidArgumentError: save_total_limit and retention exclude each other",
    }
    for name, message in messages.items():
        assert message in reports[name]["error"], name
    enabled = open_run(f"{bucket_url}/enabled", storage_options=s3_server.storage_options)
    assert [info.step for info in enabled.checkpoints()] == [2, 4]
    assert "tokens_state.json" in enabled.load(keys="files")["files"].names


@pytest.mark.parametrize(
    ("mode", "world_size"), [("plain", 1), pytest.param("fsdp2", 3, marks=LONG), pytest.param("ddp", 2, marks=LONG)]
)
def test_other_numbers_of_ranks_and_other_wrappers_load_the_same_state(
    train: Jobs, bucket_url: str, mode: str, world_size: int
) -> None:
    """From FSDP2 on two ranks, with tied weights. State is equal to the bit."""
    url = f"{bucket_url}/run"
    job: dict[str, Any] = {"url": url, "tied": True, "stop_at": 2, "digest_at": [2]}
    saved = train(2, mode="fsdp2", saved=job).reports[0]["saved"]
    look: dict[str, Any] = {
        "url": url,
        "tied": True,
        "resume": True,
        "arguments": {"max_steps": 3, "save_strategy": "no"},
    }
    loaded = train(world_size, mode=mode, loaded=look).reports[0]["loaded"]
    for part in ("model", "optimizer"):
        assert loaded["digests"]["2"][part] == saved["digests"]["2"][part], part
    changed = [text for text in loaded["warnings"] if "samples a step" in text]
    assert bool(changed) == (world_size != 2)
    others = [text for text in loaded["warnings"] if text not in changed]
    assert bool(others) == (world_size != 2)
    assert all("is restored by" in text and "(random)" in text for text in others), others


def test_adapters(train: Jobs, bucket_url: str, s3_server: S3Server) -> None:
    """LoRA: adapters are saved and go on to the bit; with `save_frozen_base` the base is in the checkpoint, too."""
    url, whole_url = f"{bucket_url}/adapters", f"{bucket_url}/with-base"
    jobs: dict[str, Any] = {
        "whole": {"lora": True, "digest_at": [2, 6]},
        "begun": {"url": url, "lora": True, "stop_at": 2},
        "resumed": {"url": url, "lora": True, "resume": True, "digest_at": [6]},
        "with_base": {"url": whole_url, "lora": True, "stop_at": 2, "settings": {"save_frozen_base": True}},
        "from_base": {"url": whole_url, "lora": True, "resume": True, "digest_at": [6]},
    }
    (reports,) = train(**jobs).reports
    whole = reports["whole"]
    for name in ("resumed", "from_base"):
        assert reports[name]["digests"]["2"]["model"] == whole["digests"]["2"]["model"], name
        assert reports[name]["digests"]["6"] == whole["digests"]["6"], name
        assert reports[name]["losses"] == whole["losses"], name
    saved = open_run(url, storage_options=s3_server.storage_options).load(2)
    assert saved["model"]
    assert all("lora_" in name for name in saved["model"])
    assert {"adapter_config.json", "config.json"} <= set(saved["files"].names)
    with_base = open_run(whole_url, storage_options=s3_server.storage_options).load(2, keys="model.*")["model"]
    assert "base_model.model.lm_head.weight" in with_base


@LONG
def test_adapters_of_one_process_under_fsdp2(train: Jobs, bucket_url: str) -> None:
    """They are equal to the bit."""
    url = f"{bucket_url}/adapters"
    saved = train(begun={"url": url, "lora": True, "stop_at": 2, "digest_at": [2]}).reports[0]["begun"]
    job = {"url": f"{url}-2", "lora": True, "resume": f"{url}/checkpoint-2"}
    loaded = train(2, mode="fsdp2", loaded=job).reports[0]["loaded"]
    assert loaded["digests"]["2"]["model"] == saved["digests"]["2"]["model"]


def test_ranks_rotation_and_a_late_rank(train: Jobs, bucket_url: str, s3_server: S3Server) -> None:
    """A save at every step, one checkpoint kept, a rank late: each save commits, where folders were renamed in a race.

    Trainer alone says that a checkpoint is saved while a rank is still writing to it. Then a rank that fails in a save:
    all raise at once, and nothing is committed.
    """
    given = {"save_steps": 1, "save_total_limit": 1, "max_steps": 5}
    jobs: dict[str, Any] = {
        f"late_{rank}": {"url": f"{bucket_url}/late-{rank}", "slow_rank": rank, "arguments": given} for rank in (0, 2)
    }
    alone = {"is_users": True, "late_rank": 2, "arguments": {"max_steps": 1, "save_steps": 1, "output_dir": "alone"}}
    failing = {"url": f"{bucket_url}/failing", "is_users": True, "fails_at": [1, 3], "expects_error": True}
    ranks = train(3, mode="ddp", alone=alone, **jobs, failing={**failing, "arguments": given})
    assert "optimizer.pt" in ranks.reports[0]["alone"]["seen"]
    assert "rng_state_2.pth" not in ranks.reports[0]["alone"]["seen"]
    for name in jobs:
        assert [report[name]["step"] for report in ranks.reports] == [5, 5, 5]
        url = f"{bucket_url}/{name.replace('_', '-')}"
        run = open_run(url, storage_options=s3_server.storage_options)
        assert [info.names for info in run.checkpoints()] == [("checkpoint-5",)]
        assert sorted(run.load(5, keys="per_rank.*")["per_rank"]) == ["0", "1", "2"]
    failed = [report["failing"] for report in ranks.reports]
    assert failed[1]["error"] == "ValueError: boo"
    for other in (failed[0], failed[2]):
        assert " failed; the save of step 3 was given up" in other["error"], other
    assert max(one["seconds"] for one in failed) < 20  # with the three steps before
    failing_run = open_run(str(failing["url"]), storage_options=s3_server.storage_options)
    assert [info.step for info in failing_run.checkpoints()] == [2]


@LONG
def test_a_rank_that_does_not_come_to_a_save(train: Jobs, bucket_url: str, s3_server: S3Server) -> None:
    """With default settings: all ranks that came raise within 40 s of the call, and the late rank when it comes."""
    url = f"{bucket_url}/run"
    job: dict[str, Any] = {"url": url, "absent": [1, 2, 60], "expects_error": True}
    job["arguments"] = {"logging_steps": 100}  # to log, Trainer waits for all ranks in a collective of torch
    came, late = (report["job"] for report in train(2, mode="ddp", job=job).reports)
    assert came["error"].startswith("SaveTimeoutError")
    assert " has not called the save of step 2" in came["error"]
    assert 25 < came["seconds"] < 40
    assert late["error"].startswith("SaveTimeoutError"), late["error"]
    assert late["seconds"] < 10
    assert open_run(url, storage_options=s3_server.storage_options).latest() is None


@LONG
def test_incident_1_a_checkpoint_that_was_cut_off(train: Jobs, bucket_url: str) -> None:
    """Trainer alone takes a folder for complete whose writing was killed, and fails; here the one before is taken."""
    url, alone = f"{bucket_url}/run", {"output_dir": "alone"}
    users = {"is_users": True, "arguments": alone}
    assert train(killed={**users, "kill_within": 4}, is_checked=False).exit_codes == [-9]
    assert train(killed=killed_job(url, kill_at=4), is_checked=False).exit_codes == [-9]
    (reports,) = train(
        alone={**users, "resume": "last", "expects_error": True},
        resumed={"url": url, "resume": True},
    ).reports
    assert "FileNotFoundError" in reports["alone"]["error"]
    assert "checkpoint-4" in reports["alone"]["error"]
    assert sorted(reports["resumed"]["losses"]) == [str(step) for step in range(1, 7)]


@LONG
def test_memory_of_a_save_is_a_copy_of_the_shard_and_the_budget(
    run_program: Callable[..., Ranks], bucket_url: str
) -> None:
    """Peaks of resident memory above that before a save of Trainer with FSDP2; the copy is kept for the next one."""
    for report in run_program("hf_memory.py", 2, f"{bucket_url}/run").reports:
        memory = report["memory"]  # in MiB
        assert memory["shard"] >= 5 * memory["budget"]
        first, *later = memory["saves"]
        assert first <= memory["shard"] + memory["budget"] + OTHER_MEMORY_MIB, memory
        assert max(later) <= memory["budget"] + OTHER_MEMORY_MIB, memory


@LONG
def test_trainers_of_trl(run_program: Callable[..., Ranks], bucket_url: str, s3_server: S3Server) -> None:
    """SFT and DPO, whose `_save_checkpoint` calls that of Trainer: they go on to the bit; files are in the run."""
    (report,) = run_program("hf_trl.py", 1, bucket_url).reports
    for kind in ("sft", "dpo", "adapter"):
        assert report[kind]["resumed"] == report[kind]["whole"]
        run = open_run(f"{bucket_url}/{kind}", storage_options=s3_server.storage_options)
        assert [info.names for info in run.checkpoints()] == [(f"checkpoint-{step}",) for step in (2, 4, 6)]
        assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= set(run.load(keys="files")["files"].names)


@LONG
@pytest.mark.timeout(600)  # three programs, each of which imports the frameworks
def test_deepspeed_and_other_wrappers_load_each_other(train: Jobs, bucket_url: str, s3_server: S3Server) -> None:
    """DDP into ZeRO-3 goes on as DDP does, but for the order of sums; ZeRO-3 into one process gives equal weights."""
    ddp, zero = f"{bucket_url}/ddp", f"{bucket_url}/zero"
    given = {"per_device_train_batch_size": 2}
    before = train(2, mode="ddp", whole={"arguments": given}, saved={"url": ddp, "stop_at": 2, "arguments": given})
    middle = train(2, mode="zero3", resumed={"url": zero, "resume": ddp, "stop_at": 4, "arguments": given})
    whole, resumed = before.reports[0]["whole"]["losses"], middle.reports[0]["resumed"]["losses"]
    assert resumed == pytest.approx({step: whole[step] for step in resumed}, abs=1e-4)
    assert sorted(resumed) == ["1", "2", "3", "4"]
    look = {"url": f"{bucket_url}/other", "resume": zero, "arguments": {"max_steps": 5, "save_strategy": "no"}}
    after = train(1, loaded={**look, "shows_weight": "lm_head.weight"}).reports[0]["loaded"]
    saved = open_run(zero, storage_options=s3_server.storage_options).load(keys="model.*")["model"]
    assert after["shown"] == saved["lm_head.weight"].double().sum().item()
    assert after["warnings"] != []  # another global batch


def test_the_example(run_program: Callable[..., Ranks], bucket_url: str, s3_server: S3Server) -> None:
    """Two ranks, then one, which goes on where they stopped."""
    url, example = f"{bucket_url}/run", Path(__file__).parents[2] / "examples" / "hf_trainer.py"
    run_program(example, 2, "--url", url, "--steps", 10)
    resumed = run_program(example, 1, "--url", url, "--steps", 20)
    assert "loaded step 10" in resumed.outputs[0]
    checkpoints = open_run(url, storage_options=s3_server.storage_options).checkpoints()
    assert [info.step for info in checkpoints] == [10, 20]


@LONG
@pytest.mark.timeout(600)
def test_adapters_and_the_best_model_under_zero_3(train: Jobs, bucket_url: str, s3_server: S3Server) -> None:
    """Adapters alone are saved and go on to the bit; the best model is read into the engine. Nothing is gathered."""
    url, best_url = f"{bucket_url}/adapters", f"{bucket_url}/best"
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 2}
    best |= {"metric_for_best_model": "eval_loss", "greater_is_better": True, "lr_scheduler_type": "constant"}
    jobs: dict[str, Any] = {
        "whole": {"lora": True, "digest_at": [2, 6], "arguments": {"save_strategy": "no"}},
        "begun": {"url": url, "lora": True, "stop_at": 2},
        "resumed": {"url": url, "lora": True, "resume": True, "digest_at": [6]},
        "best": {"url": best_url, "digest_at": [2, 4, 6], "arguments": {**best, "learning_rate": 0.3}},
    }
    reports = train(2, mode="zero3", **jobs).reports
    for report in reports:
        whole, resumed = report["whole"], report["resumed"]
        assert resumed["losses"] == whole["losses"]
        assert resumed["digests"]["6"] == whole["digests"]["6"]
        step = report["best"]["best_after"][0].rpartition("-")[2]
        assert report["best"]["models_after"] == [report["best"]["digests"][step]["model"]]
    saved = open_run(url, storage_options=s3_server.storage_options).load(2, keys="model.*")["model"]
    assert saved
    assert all("lora_" in name for name in saved)
