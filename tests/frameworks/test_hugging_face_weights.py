"""Weights that `save_pretrained` wrote, imported, exported, and opened by `from_pretrained`: equal to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dcp_remote import CheckpointManager, export_checkpoint, import_checkpoint, load


def make_model(*, is_tied: bool = False, seed: int = 0) -> LlamaForCausalLM:
    """Return a small model with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=is_tied,
    )
    return LlamaForCausalLM(config)


def require_equal(folder: Path, model: LlamaForCausalLM, dtype: torch.dtype = torch.float32) -> None:
    """Open a folder by `from_pretrained`; it misses nothing, and has nothing else, and all bits are equal."""
    opened, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    own, found = model.state_dict(), opened.state_dict()
    assert own.keys() == found.keys()
    for name, value in own.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], value.to(dtype)), name


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("shard", ["100KB", "5GB"])
def test_weights_come_and_go(tmp_path: Path, shard: str, *, is_tied: bool) -> None:
    """From one file and from several, into one and into several; with the configuration beside them."""
    model = make_model(is_tied=is_tied)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    is_split = (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    assert is_split == (shard == "100KB")
    import_checkpoint(tmp_path / "theirs", tmp_path / "run", step=0, progress=False)
    loaded = load(tmp_path / "run")["model"]
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.items())
    for number, bytes_max in enumerate((100_000, 10**9)):
        out = tmp_path / f"out-{number}"
        export_checkpoint(tmp_path / "run", out, file_bytes_max=bytes_max, progress=False)
        assert json.loads((out / "config.json").read_text()) == json.loads(
            (tmp_path / "theirs" / "config.json").read_text()
        )
        require_equal(out, model)
    export_checkpoint(tmp_path / "run", tmp_path / "half", dtype=torch.bfloat16, progress=False)
    require_equal(tmp_path / "half", model, torch.bfloat16)


def test_tied_weights_that_are_there_twice(tmp_path: Path) -> None:
    """A module's state has tied weights under both names; the export writes both, which `from_pretrained` takes."""
    model = make_model(is_tied=True)
    with CheckpointManager(tmp_path / "run", progress=False) as run:
        run.save(1, {"model": model})
    export_checkpoint(tmp_path / "run", tmp_path / "out", progress=False)
    model.config.save_pretrained(tmp_path / "out")
    require_equal(tmp_path / "out", model)
    export_checkpoint(tmp_path / "run", tmp_path / "once", rename={"lm_head": None}, progress=False)
    model.config.save_pretrained(tmp_path / "once")
    require_equal(tmp_path / "once", model)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("out", "once")]
    assert sizes[0] > sizes[1] + model.lm_head.weight.nbytes
