"""The training example under torchrun, shortened, on a folder instead of a bucket. The demo is `make demo`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from dcp_remote.common.deadline import Deadline
from dcp_remote.run.deletions import Deletions
from dcp_remote.run.info import catalog_of
from dcp_remote.storage import open_store
from watch import read_events

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "train_fsdp2.py"
TINY = ("--width", "32", "--layers", "2", "--heads", "2", "--steps", "8", "--save-every", "3", "--digest")
# Another number of ranks adds the same numbers in another order, which changes the last digits.
LOSS_TOLERANCE = 1e-4
TIMEOUT_SECONDS = 240.0  # of a job, on a machine that others use as well


@dataclass(frozen=True)
class Run:
    """End of a job, and the notes of its ranks."""

    exit_status: int
    output: str
    events: list[list[dict[str, Any]]]

    def digests(self, of: str) -> dict[int, set[str]]:
        """By step, the digests that the ranks found."""
        found: dict[int, set[str]] = {}
        for event in (event for events in self.events for event in events if event["event"] == "digest"):
            if event["of"] == of:
                found.setdefault(event["step"], set()).add(event["sha256"])
        return found

    def losses(self) -> dict[int, float]:
        """By step, as rank 0 saw them."""
        return {event["step"]: event["loss"] for event in self.events[0] if event["event"] == "step"}


@contextmanager
def job(folder: Path, *arguments: str, ranks: int, checkpoint: str) -> Iterator[subprocess.Popen[str]]:
    """The example under torchrun, in `folder`, without a trace of the user's own cloud; stopped at the end."""
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    environment["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    example = [str(SCRIPT), "--checkpoint", checkpoint, *TINY, "--events", str(folder / "events"), *arguments]
    with subprocess.Popen(
        [*torchrun, *example],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()  # torchrun stops its ranks; does nothing if it has ended


def result(folder: Path, process: subprocess.Popen[str], *, ranks: int) -> Run:
    """Wait for the end of a job."""
    output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    return Run(
        exit_status=process.returncode,
        output=output,
        events=[read_events(folder / "events", rank) for rank in range(ranks)],
    )


def train(folder: Path, *arguments: str, ranks: int, checkpoint: str) -> Run:
    """Run the example to its end."""
    with job(folder, *arguments, ranks=ranks, checkpoint=checkpoint) as process:
        return result(folder, process, ranks=ranks)


def live_steps(checkpoint: str) -> list[int]:
    """Return the steps of a run."""
    catalog = catalog_of(open_store(checkpoint))
    return [entry.step for entry in catalog.entries] if catalog is not None else []


def forget(checkpoint: str, step: int) -> None:
    """Let go of the newest checkpoint, as if the job had been killed while it was saved."""
    Deletions(open_store(checkpoint)).retire([step], deadline=Deadline(10), force=True)


def test_slurm_script_runs_the_example_and_is_queued_again_unless_it_has_finished(tmp_path: Path) -> None:
    """Run it with stand-ins: `srun` keeps its arguments and ends with a status, `scontrol` notes what it is asked."""
    script, noted = SCRIPT.with_name("slurm") / "train.sbatch", tmp_path / "noted"
    for name, text in (
        ("srun", f'echo "$*" >> {noted}; exit "$SRUN_STATUS"'),
        ("scontrol", f'[ "$1" = show ] && echo gpu-07 || echo "$*" >> {noted}'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu-[07-08]", "SLURM_JOB_NUM_NODES": "2"}
    environment = {**os.environ, **job, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CHECKPOINT": "s3://my-bucket/run"}
    for status, restarts, is_queued in ((0, 0, False), (1, 0, True), (1, 18, True), (1, 19, False)):
        noted.write_text("")
        more = {"SRUN_STATUS": str(status), "SLURM_RESTART_COUNT": str(restarts)}
        ended = subprocess.run(["bash", str(script), "--steps", "9"], env={**environment, **more}, check=False)
        assert ended.returncode == status
        started, *asked = noted.read_text().splitlines()
        assert f"--nnodes 2 --nproc-per-node 8 --max-restarts 3 --rdzv-id 7-{restarts}" in started
        assert started.endswith("gpu-07:29500 examples/train_fsdp2.py --checkpoint s3://my-bucket/run --steps 9")
        assert asked == ["requeue 7"] * is_queued


def test_kubernetes_job_agrees_with_itself() -> None:
    """Parse the file: the names by which its parts find each other, and the grace that torchrun needs."""
    account, service, job = yaml.safe_load_all((SCRIPT.with_name("kubernetes") / "job.yaml").read_text())
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert (pod["subdomain"], pod["serviceAccountName"]) == (service["metadata"]["name"], account["metadata"]["name"])
    assert pod["terminationGracePeriodSeconds"] > 30
    assert pod["restartPolicy"] == "Never"
    assert not [volume for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    (command,) = container["args"]
    assert command.startswith("exec python -m torch.distributed.run ")
    assert (
        f"--nnodes {spec['parallelism']} --nproc-per-node {container['resources']['limits']['nvidia.com/gpu']}"
        in command
    )
    assert f"--rdzv-endpoint {name}-0.{pod['subdomain']}:" in command


def test_first_hour(tmp_path: Path) -> None:
    """Run the script of the first hour: each chapter says what it should."""
    script, environment = SCRIPT.with_name("first_hour.py"), dict(os.environ)
    environment["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    ended = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env=environment,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = [line.strip() for line in ended.stdout.splitlines()]
    begun = [line.split("; ") for line in told if " begin at step " in line]
    assert [line[0] for line in begun] == [
        "2 ranks begin at step 0",
        "3 ranks begin at step 10",
        "2 ranks begin at step 20",
    ]
    values = [re.sub(r"\d+\.\d+", "*", line[1]) for line in begun]
    assert values == [
        "best inf of [], average {}, 0 samples seen",
        "best * of [5, 10], average {'loss': *}, 60 samples seen",
        "best * of [5, 10, 15, 20], average {'loss': *}, 100 samples seen",
    ]
    assert "different values" not in ended.stderr
    assert "1 value missing in the checkpoint: model.adapter.weight" in told
    evaluated = [int(line.split()[1].rstrip(":")) for line in told if line.startswith("step ")]
    assert evaluated, told
    assert evaluated == sorted(set(evaluated))
    assert (evaluated[0] > 20, evaluated[-1]) == (True, 40)
    assert told[-1].startswith("Checkpoints: [")


@pytest.mark.torture(smoke=False)
def test_training_resumes_at_another_world_size(tmp_path: Path) -> None:
    """Two ranks train to the end; their last checkpoint is taken away; one rank goes on from the one before it.

    The digest of what it restores is that of what was saved, and its losses are nearly those of the first run.
    """
    checkpoint = (tmp_path / "run").as_uri()
    first = train(tmp_path / "first", ranks=2, checkpoint=checkpoint)
    assert first.exit_status == 0, first.output
    assert live_steps(checkpoint) == [3, 6, 8]
    forget(checkpoint, 8)

    resumed = train(tmp_path / "resumed", "--keep-last", "1", ranks=1, checkpoint=checkpoint)
    assert resumed.exit_status == 0, resumed.output
    assert resumed.digests("loaded") == {6: first.digests("saving")[6]}
    assert len(resumed.digests("loaded")[6]) == 1
    assert sorted(resumed.losses()) == [7, 8]
    for step, loss in resumed.losses().items():
        assert loss == pytest.approx(first.losses()[step], rel=0, abs=LOSS_TOLERANCE)
    assert live_steps(checkpoint) == [8]  # by its retention


@pytest.mark.torture(smoke=False)
def test_a_run_that_draws_random_numbers_resumes_exactly_and_is_preempted(tmp_path: Path) -> None:
    """With dropout, two ranks go on exactly, each with its own random numbers. Then SIGTERM comes.

    torchrun passes it on to its ranks: they stop at one step, and its checkpoint is there.
    """
    checkpoint = (tmp_path / "run").as_uri()
    endless = ("--dropout", "0.2", "--steps", "1000000")
    first = train(tmp_path / "first", *endless, "--stop-after", "8", ranks=2, checkpoint=checkpoint)
    assert first.exit_status == 0, first.output
    forget(checkpoint, 8)

    folder = tmp_path / "resumed"
    with job(folder, *endless, "--save-every", "1000000", ranks=2, checkpoint=checkpoint) as process:
        until = time.monotonic() + TIMEOUT_SECONDS
        while not any(event.get("step", 0) > 8 for event in read_events(folder / "events", 0)):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        resumed = result(folder, process, ranks=2)
    assert {step: loss for step, loss in resumed.losses().items() if step <= 8} == {
        step: loss for step, loss in first.losses().items() if step > 6
    }
    ends = [events[-1] for events in resumed.events]
    assert [(end["event"], end.get("preempted")) for end in ends] == [("finished", True)] * 2, resumed.output
    assert [end["step"] for end in ends] == [live_steps(checkpoint)[-1]] * 2


@pytest.mark.torture(smoke=False)
def test_a_failed_background_save_stops_every_rank(tmp_path: Path) -> None:
    """A file lies where the shards should be: the first save fails in its thread, on both ranks.

    The next save raises it, before it begins, on both ranks; at least the first to end says why (torchrun may stop the
    other before it does), and neither waits for the other.
    """
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "shards").write_text("in the way")
    checkpoint = (tmp_path / "run").as_uri()
    run = train(tmp_path / "job", ranks=2, checkpoint=checkpoint)
    assert run.exit_status != 0
    assert re.search(r"^Rank [01] stops\. \w+Error: .*shards", run.output, re.MULTILINE), run.output
    assert [max(event.get("step", 0) for event in events) for events in run.events] == [6, 6]
    assert not any(event["event"] in {"saved", "finished"} for events in run.events for event in events)
    assert live_steps(checkpoint) == []


@pytest.mark.torture(smoke=False)
def test_a_wrong_url_is_told_before_training(tmp_path: Path) -> None:
    """A scheme that nobody knows: the job ends with the error, and no step is made."""
    run = train(tmp_path / "job", ranks=2, checkpoint="s4://bucket/run")
    assert run.exit_status != 0
    assert re.search(r"^Rank [01] stops\. InvalidArgumentError: ", run.output, re.MULTILINE), run.output
    assert [[event["event"] for event in events] for events in run.events] == [["started"], ["started"]]


def test_examples_record_the_error_of_a_rank() -> None:
    """Every example that torchrun starts: its summary then has the traceback of the rank that failed first."""
    started = [
        path
        for path in (Path(__file__).parents[1] / "examples").glob("*.py")
        if "torchrun --nproc-per-node" in path.read_text()
    ]
    assert len(started) == 5
    for path in started:
        assert re.search(r"^@record\b.*\ndef main\(", path.read_text(), re.MULTILINE), path.name
