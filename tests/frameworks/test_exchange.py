"""Checkpoints between frameworks: each saves the same small model, and each loads what all have saved."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.rank_programs import Ranks

# Numbers of ranks by framework and how it shards.
MODES = {
    "script-plain": 1,
    "script-fsdp2": 2,
    "deepspeed-1": 2,
    "deepspeed-3": 2,
    "accelerate-fsdp2": 2,
    "accelerate-zero3": 2,
    "trainer-plain": 1,
    "trainer-fsdp2": 2,
    "trainer-zero3": 2,
    "lightning-ddp": 2,
    "lightning-fsdp2": 2,
    "fabric-fsdp2": 2,
}


ENGINES = {"deepspeed-1", "deepspeed-3", "accelerate-zero3"}

# Frameworks whose loops go on from their own checkpoints alone; all others go on from everyone's.
OWN_LOOPS = {"trainer", "lightning"}


def expect(source: str, target: str) -> str:
    """Return the cell of the table: under Transformers, DeepSpeed rounds gradients otherwise."""
    saver, loader = source.partition("-")[0], target.partition("-")[0]
    if loader in OWN_LOOPS and saver != loader:
        return "weights"
    is_rounded = source != target and (
        "trainer-zero3" in {source, target} or (saver == "trainer" and target in ENGINES)
    )
    return "state" if is_rounded else "bits"


def compare(saved: Mapping[str, Any], loaded: Mapping[str, Mapping[str, Any]]) -> str:
    """Return how much of a checkpoint a framework has loaded."""
    resumed, weights = loaded["resume"], loaded["weights"]
    if resumed["error"] is None:
        assert resumed["digests"][0] == saved["digests"][0]
        return "bits" if resumed["digests"][1] == saved["digests"][1] else "state"
    if weights["error"] is None:
        expected = {name: value for name, value in saved["digests"][0].items() if name.startswith("fp32 ")}
        assert {name: weights["digests"][0][name] for name in expected} == expected
        return "weights"
    return "no"


@pytest.mark.torture(smoke=False)
@pytest.mark.timeout(3000)
def test_each_loads_what_all_have_saved(run_program: Callable[..., Ranks], bucket_url: str, tmp_path: Path) -> None:
    """The table of the documentation, which is printed: "bits", "state", "weights" or "no"."""

    def run(mode: str, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        path = tmp_path / f"jobs-{len(list(tmp_path.glob('jobs-*')))}.json"
        path.write_text(json.dumps(jobs))
        return run_program("exchange.py", MODES[mode], path, timeout_seconds=900).reports

    saved = {}
    for mode in MODES:
        job = {"name": mode, "mode": mode, "url": f"{bucket_url}/{mode}", "action": "save"}
        saved[mode] = run(mode, [job])[0][mode]
    table: dict[str, dict[str, str]] = {source: {} for source in MODES}
    for mode in MODES:
        jobs = [
            {"name": f"{source} {action}", "mode": mode, "url": f"{bucket_url}/{source}", "action": action}
            for source in MODES
            for action in ("resume", "weights")
        ]
        for report in run(mode, jobs):
            for source in MODES:
                loaded = {action: report[f"{source} {action}"] for action in ("resume", "weights")}
                table[source][mode] = compare(saved[source], loaded)
    assert table == {source: {target: expect(source, target) for target in MODES} for source in MODES}
    for source, cells in table.items():
        sys.stdout.write(f"{source}: {json.dumps(cells)}\n")
