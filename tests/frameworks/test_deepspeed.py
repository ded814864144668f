"""Checkpoints of DeepSpeed's engines: real engines on real ranks, between stages, world sizes and precisions."""

from __future__ import annotations

import functools
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import pytest

from dcp_remote import open_run
from dcp_remote.testing.servers import S3Server
from tests.support.rank_programs import Ranks

RunProgram = Callable[..., Ranks]
RunProgramIn = Callable[..., Ranks]
ReportsOf = Callable[[Sequence[str]], list[dict[str, Any]]]

# Threads, sockets, plans and the interpreter's own.
OTHER_MEMORY_MIB = 24

EXAMPLES = Path(__file__).parent.parent.parent / "examples"

# `make test-frameworks` leaves these out.
LONG = pytest.mark.torture(smoke=False)

STAGES = ("0", "1", "2", "3")

# Kinds of engines (see `deepspeed_engines.KINDS`) that load, and which runs, on one and on two ranks. The name of a run
# is the kind that saved it, and the number of ranks; on one rank "3" alone is saved.
Loaded = dict[int, list[tuple[tuple[str, ...], tuple[str, ...]]]]
LOADED: Loaded = {
    1: [(("0", "2", "3"), ("1-2", "3-2"))],
    2: [(STAGES, ("3-1",)), (("2-reordered", "3-offload"), ("2-reordered-2",))],
}
LOADED_LONG: Loaded = {
    1: [(STAGES, ("2-reordered-2", "0-2", "1-2", "2-2", "3-2", "3-1"))],
    2: [
        (STAGES, ("3-1", "3-2")),
        (("1-32", "2-offload", "3-offload", "2-reordered", "2-aligned"), ("1-32-2", "2-aligned-2", "3-offload-2")),
        (("0-fp32", "3-fp32", "2-fp16", "3-fp16"), ("2-2", "2-fp32-2", "3-fp16-2")),
    ],
}

# All stages at all these numbers of ranks, into all of them.
EVERY_SIZE = (1, 2, 3, 4)

# Cases of `deepspeed_cases.py` that run one after another in one set of processes.
CASES = (
    (
        "memory_stays_within_the_budget",
        "options_of_a_load",
        "saves_in_the_background",
        "frozen_parameters_are_left_out",
        "every_class_is_patched",
        "folders_go_below_a_url",
        "nothing_is_gathered",
        "others_load_it",
        "incident_4_saved",
        "is_not_killed",
    ),
    (
        "a_usual_load_warns_of_nothing",
        "what_is_missing_is_an_error",
        "going_back_and_saving_by_another_tag",
        "saved_before_the_first_step",
        "a_rank_that_raises",
        "a_rank_that_raises_in_the_background",
        "a_rank_that_does_not_come",
        "what_cannot_be_saved_is_refused_in_the_call",
        "an_engine_for_evaluation",
        "a_parameter_of_another_shape",
        "an_extra_state_that_is_a_tensor",
        "incident_0",
        "incident_0_of_a_url",
        "stages_go_on_alike",
        "linear_layers_of_stage_3",
        "parallelism_is_refused",
    ),
)

# Prefixes of what engines of different precision have in common, too.
MASTERS = ("fp32 ", "exp_avg ", "exp_avg_sq ")


@pytest.fixture(scope="module")
def deepspeed_url(s3_server: S3Server) -> str:
    """Return the URL of a bucket of this file."""
    name = f"deepspeed-{uuid.uuid4().hex[:12]}"
    s3_server.create_bucket(name)
    return f"s3://{name}"


def arguments_of(command: str, url: str, *names: Sequence[str]) -> list[str]:
    return [command, url, *map(",".join, names)]


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


@pytest.mark.timeout(900)
@pytest.mark.parametrize("loaded", [LOADED, pytest.param(LOADED_LONG, marks=LONG)], ids=["short", "long"])
def test_any_stage_and_world_size_loads_any_other(deepspeed_url: str, run_program: RunProgram, loaded: Loaded) -> None:
    """Bits of masters, both moments and 16-bit copies, whole, by DeepSpeed's own functions; counters and schedule."""
    runs_of_all = [run for pairs in loaded.values() for _, runs in pairs for run in runs]
    saved = sorted({run.removesuffix("-2") for run in runs_of_all if run.endswith("-2")})
    deepspeed_url = f"{deepspeed_url}/{len(saved)}"
    first = run_program("deepspeed_matrix.py", 1, *arguments_of("save", deepspeed_url, ("3",)))
    states = {"3-1": first.reports[0]["3"]}
    for world_size in (2, 1):
        commands = arguments_of("save", deepspeed_url, saved) if world_size == 2 else []
        for kinds, runs in loaded[world_size]:
            commands += arguments_of("load", deepspeed_url, kinds, runs)
        ranks = run_program("deepspeed_matrix.py", world_size, *commands)
        states |= {f"{kind}-2": ranks.reports[0][kind] for kind in saved if world_size == 2}
        for kinds, runs in loaded[world_size]:
            require_loaded(ranks, states, kinds, runs)


@LONG
@pytest.mark.timeout(2400)
def test_every_stage_at_every_size(run_program_in: RunProgramIn, tmp_path: Path) -> None:
    """The whole matrix, which the documentation shows; in a local folder, and prints what was compared."""
    url = f"{tmp_path.as_uri()}/runs"
    states: dict[str, Any] = {}
    for world_size in EVERY_SIZE:
        ranks = run_program_in(tmp_path, "deepspeed_matrix.py", world_size, *arguments_of("save", url, STAGES))
        states |= {f"{kind}-{world_size}": ranks.reports[0][kind] for kind in STAGES}
    for world_size in EVERY_SIZE:
        arguments = arguments_of("load", url, STAGES, tuple(states))
        began = time.monotonic()
        ranks = run_program_in(tmp_path, "deepspeed_matrix.py", world_size, *arguments, timeout_seconds=900)
        require_loaded(ranks, states, STAGES, list(states))
        seconds = time.monotonic() - began
        sys.stdout.write(f"at {world_size}, stages {', '.join(STAGES)} loaded {', '.join(states)} ({seconds:.0f} s)\n")


@pytest.fixture(scope="module")
def reports_of(deepspeed_url: str, run_program_in: RunProgramIn, tmp_path_factory: pytest.TempPathFactory) -> ReportsOf:
    """Return a function that runs cases on two ranks, once each, and returns the reports of the ranks."""

    @functools.cache
    def run(cases: tuple[str, ...]) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("cases")
        return run_program_in(folder, "deepspeed_cases.py", 2, deepspeed_url, ",".join(cases)).reports

    return run


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cases", CASES, ids=lambda cases: cases[0])
def test_cases(reports_of: ReportsOf, cases: tuple[str, ...]) -> None:
    """Each function of `deepspeed_cases.py` says what it shows."""
    for report in reports_of(cases):
        assert [report.get(case) for case in cases] == ["passed"] * len(cases)


@LONG  # compiles DeepSpeed's `async_io` in its first run, in minutes
@pytest.mark.timeout(1500)
@pytest.mark.skipif(find_library("aio") is None, reason="DeepSpeed's swapper needs libaio (Debian: libaio-dev)")
def test_partitions_on_nvme(deepspeed_url: str, run_program: RunProgram) -> None:
    """Every device of optimizer and parameters into CPU memory, from it, and into the same; and incident 0 on files."""
    cases = "partitions_on_nvme,incident_0_on_nvme"
    ranks = run_program("deepspeed_cases.py", 2, deepspeed_url, cases, timeout_seconds=1200)
    sys.stdout.write("\n".join(ranks.reports[0]["loaded"]))


def test_memory_of_a_save_is_a_copy_of_the_shard_and_the_budget(reports_of: ReportsOf) -> None:
    """Peaks of resident memory above that before a save; the copy is kept for the next one."""
    for report in reports_of(CASES[0]):
        memory = report["memory"]  # in MiB
        assert memory["shard"] >= 5 * memory["budget"]
        assert memory["save 0"] <= memory["shard"] + memory["budget"] + OTHER_MEMORY_MIB, memory
        assert max(memory["save 1"], memory["save 2"]) <= memory["budget"] + OTHER_MEMORY_MIB, memory


def test_incident_4_another_world_size(deepspeed_url: str, run_program: RunProgram, reports_of: ReportsOf) -> None:
    """Saved on two ranks, loaded on one: DeepSpeed's own load raises ZeRORuntimeException."""
    saved = reports_of(CASES[0])[0]
    loaded = run_program("deepspeed_cases.py", 1, deepspeed_url, "incident_4_loaded", environment=saved["folder"])
    assert loaded.reports[0]["loaded"] == saved["saved"]


@LONG
def test_a_job_that_is_killed_in_a_save_goes_on(
    deepspeed_url: str, run_program: RunProgram, reports_of: ReportsOf
) -> None:
    """SIGKILL of all ranks while a save is under way; losses equal those of an uninterrupted run to the bit."""
    whole = reports_of(CASES[0])
    killed = run_program("deepspeed_cases.py", 2, deepspeed_url, "is_killed", is_checked=False)
    assert killed.exit_codes == [-signal.SIGKILL] * 2, killed.show()
    resumed = run_program("deepspeed_cases.py", 2, deepspeed_url, "goes_on")
    for rank, report in enumerate(resumed.reports):
        assert report["step"] == 2, killed.show()  # the second save had not been committed
        assert killed.reports[rank]["losses"][:2] + report["losses"] == whole[rank]["losses"]


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
    assert [info.step for info in open_run(url, storage_options=s3_server.storage_options).checkpoints()] == [4, 5]
