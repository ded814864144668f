"""Checkpoints of DeepSpeed's engines: real engines on real ranks, between stages, world sizes and precisions."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dcp_remote import open_run
from dcp_remote.testing.servers import S3Server
from tests.support.rank_programs import Ranks

RunProgram = Callable[..., Ranks]
RunProgramIn = Callable[..., Ranks]

# Threads, sockets, plans and the interpreter's own.
OTHER_MEMORY_MIB = 24

EXAMPLES = Path(__file__).parent.parent.parent / "examples"

STAGES = ("0", "1", "2", "3")

# Kinds of engines (see `deepspeed_engines.KINDS`) that are saved, by number of ranks.
SAVED = {
    1: ("3",),
    2: (*STAGES, "1-32", "2-offload", "3-offload", "2-reordered", "2-aligned", "2-fp32", "3-fp16"),
    3: ("3",),
}

# Runs that are loaded, and into which kinds, by number of ranks.
LOADED: dict[int, list[tuple[tuple[str, ...], tuple[str, ...]]]] = {
    1: [(STAGES, ("0-2", "1-2", "2-2", "3-2", "3-3", "2-reordered-2", "2-aligned-2"))],
    2: [
        (("1-32", "2-offload", "3-offload", "2-reordered", "2-aligned"), ("3-2", "1-32-2")),
        (("0-fp32", "3-fp32", "2-fp16", "3-fp16"), ("2-2", "2-fp32-2", "3-fp16-2")),
        (STAGES, ("3-2", "3-1")),
    ],
    3: [(("0", "2", "3-offload"), ("1-2", "2-offload-2", "3-offload-2"))],
}

# All stages at all these numbers of ranks, into all of them.
EVERY_SIZE = (1, 2, 3, 4)

# Prefixes of what engines of different precision have in common, too.
MASTERS = ("fp32 ", "exp_avg ", "exp_avg_sq ")


@pytest.fixture(scope="module")
def deepspeed_url(s3_server: S3Server) -> str:
    """Return the URL of a bucket of this file."""
    name = f"deepspeed-{uuid.uuid4().hex[:12]}"
    s3_server.create_bucket(name)
    return f"s3://{name}"


def save_all(
    run_program_in: RunProgramIn, folder: Path, url: str, saved: Mapping[int, Sequence[str]]
) -> dict[str, Any]:
    """Save every kind, by number of ranks; return the state of each run."""
    states: dict[str, Any] = {}
    for world_size, kinds in saved.items():
        ranks = run_program_in(folder, "deepspeed_matrix.py", world_size, "save", url, ",".join(kinds))
        states |= {f"{kind}-{world_size}": ranks.reports[0][kind] for kind in kinds}
    return states


@pytest.fixture(scope="module")
def saved(deepspeed_url: str, run_program_in: RunProgramIn, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Save every kind; return the state of each run."""
    return save_all(run_program_in, tmp_path_factory.mktemp("saved"), deepspeed_url, SAVED)


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


def require_loaded(ranks: Ranks, states: Mapping[str, Any], kinds: Sequence[str], runs: Sequence[str]) -> None:
    """Compare what every rank loaded into each kind of engine from each run."""
    world_size = len(ranks.reports)
    for run in runs:
        for kind in kinds:
            loaded = [report[f"{run} {kind}"] for report in ranks.reports]
            for one in loaded:
                require_equal(one, states[run], run=run, kind=kind)
                assert one["client_state"] == {"kind": run.rpartition("-")[0]}
            if precision(run) == precision(kind):  # the forward pass is the same in every stage
                assert loaded[0]["loss"] == states[run]["loss"]
            if run == f"{kind}-{world_size}":
                assert loaded[0]["next"] == states[run]["next"]


@pytest.mark.parametrize("world_size", LOADED)
def test_any_stage_and_world_size_loads_any_other(
    deepspeed_url: str, saved: dict[str, Any], run_program: RunProgram, world_size: int
) -> None:
    """Bits of masters, both moments and 16-bit copies, whole, by DeepSpeed's own functions; counters and schedule."""
    for kinds, runs in LOADED[world_size]:
        ranks = run_program("deepspeed_matrix.py", world_size, "load", deepspeed_url, ",".join(kinds), ",".join(runs))
        require_loaded(ranks, saved, kinds, runs)


@pytest.mark.torture(smoke=False)
@pytest.mark.timeout(1500)
def test_every_stage_at_every_size(bucket_url: str, run_program_in: RunProgramIn, tmp_path: Path) -> None:
    """The whole matrix, which the documentation shows; prints what was compared."""
    states = save_all(run_program_in, tmp_path, bucket_url, dict.fromkeys(EVERY_SIZE, STAGES))
    for world_size in EVERY_SIZE:
        arguments = ("load", bucket_url, ",".join(STAGES), ",".join(states))
        ranks = run_program_in(tmp_path, "deepspeed_matrix.py", world_size, *arguments, timeout_seconds=600)
        require_loaded(ranks, states, STAGES, list(states))
        print(f"loaded at {world_size} by stages {', '.join(STAGES)}: {', '.join(states)}")  # noqa: T201


@pytest.mark.parametrize(
    "cases",
    [
        ("options_of_a_load", "saves_in_the_background", "frozen_parameters_are_left_out", "every_class_is_patched"),
        ("nothing_is_gathered", "others_load_it", "a_rank_that_raises", "a_rank_that_does_not_come", "incident_0"),
        ("stages_go_on_alike", "linear_layers_of_stage_3", "partitions_on_nvme_are_refused", "parallelism_is_refused"),
    ],
    ids=lambda cases: cases[0],
)
def test_cases(deepspeed_url: str, run_program: RunProgram, cases: Sequence[str]) -> None:
    """Each function of `deepspeed_cases.py` says what it shows; all run on two ranks."""
    ranks = run_program("deepspeed_cases.py", 2, deepspeed_url, ",".join(cases))
    for report in ranks.reports:
        assert report == dict.fromkeys(cases, "passed")


def test_memory_of_a_save_is_a_copy_of_the_shard_and_the_budget(deepspeed_url: str, run_program: RunProgram) -> None:
    """Peaks of resident memory above that before a save; the copy is kept for the next one."""
    ranks = run_program("deepspeed_cases.py", 2, deepspeed_url, "memory_stays_within_the_budget")
    for report in ranks.reports:
        memory = report["memory"]  # in MiB
        assert memory["shard"] >= 5 * memory["budget"]
        assert memory["save 0"] <= memory["shard"] + memory["budget"] + OTHER_MEMORY_MIB, memory
        assert max(memory["save 1"], memory["save 2"]) <= memory["budget"] + OTHER_MEMORY_MIB, memory


def test_incident_4_another_world_size(deepspeed_url: str, run_program: RunProgram) -> None:
    """Saved on two ranks, loaded on one: DeepSpeed's own load raises ZeRORuntimeException."""
    saved = run_program("deepspeed_cases.py", 2, deepspeed_url, "incident_4_saved")
    loaded = run_program("deepspeed_cases.py", 1, deepspeed_url, "incident_4_loaded")
    assert loaded.reports[0]["loaded"] == saved.reports[0]["saved"]


def test_a_job_that_is_killed_in_a_save_goes_on(deepspeed_url: str, run_program: RunProgram) -> None:
    """SIGKILL of all ranks while a save is under way; losses equal those of an uninterrupted run to the bit."""
    whole = run_program("deepspeed_cases.py", 2, deepspeed_url, "is_not_killed")
    killed = run_program("deepspeed_cases.py", 2, deepspeed_url, "is_killed", is_checked=False)
    assert killed.exit_codes == [-signal.SIGKILL] * 2, killed.show()
    resumed = run_program("deepspeed_cases.py", 2, deepspeed_url, "goes_on")
    for rank, report in enumerate(resumed.reports):
        assert report["step"] == 2, killed.show()  # the second save had not been committed
        assert killed.reports[rank]["losses"][:2] + report["losses"] == whole.reports[rank]["losses"]


def test_the_example_goes_on_at_another_size_and_stage(
    run_program: RunProgram, deepspeed_url: str, s3_server: S3Server
) -> None:
    """`examples/deepspeed_zero3.py`, with fewer steps."""
    script, url = EXAMPLES / "deepspeed_zero3.py", f"{deepspeed_url}/example"
    first = run_program(script, 2, "--url", url, "--steps", 4, "--save-every", 2)
    assert "step 0, None" in first.outputs[0]
    second = run_program(script, 1, "--url", url, "--stage", 2, "--steps", 5)
    assert "step 4, {'loss': " in second.outputs[0]
    assert "step 5, loss " in second.outputs[0]
    assert [info.step for info in open_run(url, storage_options=s3_server.storage_options).checkpoints()] == [2, 4]
