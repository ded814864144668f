"""Checkpoints of DeepSpeed's engines: real engines on real ranks, between stages, world sizes and precisions."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from dcp_remote.testing.servers import S3Server
from tests.support.rank_programs import Ranks

RunProgramIn = Callable[..., Ranks]

STAGES = ("0", "1", "2", "3")

# Kinds of engines (see `deepspeed_engines.KINDS`) that are saved, by number of ranks.
SAVED = {
    1: ("1", "3"),
    2: (
        *STAGES,
        *("1-32", "2-offload", "3-offload", "2-reordered", "2-aligned"),
        *("0-fp32", "2-fp32", "3-fp32", "0-fp16", "2-fp16", "3-fp16"),
    ),
    3: STAGES,
}
EVERY_RUN = tuple(f"{kind}-{ranks}" for ranks, kinds in SAVED.items() for kind in kinds)

# Runs that are loaded, and into which kinds, by number of ranks.
LOADED: dict[int, list[tuple[tuple[str, ...], tuple[str, ...]]]] = {
    1: [(STAGES, EVERY_RUN)],
    2: [
        (("1-32", "2-offload", "3-offload", "2-reordered", "2-aligned"), ("0-2", "1-2", "3-2", "2-3")),
        (("0-fp32", "3-fp32", "2-fp16", "3-fp16"), ("2-2", "2-fp32-2", "3-fp32-2", "2-fp16-2", "3-fp16-2", "3-3")),
        (STAGES, ("0-2", "1-2", "2-2", "3-2", "3-1")),
    ],
    3: [(STAGES, ("0-2", "1-2", "2-2", "3-2", "3-3", "3-1")), (("3-offload",), ("2-offload-2", "3-offload-2"))],
}

# Prefixes of what engines of different precision have in common, too.
MASTERS = ("fp32 ", "exp_avg ", "exp_avg_sq ")


@pytest.fixture(scope="module")
def saved(
    s3_server: S3Server, run_program_in: RunProgramIn, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any]]:
    """Save every kind; return the URL below which the runs lie, and the state of each."""
    url = f"s3://deepspeed-{uuid.uuid4().hex[:12]}"
    s3_server.create_bucket(url.removeprefix("s3://"))
    folder = tmp_path_factory.mktemp("saved")
    states: dict[str, Any] = {}
    for world_size, kinds in SAVED.items():
        ranks = run_program_in(folder, "deepspeed_matrix.py", world_size, "save", url, ",".join(kinds))
        states |= {f"{kind}-{world_size}": ranks.reports[0][kind] for kind in kinds}
    return url, states


def precision(kind: str) -> str:
    return next((name for name in ("fp32", "fp16") if name in kind), "bf16")


def require_equal(loaded: dict[str, Any], expected: dict[str, Any], *, run: str, kind: str) -> None:
    """Compare all bits; those of 16-bit copies and buffers only between engines of one precision."""
    is_same = precision(run) == precision(kind)
    names = [name for name in expected["digests"] if is_same or name.startswith(MASTERS)]
    assert len(names) > 15
    assert {name: loaded["digests"][name] for name in names} == {name: expected["digests"][name] for name in names}
    for key in ("steps", "rates", "scheduler"):
        assert loaded[key] == expected[key], key
    assert loaded["counters"] == expected["counters"]


@pytest.mark.parametrize("world_size", LOADED)
def test_any_stage_and_world_size_loads_any_other(
    saved: tuple[str, dict[str, Any]], run_program: Callable[..., Ranks], world_size: int
) -> None:
    """Bits of masters, both moments and 16-bit copies, whole, by DeepSpeed's own functions; counters and schedule."""
    url, states = saved
    for kinds, runs in LOADED[world_size]:
        ranks = run_program("deepspeed_matrix.py", world_size, "load", url, ",".join(kinds), ",".join(runs))
        for run in runs:
            for kind in kinds:
                loaded = [report[f"{run} {kind}"] for report in ranks.reports]
                for one in loaded:
                    require_equal(one, states[run], run=run, kind=kind)
                    assert one["client_state"] == {"kind": run.rpartition("-")[0]}
                if run == f"{kind}-{world_size}":
                    assert loaded[0]["loss"] == states[run]["loss"]
                    assert loaded[0]["next"] == states[run]["next"]
