"""`python -m dcp_remote.launch llamafactory-cli train`: real trainings by its launcher, against an S3 server.

The launcher starts torchrun where several ranks are asked for. The processes find `programs/llamafactory_path` on their
path, which kills them in a save, and has Accelerate use gloo.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llamafactory.hparams import get_train_args, read_args
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dcp_remote import Run, open_run
from dcp_remote.testing.servers import S3Server
from tests.support.commands import Ended, run_command
from tests.support.rank_programs import ROOT

PATH = Path(__file__).parent / "programs" / "llamafactory_path"
EXAMPLE = ROOT / "examples" / "llamafactory.yaml"

# `make test-frameworks` leaves out what the others hold nearly as well: importing the frameworks takes a while.
LONG = pytest.mark.torture(smoke=False)

ZERO_3 = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 16,
        "stage3_gather_16bit_weights_on_model_save": True,  # as in each file that LLaMA-Factory ships
    },
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
}


class Factory:
    """Host on which LLaMA-Factory trains a small Llama with random weights.

    Args:
        folder: Working directory.
        environment: Variables beside those of this process.

    Attributes:
        folder: Working directory.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        """Make the model, its tokenizer and the data."""
        self.folder, self._environment = folder, environment
        words = ["<unk>", "<s>", "</s>", "<pad>", *map(str, range(50)), "Human", "Assistant", ":"]
        tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
        ).save_pretrained(folder / "model")
        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            attention_dropout=0.1,
        )
        LlamaForCausalLM(config).save_pretrained(folder / "model")
        numbers = [" ".join(str((first * k) % 50) for k in range(1, 9)) for first in range(1, 41)]
        rows = [{"instruction": text, "input": "", "output": " ".join(reversed(text.split()))} for text in numbers]
        (folder / "data").mkdir()
        (folder / "data" / "tiny.json").write_text(json.dumps(rows))
        (folder / "data" / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "tiny.json"}}))
        (folder / "zero3.json").write_text(json.dumps(ZERO_3))

    def train(
        self, url: str | None, *, ranks: int = 1, environment: dict[str, str] | None = None, **arguments: Any
    ) -> Ended:
        """Train for six steps with a save after every second, remotely if a URL is given."""
        given: dict[str, Any] = {
            "model_name_or_path": "model",
            "template": "default",
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "full",
            "dataset": "tiny",
            "dataset_dir": "data",
            "cutoff_len": 64,
            "output_dir": "out",
            "per_device_train_batch_size": 2,
            "max_steps": 6,
            "save_steps": 2,
            "save_total_limit": 2,
            "logging_steps": 1,
            "learning_rate": 0.01,
            "lr_scheduler_type": "cosine",
            "use_cpu": "deepspeed" not in arguments,
            "report_to": "none",
            **({"ddp_backend": "gloo"} if ranks > 1 else {}),
            **arguments,
        }
        number = len(list(self.folder.glob("*.yaml")))
        path = self.folder / f"train-{number}.yaml"
        path.write_text(json.dumps(given))  # which is YAML as well
        command = [str(Path(sys.executable).with_name("llamafactory-cli")), "train", path.name]
        launch = {"FORCE_TORCHRUN": "1", "NNODES": "1", "NPROC_PER_NODE": str(ranks)} if ranks > 1 else {}
        if url is not None:
            command = [sys.executable, "-m", "dcp_remote.launch", *command]
            launch["DCP_REMOTE_URL"] = url
        ended = run_command(
            command,
            folder=self.folder,
            environment=self._environment | launch | (environment or {}),
            output=path.with_suffix(".txt"),
            timeout_seconds=240,
        )
        assert not [path for path in self.folder.rglob("*:") if path.is_dir()], "A URL was taken for a path."
        return ended

    def losses(self, output: str = "out") -> dict[int, float]:
        """Return the loss of each step."""
        history = json.loads((self.folder / output / "trainer_state.json").read_text())["log_history"]
        return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}

    def trained(self) -> list[int]:
        """Return the steps that trainings on this host have made."""
        lines = (self.folder / "out" / "trainer_log.jsonl").read_text().splitlines()
        return [entry["current_steps"] for entry in map(json.loads, lines) if "loss" in entry]

    def exported(self, output: str = "out") -> bytes:
        """Return the model that LLaMA-Factory writes at the end."""
        (path,) = (self.folder / output).glob("*model.safetensors")
        return path.read_bytes()

    def local(self, output: str = "out") -> list[str]:
        """Return the names of local checkpoints."""
        return sorted(path.name for path in (self.folder / output).glob("checkpoint-*"))


@pytest.fixture
def make_factory(tmp_path: Path, program_environment: dict[str, str]) -> Callable[..., Factory]:
    """Return a function that makes a host with an empty folder."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "DCP_REMOTE_"))}
    environment = inherited | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(PATH), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "cache"),
        **program_environment,
    }

    def make(name: str, **more: str) -> Factory:
        folder = tmp_path / name
        folder.mkdir()
        return Factory(folder, environment | more)

    return make


def digests(run: Run, step: int) -> dict[str, str]:
    """Return a digest of each tensor and number of a checkpoint, but for its files, which name times and folders."""
    found: dict[str, str] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key in value:
                add(f"{name}.{key}", value[key])
        elif isinstance(value, torch.Tensor):
            data = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            found[name] = f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"
        else:
            found[name] = repr(value.get_state(legacy=False) if isinstance(value, np.random.RandomState) else value)

    state = run.load(step)
    for key in state.keys() - {"files", "trainer"}:
        add(key, state[key])
    return found


@dataclass(frozen=True, slots=True)
class Mode:
    """Kind of training.

    Attributes:
        ranks: Number of ranks.
        upload_bytes_per_second: Limit of the uploads of a job that is killed, so that it is killed during one.
        arguments: Lines of the YAML file.
    """

    ranks: int
    upload_bytes_per_second: int
    arguments: dict[str, Any]


MODES = [
    pytest.param(Mode(1, 5_000, {"finetuning_type": "lora", "lora_dropout": 0.1}), id="lora-1"),
    pytest.param(Mode(2, 100_000, {}), id="ddp-2", marks=LONG),
    pytest.param(Mode(2, 100_000, {"deepspeed": "zero3.json"}), id="zero3-2"),
]


@pytest.mark.timeout(900)  # four trainings, each of which imports LLaMA-Factory for a while
@pytest.mark.parametrize("mode", MODES)
def test_a_killed_training_goes_on_as_if_it_had_not_been_killed(
    make_factory: Callable[..., Factory], bucket_url: str, s3_server: S3Server, mode: Mode
) -> None:
    """All ranks are killed in the middle of the second save, and started again by the same command, on another host.

    Losses, exported model, and all tensors of the last checkpoint are equal to the bit to those of an uninterrupted
    training; losses and exported model also to those of LLaMA-Factory alone. With ZeRO-3 it gathers the model on one
    rank in every save, and with dcp_remote at the end only, for the export.
    """
    ranks, arguments = mode.ranks, mode.arguments
    is_zero = "deepspeed" in arguments
    shims = {"TEST_GLOO": "1"} if is_zero else {}
    alone, first, second, whole = (
        make_factory(name, **shims, TEST_GATHERS=f"{name}.txt") for name in ("alone", "first", "second", "whole")
    )
    ended = alone.train(None, ranks=ranks, **arguments)
    assert ended.code == 0, ended.output
    assert alone.local() == ["checkpoint-4", "checkpoint-6"]
    slow = {"DCP_REMOTE_STORAGE_OPTIONS": json.dumps({"upload_bytes_per_second": mode.upload_bytes_per_second})}
    url = f"{bucket_url}/run"
    killed = first.train(url, ranks=ranks, environment={"TEST_KILL": "upload-4", **slow}, **arguments)
    assert killed.code == (128 + 9 if ranks == 1 else 1), killed.output
    run = open_run(url, storage_options=s3_server.storage_options)
    assert [info.names for info in run.checkpoints()] == [("checkpoint-2",)]
    resumed = second.train(url, ranks=ranks, **arguments)
    assert resumed.code == 0, resumed.output
    assert second.trained() == [3, 4, 5, 6]
    done = whole.train(f"{bucket_url}/whole", ranks=ranks, **arguments)
    assert done.code == 0, done.output

    assert [info.names for info in run.checkpoints()] == [("checkpoint-4",), ("checkpoint-6",)]
    assert second.losses() == whole.losses() == alone.losses()
    assert sorted(second.losses()) == [1, 2, 3, 4, 5, 6]
    assert second.exported() == whole.exported() == alone.exported()
    other = digests(open_run(f"{bucket_url}/whole", storage_options=s3_server.storage_options), 6)
    assert digests(run, 6) == other
    assert {name.partition(".")[0] for name in other} >= {"model", "optim", "scheduler", "per_rank"}
    for factory in (first, second, whole):
        assert factory.local() == []
    if is_zero:
        gathers = {
            factory: (factory.folder / f"{name}.txt").read_text().split() if name else []
            for factory, name in ((alone, "alone"), (second, "second"), (whole, "whole"))
        }
        assert sorted(gathers[alone]) == sorted(["2", "4", "6", "6"] * ranks)
        assert gathers[second] == gathers[whole] == ["6"] * ranks
        assert not (first.folder / "first.txt").exists()


@pytest.mark.timeout(600)
def test_a_save_that_is_cut_off(make_factory: Callable[..., Factory], bucket_url: str, s3_server: S3Server) -> None:
    """Killed before the second checkpoint is complete: LLaMA-Factory alone then takes the incomplete folder."""
    alone, remote = make_factory("alone"), make_factory("remote")
    kill = {"TEST_KILL": "state-4"}
    assert alone.train(None, environment=kill).code == -9
    assert alone.local() == ["checkpoint-2", "checkpoint-4"]
    ended = alone.train(None)
    assert ended.code == 1
    assert "No such file or directory: 'out/checkpoint-4/trainer_state.json'" in ended.output, ended.output

    url = f"{bucket_url}/run"
    assert remote.train(url, environment=kill).code == 128 + 9
    ended = remote.train(url)
    assert ended.code == 0, ended.output
    assert sorted(remote.losses()) == [1, 2, 3, 4, 5, 6]
    run = open_run(url, storage_options=s3_server.storage_options)
    assert [info.names for info in run.checkpoints()] == [("checkpoint-4",), ("checkpoint-6",)]


@pytest.mark.timeout(600)
def test_local_checkpoints_move_to_the_run(
    make_factory: Callable[..., Factory], bucket_url: str, s3_server: S3Server
) -> None:
    """LLaMA-Factory resumes from the newest in `output_dir`: from there the first time, then from the run's newest."""
    host, url = make_factory("host"), f"{bucket_url}/run"
    given: dict[str, Any] = {"lr_scheduler_type": "constant"}
    assert host.train(None, max_steps=4, **given).code == 0
    for steps in (6, 8):
        ended = host.train(url, max_steps=steps, **given)
        assert ended.code == 0, ended.output
        assert ("resuming from the newest, not from" in ended.output) == (steps == 8)
    assert sorted(host.losses()) == list(range(1, 9))
    run = open_run(url, storage_options=s3_server.storage_options)
    assert [info.step for info in run.checkpoints()] == [6, 8]
    assert host.local() == ["checkpoint-2", "checkpoint-4"]


def test_trainers_that_save_by_other_means_are_refused(make_factory: Callable[..., Factory], bucket_url: str) -> None:
    """Before they train: their checkpoints would lie in `output_dir` alone."""
    host, url = make_factory("host"), f"{bucket_url}/run"
    cases: list[tuple[str, dict[str, str], dict[str, Any]]] = [
        ("does not support the v1 trainer of LLaMA-Factory", {"USE_V1": "1"}, {}),
        ("does not support stage: ppo", {}, {"stage": "ppo", "reward_model": "model", "finetuning_type": "lora"}),
        ("output_dir must be a local folder", {}, {"output_dir": f"{bucket_url}/out"}),
    ]
    for message, environment, arguments in cases:
        ended = host.train(url, environment=environment, **arguments)
        assert ended.code == 1, ended.output
        assert message in ended.output
        assert not host.local()


def test_the_example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """LLaMA-Factory refuses a file with a key that it does not know, and a folder that holds the model already."""
    monkeypatch.setattr(sys, "argv", ["llamafactory-cli", str(EXAMPLE), "use_cpu=true", f"output_dir={tmp_path}"])
    given = read_args()
    assert isinstance(given, dict)
    (tmp_path / "model.safetensors").touch()
    _, data, training, finetuning, _ = get_train_args(given)
    assert (data.dataset, training.save_steps, finetuning.finetuning_type) == (
        ["identity", "alpaca_en_demo"],
        20,
        "lora",
    )
    with pytest.raises(ValueError, match="already exists and is not empty"):
        get_train_args(given | {"overwrite_output_dir": False})
    with pytest.raises(ValueError, match="remote_checkpoint_url"):
        get_train_args(given | {"remote_checkpoint_url": "s3://bucket/run"})
