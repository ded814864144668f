"""Kill a training job in the middle of a save, and go on from the newest checkpoint on another number of ranks.

    make demo            (or: python examples/demo.py)

Everything is real but the cloud: moto's S3 server in its own process, `train_fsdp2.py` under torchrun, SIGKILL. What
is claimed is checked at the end, line by line; the exit status is 0 if all of it holds. The job and the server are
joined by a relay of limited bandwidth, since saves that take no time would be hard to interrupt.

Writes `demo-output/`: the picture of the loss, the report, the events of every rank and the logs of every node.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from dcp_remote import load
from dcp_remote.errors import CheckpointNotFoundError
from dcp_remote.storage import ObjectStore, open_store
from dcp_remote.testing.servers import moto_server
from demo_job import Job, JobFailedError, SlowLink
from demo_report import Phase, Report

BUCKET, RUN_URL = "demo", "s3://demo/run"
STEPS, SAVE_EVERY = 96, 12
STEPS_TO_COMPARE = 24  # how long the resumed run at the same size is compared with the uninterrupted one
FIRST_STEP_TO_KILL = 3 * SAVE_EVERY  # so that there is something to go on from
KILLS_MAX = 3  # a kill can come too late, when the save has just been committed: then the next save is tried
# The state is 40 MB: a save takes about two seconds, as it would from a larger model over a real network.
LINK_BYTES_PER_SECOND = 20_000_000
POLL_SECONDS = 0.02
QUIET_SECONDS = 1.0  # how long a bucket must not change before it is taken as what the dead job left
PATIENCE_SECONDS = 300.0  # for any one job
LOCAL_BYTES_MAX = 1_000_000  # what torchrun may leave in a node's folder: far less than any shard


@dataclass(frozen=True, slots=True)
class Cloud:
    """The store as the job sees it (through the slow link) and as the demo does (directly)."""

    environment: Mapping[str, str]
    storage_options: Mapping[str, Any]
    run: ObjectStore

    def shards_and_manifest(self, step: int) -> tuple[int, bool]:
        """How many shards of a step lie in the bucket, and whether its manifest does."""
        keys = [info.key for info in self.run.list(f"step-{step:06d}/")]
        return sum("/shards/" in key for key in keys), f"step-{step:06d}/manifest.json" in keys


class Demo:
    """The story, one method per chapter; `report` collects what is shown and checked at the end."""

    def __init__(self, cloud: Cloud, work: Path, output: Path, stack: ExitStack) -> None:
        """See the class; jobs that still run are stopped when `stack` closes."""
        self._cloud, self._work, self._output, self._stack = cloud, work, output, stack
        self.report = Report(output)

    def job(self, name: str, *, nodes: Sequence[int], save: bool = True, stop_after: int = STEPS) -> Job:
        """Start a training, with as many ranks on each node as `nodes` says."""
        arguments = ["--checkpoint", RUN_URL, "--save-every", str(SAVE_EVERY if save else 0), "--digest"]
        arguments += ["--steps", str(STEPS), "--stop-after", str(stop_after)]
        job = Job(name, nodes=nodes, work=self._work / name, output=self._output, environment=self._cloud.environment)
        self._stack.callback(job.stop)
        job.start([*arguments, "--events", str(job.events_folder)])
        return job

    def uninterrupted(self) -> None:
        """The curve that the others are held against: 4 ranks on one node, from start to end, never saved."""
        chapter("The reference: 4 ranks, uninterrupted, without checkpoints")
        job = self.job("uninterrupted", nodes=[4], save=False)
        job.wait(PATIENCE_SECONDS)
        self.report.add(Phase.of(job))

    def kill_in_mid_save(self) -> int:
        """Train on two nodes, kill everything while a save is half done, and return the step to resume from."""
        step = FIRST_STEP_TO_KILL
        for attempt in range(KILLS_MAX):
            chapter(f"4 ranks on two nodes that share nothing, killed in the middle of the save of step {step}")
            job = self.job(f"killed-{attempt + 1}", nodes=[2, 2])
            in_mid_save = self._wait_for_half_a_save(job, step)
            job.kill()
            self._wait_until_quiet()
            shards, committed = self._cloud.shards_and_manifest(step)
            killed_at = step if in_mid_save and not committed else None
            self.report.add(Phase.of(job, killed_at=killed_at))
            if killed_at is not None:
                say(f"SIGKILL to every process of both nodes; {shards} shards of step {step} are in the bucket")
                self._show_half_written(step)
                self.report.check("no process of the job outlived the kill", holds=not job.alive())
                self._check_local_folders(job)
                return step - SAVE_EVERY
            say("The kill came too late: the save was committed. Trying at the next one.")
            step += SAVE_EVERY
        raise JobFailedError(f"None of {KILLS_MAX} kills came in the middle of a save; try a lower --link-mb.")

    def _wait_for_half_a_save(self, job: Job, step: int) -> bool:
        """Return as soon as there are shards of this step; False if there is a manifest, too."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        saving = False
        while time.monotonic() < deadline:
            job.show_progress()
            job.raise_if_ended()
            saving = saving or any(event["event"] == "saving" and event["step"] == step for event in job.events())
            if saving:
                shards, committed = self._cloud.shards_and_manifest(step)
                if committed or shards:
                    return not committed
            time.sleep(POLL_SECONDS)
        raise JobFailedError(f"The save of step {step} did not begin within {PATIENCE_SECONDS:.0f} s.")

    def _wait_until_quiet(self) -> None:
        """What the dead job had sent may still be on its way through the link."""
        before: list[str] | None = None
        while (now := [info.key for info in self._cloud.run.list()]) != before:
            before = now
            time.sleep(QUIET_SECONDS)

    def _show_half_written(self, step: int) -> None:
        say("What lies in the bucket:")
        for earlier in range(SAVE_EVERY, step, SAVE_EVERY):
            objects = list(self._cloud.run.list(f"step-{earlier:06d}/"))
            size_bytes = sum(info.size_bytes for info in objects)
            show(f"{size_bytes:>12,}  step-{earlier:06d}/: {len(objects) - 1} shards and manifest.json")
        for info in self._cloud.run.list(f"step-{step:06d}/"):
            show(f"{info.size_bytes:>12,}  {info.key}")
        refusal = None
        try:
            load(f"{RUN_URL}/step-{step:06d}", storage_options=self._cloud.storage_options)
        except CheckpointNotFoundError as error:
            refusal = f"{type(error).__name__}: {error}"
            say(f"Reading step {step}: {refusal}")
        self.report.check(f"the half-written save of step {step} is not a checkpoint", holds=refusal is not None)

    def _check_local_folders(self, job: Job) -> None:
        left_bytes = sum(file.stat().st_size for file in job.work.rglob("*") if file.is_file())
        claim = f"checkpoints never touched the disks of the nodes, which hold {left_bytes:,} bytes"
        self.report.check(claim, holds=left_bytes < LOCAL_BYTES_MAX)

    def resume(self, *, ranks: int, newest: int, save: bool, stop_after: int) -> None:
        """Go on from `newest` with `ranks` ranks."""
        chapter(f"{ranks} ranks resume from step {newest}" + ("" if save else ", for comparison, without saving"))
        job = self.job(f"resumed-{ranks}-ranks", nodes=[ranks], save=save, stop_after=stop_after)
        job.wait(PATIENCE_SECONDS)
        phase = Phase.of(job)
        self.report.add(phase)
        claim = f"{ranks} ranks resumed from step {newest}, the newest checkpoint"
        self.report.check(claim, holds=phase.loaded_step == newest)

    def tell(self) -> None:
        """All chapters, in order."""
        self.uninterrupted()
        newest = self.kill_in_mid_save()
        same_size_end = min(STEPS, newest + STEPS_TO_COMPARE)
        middle = min(STEPS - SAVE_EVERY, newest + 3 * SAVE_EVERY)
        self.resume(ranks=4, newest=newest, save=False, stop_after=same_size_end)
        self.resume(ranks=2, newest=newest, save=True, stop_after=middle)
        self.resume(ranks=3, newest=middle, save=True, stop_after=STEPS)


def job_environment(endpoint_url: str) -> dict[str, str]:
    """This process's environment, with nothing of the user's own cloud in it."""
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
    """Announce what comes."""
    print(f"\n== {title}", flush=True)


def say(line: str) -> None:
    """Tell one thing."""
    print(f"   {line}", flush=True)


def show(line: str) -> None:
    """One line of a listing."""
    print(f"      {line}", flush=True)


def main(arguments: list[str]) -> int:
    """Tell the story, draw the conclusions, and return the exit status."""
    parser = argparse.ArgumentParser(description="Kill a training in the middle of a save, and resume it.")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), metavar="FOLDER")
    parser.add_argument("--link-mb", type=float, default=LINK_BYTES_PER_SECOND / 1e6, metavar="MB/S", help="bandwidth")
    options = parser.parse_args(arguments)
    # Whoever stops the demo runs its clean-up: nothing that was started stays behind.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit_on_signal)
    # A proxy for the internet must not come between us and loopback.
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
