"""Axolotl with the plugin, by its own command, on the CPU: one process and gloo ranks, against an S3 server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dcp_remote import open_run
from dcp_remote.testing.servers import S3Server
from tests.support.rank_programs import Ranks

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
PLUGIN = "dcp_remote.integrations.axolotl.RemoteCheckpointPlugin"
WATCH = "axolotl_watch.WatchPlugin"

# `make test-frameworks` leaves out what the others hold nearly as well: importing the frameworks takes a while.
LONG = pytest.mark.torture(smoke=False)

ZERO3_STAGE = {"stage": 3, "stage3_param_persistence_threshold": 16}
ZERO3_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
}

TRAIN_SECONDS_MAX = 300


@dataclass(frozen=True, slots=True)
class Training:
    """Training of Axolotl that has ended.

    Attributes:
        exit_code: Exit code of Axolotl's command.
        output: Standard output and error of all ranks.
        reports: Values that each rank reported; empty if it reported nothing.
        folder: Working directory, in which `out` is the `output_dir`.
    """

    exit_code: int
    output: str
    reports: list[dict[str, Any]]
    folder: Path


@pytest.fixture(scope="session")
def base(run_program_in: Callable[..., Ranks], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, its tokenizer, and data."""
    folder = tmp_path_factory.mktemp("axolotl")
    run_program_in(folder, "axolotl_base.py", 1)
    return folder


@pytest.fixture
def write_yaml(base: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a YAML into a folder: `write_yaml("folder", "name", max_steps=4)`.

    A key that is None is left out.
    """

    def write(folder: str, name: str, **keys: Any) -> Path:
        settings = {
            "base_model": str(base / "base"),
            "datasets": [{"path": str(base / "data.jsonl"), "ds_type": "json", "type": "completion"}],
            "dataset_prepared_path": str(base / "prepared"),
            "output_dir": "./out",
            "auto_resume_from_checkpoints": True,
            "sequence_len": 16,
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 1,
            "max_steps": 6,
            "save_steps": 2,
            "logging_steps": 1,
            "optimizer": "adamw_torch",
            "learning_rate": 0.01,
            "lr_scheduler": "cosine",
            "bf16": False,
            "fp16": False,
            "tf32": False,
            "seed": 7,
            "dataset_num_proc": 1,
            **keys,
        }
        path = tmp_path / folder / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        for file, gathers in (("zero3.json", True), ("zero3_apart.json", False)):
            stage = ZERO3_STAGE | {"stage3_gather_16bit_weights_on_model_save": gathers}
            (path.parent / file).write_text(json.dumps(ZERO3_CONFIG | {"zero_optimization": stage}))
        # JSON is YAML.
        path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}, indent=1))
        return path

    return write


def quiet_environment(base: Path) -> dict[str, str]:
    """Return the variables by which Axolotl calls nobody."""
    return {"HF_HUB_OFFLINE": "1", "HF_HOME": str(base / "hf"), "AXOLOTL_DO_NOT_TRACK": "1"}


@pytest.fixture
def train(base: Path, write_yaml: Callable[..., Path], program_environment: dict[str, str]) -> Callable[..., Training]:
    """Return a function that writes a YAML and runs `axolotl train` in a folder: `train("folder", 2, max_steps=4)`.

    With `watch` the ranks report, and do what its options say.
    """

    def run(
        name: str,
        world_size: int = 1,
        *,
        watch: Mapping[str, Any] | None = None,
        plugins: Sequence[str] = (PLUGIN,),
        is_checked: bool = True,
        **keys: Any,
    ) -> Training:
        named = [*([WATCH] if watch is not None else []), *plugins]
        path = write_yaml(name, "train", plugins=named or None, **keys)
        reports = path.parent / f"reports-{len(list(path.parent.glob('reports-*')))}"
        reports.mkdir()
        launcher = (
            ["python"] if world_size == 1 else ["torchrun", "--", "--standalone", f"--nproc-per-node={world_size}"]
        )
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
        environment = inherited | program_environment | quiet_environment(base)
        environment |= {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(PROGRAMS)]),
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "AXOLOTL_WATCH": json.dumps(watch or {}),
            "DCP_REMOTE_TEST_REPORTS": str(reports),
        }
        with (reports / "output.txt").open("wb") as file:
            process = subprocess.Popen(
                ["axolotl", "train", path.name, "--launcher", *launcher],
                cwd=path.parent,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(TRAIN_SECONDS_MAX)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGABRT)  # each process writes the stacks of its threads
                    time.sleep(2)
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        output = (reports / "output.txt").read_text(errors="replace")
        assert not list(path.parent.rglob("*:")), "Axolotl took a URL for a path of a folder."
        assert not is_checked or process.returncode == 0, output[-6000:]
        paths = [reports / f"{rank}.json" for rank in range(world_size)]
        found = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
        return Training(process.returncode, output, found, path.parent)

    return run


@pytest.fixture
def run_jobs(
    run_program: Callable[..., Ranks], write_yaml: Callable[..., Path], base: Path
) -> Callable[..., dict[str, dict[str, Any]]]:
    """Return a function that runs jobs, each a dict of keys of its YAML, in one process; returns what they report.

    The key `folder` of a job is the name of its folder, by default that of the job.
    """

    def run(**jobs: dict[str, Any]) -> dict[str, dict[str, Any]]:
        paths = {}
        for name, keys in jobs.items():
            folder = keys.pop("folder", name)
            paths[name] = str(write_yaml(folder, name, **{"plugins": [WATCH, PLUGIN], **keys}))
        listed = Path(next(iter(paths.values()))).parent / "jobs.json"
        listed.write_text(json.dumps(paths))
        environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(PROGRAMS)]), **quiet_environment(base)}
        (report,) = run_program("axolotl_jobs.py", 1, listed, environment=environment, timeout_seconds=600).reports
        return {name: report.get(name, {}) | report["ended"][name] for name in jobs}

    return run


def steps_of(url: str, server: S3Server) -> list[int]:
    """Return the steps of a run's checkpoints that are not abandoned."""
    checkpoints = open_run(url, storage_options=server.storage_options).checkpoints()
    return [info.step for info in checkpoints if not info.abandoned]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the safetensors files in a folder."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


SLOW = {"upload_bytes_per_second": 100_000}
LORA = {
    "adapter": "lora",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.1,
    "lora_target_modules": ["q_proj", "v_proj"],
}
FSDP2 = {
    "fsdp_version": 2,
    "fsdp_config": {
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "state_dict_type": "SHARDED_STATE_DICT",
        "reshard_after_forward": True,
    },
}
ZERO3 = {"deepspeed": "zero3.json"}
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "full": (1, {}),
    "lora": (1, LORA),
    "ddp": (2, {}),
    "ddp-lora": (2, LORA),
    "fsdp2": (2, FSDP2),
    "fsdp2-lora": (2, FSDP2 | LORA),
    "zero3": (2, ZERO3),
    "zero3-lora": (2, ZERO3 | LORA),
}


# Those that `make test-frameworks` runs; the incident below is ZeRO-3.
SHORT = {"lora", "fsdp2"}


@pytest.mark.timeout(900)  # three trainings, each of which imports the frameworks
@pytest.mark.parametrize("mode", [pytest.param(mode, marks=() if mode in SHORT else LONG) for mode in MODES])
def test_a_killed_training_goes_on_as_if_it_had_not_been_killed(
    train: Callable[..., Training], bucket_url: str, s3_server: S3Server, mode: str
) -> None:
    """The command is given again. Losses, state, random states, counts and the final model are equal to the bit.

    An old local checkpoint, which Axolotl would resume from, and would make the final model of, changes nothing.
    """
    world_size, keys = MODES[mode]
    url = f"{bucket_url}/run"
    alone: dict[str, Any] = {"plugins": [], "save_strategy": "no", "save_steps": None}
    whole = train("whole", world_size, watch={"digest_at": [2, 6]}, **(alone | keys))
    mine = {"remote_checkpoint_url": url, "remote_checkpoint_storage_options": SLOW, **keys}
    watch = {"digest_at": [6], "forbids_gathers": world_size > 1}
    killed = train("killed", world_size, watch={**watch, "kill_at": 4}, is_checked=False, **mine)
    assert killed.exit_code != 0
    assert steps_of(url, s3_server) == [2], killed.output[-6000:]
    output = killed.folder / "out"
    (output / "checkpoint-99" / "pytorch_model_fsdp_0").mkdir(parents=True)
    resumed = train("killed", world_size, watch=watch, **mine)
    for first, later in zip(whole.reports, resumed.reports, strict=True):
        assert later["began_at"] == 2
        for part in ("model", "optimizer"):
            assert later["digests"]["2"][part] == first["digests"]["2"][part], part
        assert later["digests"]["6"] == first["digests"]["6"]
        assert later["losses"] == first["losses"]
        assert later["tokens"] == first["tokens"]
    assert steps_of(url, s3_server) == [2, 4, 6]
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-99"]
    final, expected = weights_of(output), weights_of(whole.folder / "out")
    assert final
    # Of sharded models Axolotl alone makes none here: it takes a local checkpoint, and none was saved.
    assert final.keys() == expected.keys() or (mode == "fsdp2" and not expected)
    assert all(torch.equal(final[name], expected[name]) for name in expected)
    saved = open_run(url, storage_options=s3_server.storage_options).load(6, keys="model.*")["model"]
    names = {name: name.replace(".default.", ".") for name in saved}
    assert {names[name] for name in saved} == final.keys()
    assert all(torch.equal(final[names[name]], saved[name]) for name in saved)


@pytest.mark.timeout(600)
def test_incident_0(train: Callable[..., Training], bucket_url: str, s3_server: S3Server) -> None:
    """ZeRO-3 with an offload folder: Trainer saves each checkpoint twice, and DeepSpeed's second copy finds the first.

    With the plugin there is one commit, no folder, and no rank that another could be in the way of.
    """
    keys: dict[str, Any] = {"deepspeed": "zero3_apart.json", "max_steps": 4}
    alone = train("alone", 2, watch={"has_offload_folder": True}, plugins=[], is_checked=False, **keys)
    assert alone.exit_code != 0
    assert "FileExistsError" in alone.output
    url = f"{bucket_url}/run"
    ours = train("ours", 2, watch={"has_offload_folder": True}, remote_checkpoint_url=url, **keys)
    assert [report["step"] for report in ours.reports] == [4, 4]
    checkpoints = open_run(url, storage_options=s3_server.storage_options).checkpoints()
    assert [info.names for info in checkpoints] == [("checkpoint-2",), ("checkpoint-4",)]
    assert not list((ours.folder / "out").glob("checkpoint-*"))


@pytest.mark.timeout(600)
def test_mistakes_in_the_yaml(run_jobs: Callable[..., Any], bucket_url: str, s3_server: S3Server) -> None:
    """Each is refused before anything is loaded or written; what Axolotl drops silently is named."""
    url = f"{bucket_url}/run"
    mistakes: dict[str, tuple[dict[str, Any], str]] = {
        "no_url": ({"remote_checkpoint_url": None}, "names the plugin, but no run"),
        "near": (
            {"remote_checkpoint_url": None, "remote_checkpoint_uri": url},
            "neither Axolotl nor this plugin knows",
        ),
        "options": ({"remote_checkpoint_storage_option": {}}, "known='remote_checkpoint_storage_options'"),
        "other": ({"remote_checkpoint_every": 5}, "key='remote_checkpoint_every'"),
        "path": ({"remote_checkpoint_url": "bucket/run"}, "must be a URL"),
        "slash": ({"remote_checkpoint_url": "s3:/bucket/run"}, "must be a URL"),
        "scheme": ({"remote_checkpoint_url": "s4://bucket/run"}, "scheme"),
        "secret": (
            {"remote_checkpoint_storage_options": {"aws_secret_access_key": "hush"}},
            "must not stand in the YAML",
        ),
        "output": ({"output_dir": f"{url}/out"}, "output_dir must be a local folder"),
        "relora": ({"relora": True, **LORA}, "ReLoRA"),
    }
    jobs = {name: {"remote_checkpoint_url": url, **keys} for name, (keys, _) in mistakes.items()}
    found = run_jobs(**jobs)
    for name, (_, message) in mistakes.items():
        assert str(found[name]["error"]).startswith("InvalidArgumentError"), (name, found[name])
        assert message in found[name]["error"], name
        assert "hush" not in found[name]["error"]
    assert steps_of(url, s3_server) == []


@pytest.mark.timeout(900)  # ten trainings, in one process
def test_where_a_training_starts(run_jobs: Callable[..., Any], bucket_url: str, s3_server: S3Server) -> None:
    """From the run, another run, one of its checkpoints, or a local folder; the same YAML again goes on by itself."""
    url, other, moved = f"{bucket_url}/run", f"{bucket_url}/other", f"{bucket_url}/moved"
    mine = {"remote_checkpoint_url": url, "learning_rate": 1e-3, "lr_scheduler": "constant"}
    explicit = {**mine, "remote_checkpoint_url": other, "resume_from_checkpoint": f"{url}/checkpoint-2"}
    local = {**mine, "folder": "local", "remote_checkpoint_url": moved}
    found = run_jobs(
        first={**mine, "max_steps": 4, "auto_resume_from_checkpoints": None},
        again={**mine, "max_steps": 6, "auto_resume_from_checkpoints": None},
        auto={**mine, "max_steps": 6},
        explicit={**explicit, "max_steps": 4},
        explicit_again={**explicit, "max_steps": 6},
        back={**mine, "resume_from_checkpoint": f"{url}/checkpoint-2", "max_steps": 3, "save_steps": 3},
        # The plugin is missing: Axolotl drops the URL, and says nothing.
        local={**local, "plugins": [WATCH], "max_steps": 4},
        moved={**local, "max_steps": 6},
        moved_again={**local, "max_steps": 8},
        unsaved={**mine, "save_strategy": "no", "save_steps": None, "max_steps": 5},
    )
    assert "This run has checkpoints already" in found["again"]["error"]
    assert "auto_resume_from_checkpoints: true" in found["again"]["error"]
    began = {name: report["began_at"] for name, report in found.items() if report["error"] is None}
    assert began == {"first": 0, "auto": 4, "explicit": 2, "explicit_again": 4, "back": 2, "unsaved": 3} | {
        "local": 0,
        "moved": 4,
        "moved_again": 6,
    }
    assert steps_of(url, s3_server) == [2, 3]
    assert steps_of(other, s3_server) == [4, 6]
    assert steps_of(moved, s3_server) == [6, 8]
    assert any("no checkpoint is saved" in text for text in found["unsaved"]["warnings"])


def test_the_example(base: Path) -> None:
    """Axolotl's own schema knows each key of the example, and reads what it says."""
    script = (
        "import json, sys, yaml; from axolotl.cli.config import prepare_plugins, validate_config, gpu_capabilities;"
    )
    script += "from axolotl.integrations.config import merge_input_args; from axolotl.utils.dict import DictDefault;"
    script += "raw = yaml.safe_load(open(sys.argv[1])); given = DictDefault(raw); prepare_plugins(given);"
    script += "capabilities, environment = gpu_capabilities(); cfg = validate_config(given, capabilities, environment);"
    script += "known = merge_input_args()[1].model_fields;"
    script += "print(json.dumps([sorted(raw.keys() - known.keys()), cfg.to_dict()], default=str))"
    environment = os.environ | quiet_environment(base) | {"PYTHONPATH": str(ROOT)}
    example = ROOT / "examples" / "axolotl.yaml"
    command = [sys.executable, "-c", script, str(example)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    unknown, cfg = json.loads(done.stdout.splitlines()[-1])
    assert unknown == []
    assert cfg["remote_checkpoint_url"] == "s3://bucket/my-run"
    assert (cfg["adapter"], cfg["save_steps"], cfg["auto_resume_from_checkpoints"]) == ("lora", 20, True)
