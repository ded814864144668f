"""Kill, suspend and preempt a training run, resume it each time, and check that its checkpoints stay whole.

    make demo            (or: python examples/demo.py)

Everything is real but the cloud: moto's S3 server in its own process, `train_fsdp2.py` under torchrun, signals. Every
claim is checked; the exit status is 0 if all hold. A relay of limited bandwidth joins the jobs and the server, because
a save that takes no time could hardly be interrupted.

Writes `demo-output/`: the picture of the loss, the report, the events of every rank and the logs of every node.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from dcp_remote import load
from dcp_remote.errors import CheckpointNotFoundError
from dcp_remote.format.catalog import CATALOG_KEY, Catalog
from dcp_remote.run.info import catalog_of
from dcp_remote.run.lookup import read_entry
from dcp_remote.storage import ObjectStore, open_store
from dcp_remote.testing.servers import moto_server
from demo_job import Job, JobFailedError, SlowLink
from demo_report import Phase, Report
from watch import logical_digest

BUCKET, RUN_URL = "demo", "s3://demo/run"
STEPS, SAVE_EVERY, KEEP_LAST = 80, 10, 2
FIRST_STEP_TO_KILL = 3 * SAVE_EVERY  # two checkpoints exist by then
KILLS_MAX = 3  # a kill can come too late, after the commit: then the next save is tried
STEPS_TO_SUSPEND = 4  # steps after a save, when no save is under way
# The state is 40 MB: a save takes about two seconds, as it would from a larger model over a real network.
LINK_BYTES_PER_SECOND = 20_000_000
POLL_SECONDS = 0.02
QUIET_SECONDS = 1.0  # time without a change after which the bucket holds all that the dead job sent
BETWEEN_SIGNALS_SECONDS = 1.5  # a cluster does not reach all nodes at once
PATIENCE_SECONDS = 300.0  # time limit of each job
LOCAL_BYTES_MAX = 1_000_000  # limit of what torchrun leaves in a node's folder: far less than any shard
COMMAND_LINE = "import sys; from dcp_remote.cli import main; sys.exit(main())"  # as `dcp-remote` does


@dataclass(frozen=True, slots=True)
class Cloud:
    """Access to the store: through the slow link for the job, and direct for the demo."""

    environment: Mapping[str, str]
    direct_environment: Mapping[str, str]
    storage_options: Mapping[str, Any]
    run: ObjectStore

    def keys(self) -> set[str]:
        """Return the keys of all objects of the run."""
        return {info.key for info in self.run.list()}

    def shards(self, step: int) -> set[str]:
        """Return the keys of the shards that saves of a step have put so far, by their names."""
        return {key for key in self.keys() if key.startswith("shards/") and f"-step-{step:012d}-" in key}

    def catalog(self) -> Catalog:
        """Return the catalog of the run.

        Raises:
            JobFailedError: The run has none.
        """
        catalog = catalog_of(self.run)
        if catalog is None:
            raise JobFailedError("The run has no catalog.")
        return catalog

    def has(self, step: int) -> bool:
        """Return whether there is a checkpoint of this step."""
        catalog = catalog_of(self.run)
        return catalog is not None and catalog.entry_at(step) is not None

    def named(self) -> set[str]:
        """Return the keys of the catalog, of its manifests, and of the shards that they name."""
        entries = self.catalog().entries
        shards = (key for entry in entries for key in read_entry(self.run, entry).shards.keys)
        return {CATALOG_KEY, *(entry.manifest for entry in entries), *shards}


class Demo:
    """Demo, one method per chapter; `report` collects the checks."""

    def __init__(self, cloud: Cloud, work: Path, output: Path, stack: ExitStack) -> None:
        """Store the settings. Jobs that still run are stopped when `stack` closes."""
        self._cloud, self._work, self._output, self._stack = cloud, work, output, stack
        self.report = Report(output)

    def job(self, name: str, *, nodes: Sequence[int], save: bool = True, stop_after: int | None = None) -> Job:
        """Start a training with `nodes[i]` ranks on node i."""
        arguments = ["--checkpoint", RUN_URL, "--save-every", str(SAVE_EVERY if save else 0), "--digest"]
        arguments += ["--keep-last", str(KEEP_LAST), "--steps", str(STEPS), "--stop-after", str(stop_after or STEPS)]
        job = Job(name, nodes=nodes, work=self._work / name, output=self._output, environment=self._cloud.environment)
        self._stack.callback(job.stop)
        job.start([*arguments, "--events", str(job.events_folder)])
        return job

    def command(self, *arguments: str) -> str:
        """Run `dcp-remote`, print its output, and return the output.

        Raises:
            JobFailedError: The command failed.
        """
        show(f"$ dcp-remote {' '.join(arguments)}")
        done = subprocess.run(
            [sys.executable, "-c", COMMAND_LINE, *arguments],
            env=dict(self._cloud.direct_environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        for line in done.stdout.splitlines():
            show(line)
        if done.returncode != 0:
            raise JobFailedError(f"dcp-remote {arguments[0]} ended with exit status {done.returncode}.")
        return done.stdout

    def wait_until(self, job: Job, happened: Callable[[], bool], what: str) -> None:
        """Poll a running job until `happened` returns true.

        Raises:
            JobFailedError: The job has ended, or the wait took too long.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not happened():
            job.show_progress()
            job.raise_if_ended()
            if time.monotonic() > deadline:
                raise JobFailedError(f"{job.name}: {what} did not happen within {PATIENCE_SECONDS:.0f} s.")
            time.sleep(POLL_SECONDS)
        job.show_progress()

    # ---- the chapters

    def uninterrupted(self) -> None:
        """Train the reference: 4 ranks on one node, from start to end, without checkpoints."""
        chapter("The reference: 4 ranks, uninterrupted, without checkpoints")
        job = self.job("uninterrupted", nodes=[4], save=False)
        job.wait(PATIENCE_SECONDS)
        self.report.add(Phase.of(job), resumed_from=None)
        self.report.check("a job that never saves leaves nothing in the bucket", holds=not self._cloud.keys())

    def kill_in_mid_save(self) -> int:
        """Train on two nodes, kill everything while a save is half done, and return the step to resume from."""
        step, newest = FIRST_STEP_TO_KILL, None
        for attempt in range(KILLS_MAX):
            chapter(f"4 ranks on two nodes that share nothing, killed in the middle of the save of step {step}")
            job = self.job(f"killed-{attempt + 1}", nodes=[2, 2])
            self._wait_for_half_a_save(job, step)
            job.kill()
            self._wait_until_quiet()
            if not self._cloud.has(step):
                phase = Phase.of(job, lost={step: "killed"}, end=f"SIGKILL in the\nsave of step {step}")
                self.report.add(phase, resumed_from=newest)
                self._look_at_half_a_save(job, step)
                return step - SAVE_EVERY
            self.report.add(Phase.of(job), resumed_from=newest)
            say("The kill came too late: the save was committed. The next save is tried.")
            step, newest = step + SAVE_EVERY, step
        raise JobFailedError(f"None of {KILLS_MAX} kills came in the middle of a save. Pass a lower --link-mb.")

    def _wait_for_half_a_save(self, job: Job, step: int) -> None:
        def saving() -> bool:
            return any(event["event"] == "digest" and event["step"] == step for event in job.events())

        self.wait_until(job, saving, f"the save of step {step}")
        self.wait_until(job, lambda: bool(self._cloud.shards(step)), f"the first shard of step {step}")

    def _wait_until_quiet(self) -> None:
        """Wait until the bucket stops changing: bytes of the dead job may still be in the link."""
        before: set[str] | None = None
        while (now := self._cloud.keys()) != before:
            before = now
            time.sleep(QUIET_SECONDS)

    def _look_at_half_a_save(self, job: Job, step: int) -> None:
        half = self._cloud.shards(step)
        say(f"SIGKILL to every process of both nodes; {len(half)} shards of step {step} are in the bucket.")
        self.report.check("no process of the job outlived the kill", holds=not job.alive())
        self.command("ls", RUN_URL)
        orphans = self.command("gc", RUN_URL, "--grace-hours", "0", "--list")
        found = {key for line in orphans.splitlines() for key in line.split()[:1]}
        claim = f"the {len(half)} shards of the save of step {step} are orphans, which gc finds"
        self.report.check(claim, holds=bool(half) and half <= found)
        refusal = None
        try:
            load(RUN_URL, step=step, storage_options=self._cloud.storage_options)
        except CheckpointNotFoundError as error:
            refusal = f"{type(error).__name__}: {error}"
            say(f"Reading step {step}: {refusal}")
        newest = self._cloud.catalog().latest()
        claim = f"the half-written save of step {step} is no checkpoint; the newest is that of step {step - SAVE_EVERY}"
        holds = refusal is not None and newest is not None and newest.step == step - SAVE_EVERY
        self.report.check(claim, holds=holds)
        left_bytes = sum(file.stat().st_size for file in job.work.rglob("*") if file.is_file())
        claim = f"checkpoints never touched the disks of the nodes, which hold {left_bytes:,} bytes"
        self.report.check(claim, holds=left_bytes < LOCAL_BYTES_MAX)

    def resume_and_hang(self, newest: int) -> tuple[Job, int]:
        """Resume at the same size, suspend every process once a save is committed, and return the job and that step."""
        chapter(f"4 ranks resume from step {newest}, save once, and hang")
        saved = newest + SAVE_EVERY
        job = self.job("resumed-4-ranks", nodes=[4], stop_after=saved + SAVE_EVERY)

        def saved_and_went_on() -> bool:
            return job.step() >= saved + STEPS_TO_SUSPEND and self._cloud.has(saved)

        self.wait_until(job, saved_and_went_on, f"the save of step {saved}")
        job.suspend()
        say(f"SIGSTOP to every process at step {job.step()}: for the cluster, this job is lost.")
        return job, saved

    def replace(self, hung: Job, *, started_from: int, newest: int) -> Job:
        """Start another job on other nodes, wake the suspended job, check that it is fenced; return the other job."""
        chapter(f"2 ranks on two other nodes resume from step {newest}; then the job that hung continues")
        job = self.job("resumed-2-ranks", nodes=[1, 1])
        contested = newest + SAVE_EVERY
        self.wait_until(job, lambda: self._cloud.has(contested), f"the save of step {contested}")
        before = self._cloud.catalog()
        say(f"SIGCONT to the job that hung. It trains to step {contested}, and saves it, too.")
        hung.wake()
        failed = any(hung.ended(PATIENCE_SECONDS))
        phase = Phase.of(hung, lost={contested: "fenced"}, end=f"hung, woke up,\nfenced at step {contested}")
        self.report.add(phase, resumed_from=started_from)
        log = hung.log()
        claim = "the job that woke up was told that a newer job owns the run, and ended"
        self.report.check(claim, holds=failed and any("FencedError" in line for line in log))
        after, known = self._cloud.catalog(), {entry.save_id for entry in before.entries}
        newer = all(entry.token == before.token for entry in after.entries if entry.save_id not in known)
        told = any(line.startswith(f"saved step {contested}:") for line in log)
        claim = f"it committed nothing: every checkpoint from step {contested} on is the newer job's"
        self.report.check(claim, holds=newer and after.token == before.token and not told)
        return job

    def preempt(self, job: Job, *, started_from: int) -> int:
        """Send SIGTERM to the nodes one after the other, and return the step at which the ranks stopped."""
        chapter("The job is preempted: SIGTERM reaches one node, and the other a little later")
        job.raise_if_ended()
        job.terminate(1)
        time.sleep(BETWEEN_SIGNALS_SECONDS)
        job.terminate(0)
        job.ended(PATIENCE_SECONDS)
        ends = [job.events(rank)[-1] for rank in range(job.ranks)]
        stops = {event["step"] for event in ends if event["event"] == "finished" and event["preempted"]}
        newest = self._cloud.catalog().latest()
        step = newest.step if newest is not None else 0
        self.report.add(Phase.of(job, end=f"SIGTERM: saved\nstep {step}, stopped"), resumed_from=started_from)
        self.report.check(
            f"both ranks stopped at one step, {step}, whose checkpoint is the newest of the run",
            holds=len(ends) == job.ranks and stops == {step},
        )
        return step

    def resume(self, newest: int) -> None:
        """Resume with 3 ranks, and train to the end."""
        chapter(f"3 ranks resume from step {newest}")
        job = self.job("resumed-3-ranks", nodes=[3])
        job.wait(PATIENCE_SECONDS)
        self.report.add(Phase.of(job), resumed_from=newest)

    def tidy_up(self, pinned: int) -> None:
        """Check that the checkpoints that retention should keep are whole, and that gc leaves nothing else."""
        chapter(f"What is left: the last {KEEP_LAST} checkpoints, and the one that was pinned")
        self.command("ls", RUN_URL)
        saved = self.report.saved()
        expected = {pinned, *sorted(saved)[-KEEP_LAST:]}
        live = {entry.step for entry in self._cloud.catalog().entries}
        claim = f"of {len(saved)} checkpoints, retention kept those of steps {', '.join(map(str, sorted(expected)))}"
        self.report.check(claim, holds=live == expected and len(saved) > len(expected))
        for step in sorted(live):
            sha256 = logical_digest(load(RUN_URL, step=step, storage_options=self._cloud.storage_options))["sha256"]
            claim = f"one process alone loads step {step}, with the SHA-256 that its ranks saved"
            self.report.check(claim, holds=step in saved and saved[step].sha256 == sha256)
        before = self._cloud.keys() - self._cloud.named()
        self.command("gc", RUN_URL, "--grace-hours", "0", "--yes")
        after = self._cloud.keys()
        claim = f"gc removed {len(before)} orphans, and left exactly the {len(after)} objects that the catalog leads to"
        self.report.check(claim, holds=bool(before) and after == self._cloud.named())

    def tell(self) -> None:
        """Run all chapters, in order."""
        self.uninterrupted()
        first = self.kill_in_mid_save()
        self.command("pin", RUN_URL, str(first))
        hung, second = self.resume_and_hang(first)
        replacement = self.replace(hung, started_from=first, newest=second)
        third = self.preempt(replacement, started_from=second)
        self.resume(third)
        self.tidy_up(pinned=first)


def job_environment(endpoint_url: str) -> dict[str, str]:
    """Return this process's environment without settings of the user's own cloud."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return environment | {
        "AWS_ENDPOINT_URL": endpoint_url,
        "AWS_ACCESS_KEY_ID": "demo",  # moto takes any
        "AWS_SECRET_ACCESS_KEY": "demo",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def chapter(title: str) -> None:
    """Print the title of a chapter."""
    print(f"\n== {title}", flush=True)


def say(line: str) -> None:
    """Print one line of the story."""
    print(f"   {line}", flush=True)


def show(line: str) -> None:
    """Print one line of a listing."""
    print(f"      {line}", flush=True)


def main(arguments: list[str]) -> int:
    """Run the demo, print the report, and return the exit status."""
    parser = argparse.ArgumentParser(description="Kill, suspend and preempt a training, and resume it each time.")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), metavar="FOLDER")
    parser.add_argument("--link-mb", type=float, default=LINK_BYTES_PER_SECOND / 1e6, metavar="MB/S", help="bandwidth")
    options = parser.parse_args(arguments)
    # A signal runs the clean-up, so that no process stays behind.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit_on_signal)
    # Requests to loopback must not go through a proxy.
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
    started = time.monotonic()
    shutil.rmtree(options.output, ignore_errors=True)
    options.output.mkdir(parents=True)
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dcp-remote-demo-")))
        server = stack.enter_context(moto_server())
        server.create_bucket(BUCKET)
        link = stack.enter_context(SlowLink(server.endpoint_url, bytes_per_second=options.link_mb * 1e6))
        say(f"An S3 server in its own process, behind a link of {options.link_mb:g} MB/s; bucket {BUCKET!r} created.")
        cloud = Cloud(
            environment=job_environment(link.endpoint_url),
            direct_environment=job_environment(server.endpoint_url),
            storage_options=server.storage_options,
            run=open_store(RUN_URL, storage_options=server.storage_options),
        )
        demo = Demo(cloud, work, options.output.resolve(), stack)
        try:
            demo.tell()
        except JobFailedError as error:
            print(f"\nFAIL  {error}", file=sys.stderr)
            return 1
    return demo.report.conclude(seconds=time.monotonic() - started)


def _exit_on_signal(signal_number: int, _: FrameType | None) -> None:
    sys.exit(128 + signal_number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
