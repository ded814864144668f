"""A training under many faults: its jobs, one after another, and the checks after each fault.

Every fault begins and ends with a job whose ranks wait at a gate with no operation in progress. After each fault the
server's objects are read directly, not through the relay, to check that:

- every live checkpoint loads, bit for bit as the job that saved it had the state then;
- every save reported as committed is in the catalog, unless retention or a rollback removed it;
- a job restores the newest checkpoint, bit for bit, random states included;

and at the end that the training, through all jobs, has the very bits of one that was never interrupted, and that gc
without a grace period leaves exactly what the catalog names.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from dcp_remote import load
from dcp_remote.errors import CheckpointNotFoundError
from dcp_remote.format.catalog import CATALOG_KEY, Catalog, Entry
from dcp_remote.run.catalog_store import read_catalog
from dcp_remote.run.gc import find_orphans, remove_orphans
from dcp_remote.run.lookup import read_entry
from dcp_remote.storage import ObjectStore, open_store
from dcp_remote.testing.servers import S3Server, moto_server
from tests.campaign.job import Event, Job
from tests.campaign.relay import Asked, Relay
from tests.campaign.trainee import KEEP_EVERY, KEEP_LAST, whole_digest
from tests.support.figures import figures

BUCKET, PREFIX = "campaign", "runs/one"
URL = f"s3://{BUCKET}/{PREFIX}"

SAVE_EVERY = 3

# Few, so that retention removes checkpoints from the first fault on.
_STEPS_BEFORE = (KEEP_LAST + 1) * SAVE_EVERY


class Campaign:
    """Campaign of one training; a context manager, which ends all processes on exit."""

    relay: Relay  # the link between the ranks and the server

    def __init__(self, folder: Path, seed: int, world_size: int) -> None:
        self.random = random.Random(seed)  # moments and victims are drawn from it
        self.suffered: list[str] = []  # names of the faults so far
        self.jobs: list[Job] = []
        self._folder, self._world_size = folder, world_size
        self._stack = ExitStack()
        self._server_stack = ExitStack()
        self._checked_catalogs = 0

    def __enter__(self) -> Self:
        server = self._server_stack.enter_context(moto_server())
        server.create_bucket(BUCKET)
        self.relay = self._stack.enter_context(Relay(server, BUCKET, PREFIX))
        return self

    def __exit__(self, *_: object) -> None:
        for job in self.jobs:
            job.end()
        self._stack.close()
        self._server_stack.close()

    # ---- the server, without the relay

    @property
    def server(self) -> S3Server:
        return self.relay.server

    def store(self) -> ObjectStore:
        """Return the store of the run, without the relay."""
        return open_store(URL, self.server.storage_options)

    def replace_server(self) -> None:
        """Start another server with the same objects, and end the present one; the relay must be closed."""
        stack = ExitStack()
        server = stack.enter_context(moto_server())
        server.create_bucket(BUCKET)
        old, new = self.store(), open_store(URL, server.storage_options)
        for info in old.list():
            # Equal bytes have equal ETags, so that its clients take it for the same server, restarted.
            assert new.put(info.key, [old.get(info.key, limit_bytes=info.size_bytes).data]).etag == info.version.etag
        self._server_stack.close()
        self._server_stack, self.relay.server = stack, server

    def catalog(self) -> Catalog:
        catalog = read_catalog(self.store())
        assert catalog is not None, "there is a run"
        return catalog

    # ---- jobs

    @property
    def job(self) -> Job:
        return self.jobs[-1]

    def launch(
        self,
        *,
        restore_step: int | None = None,
        world_size: int | None = None,
        gate: int | None = None,
        environment: dict[str, str] | None = None,
    ) -> Job:
        """Start a job, which becomes the one that trains; return at once."""
        arguments = ["--save-every", str(SAVE_EVERY), "--url", URL]
        if restore_step is not None:
            arguments += ["--restore-step", str(restore_step)]
        expected = self.expected(restore_step)
        options = self.server.storage_options
        cloud = {
            "AWS_ENDPOINT_URL": self.relay.endpoint_url,
            "AWS_ACCESS_KEY_ID": options["aws_access_key_id"],
            "AWS_SECRET_ACCESS_KEY": options["aws_secret_access_key"],
            "AWS_DEFAULT_REGION": options["region_name"],
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        number = len(self.jobs)
        job = Job(
            number,
            self._folder / f"job-{number:02d}",
            environment=cloud | (environment or {}),
            arguments=arguments,
            world_size=self._world_size if world_size is None else world_size,
            gate=(expected.step if expected is not None else 0) if gate is None else gate,
        )
        self.jobs.append(job)
        return job

    def start(self, **options: Any) -> Job:
        """Start a job, wait until it has restored, and check that this is the newest checkpoint, whole."""
        expected = self.expected(options.get("restore_step"))
        job = self.launch(**options)
        job.wait_idle()
        self.check_restored(job, expected)
        return job

    def restart(self, **options: Any) -> Job:
        """End the job that trains, if it has not ended, and start the next one, as a cluster does."""
        self.job.wait_ended()
        return self.start(**options)

    def expected(self, restore_step: int | None = None) -> Entry | None:
        """Return the entry that a job started now will restore; None if there is no run yet."""
        catalog = read_catalog(self.store())
        if catalog is None:
            return None
        return catalog.latest() if restore_step is None else catalog.entry_at(restore_step)

    def advance(self, steps: int = SAVE_EVERY) -> int:
        """Let the job train so many more steps; return the first of them at which it saves."""
        gate = self.job.gate
        self.job.order(gate=gate + steps)
        return gate + SAVE_EVERY - gate % SAVE_EVERY

    def next_save(self) -> int:
        """Return one of the next steps at which the job saves."""
        gate = self.job.gate
        return gate + SAVE_EVERY - gate % SAVE_EVERY + SAVE_EVERY * self.random.randrange(2)

    def victim(self) -> int:
        """Return a rank that is not the coordinator."""
        return self.random.randrange(1, self.job.world_size)

    def asks(self, what: str, *, step: int | None = None, rank: int | None = None) -> Callable[[Asked], bool]:
        """Return a condition on requests of this kind."""

        def wanted(asked: Asked) -> bool:
            return asked.what == what and step in (None, asked.step) and rank in (None, asked.rank)

        return wanted

    # ---- the course of the campaign

    def begin(self) -> None:
        """Let the first job make its first checkpoints."""
        self.start()
        self.advance(_STEPS_BEFORE)
        self.job.wait_idle()
        self.check()

    def suffer(self, name: str, fault: Callable[[Campaign], None]) -> None:
        """Inject one fault, and check the run after it."""
        try:
            fault(self)
            self.relay.clear()
            self.job.order(raises=None, refuses=None, sleeps=None)
            # A save without a fault shows that the job goes on.
            step = self.advance()
            self.job.wait_idle()
            assert self.told(self.job, step), f"step {step} was not committed{self.job.story()}"
            self.check()
        except BaseException as error:
            error.add_note(f"In {name!r}, the fault number {len(self.suffered)}, after {self.suffered[-5:]}.")
            raise
        self.suffered.append(name)
        figures["faults in one training"] += 1

    def finish(self) -> None:
        """Train to the last step, and compare with a training that was never interrupted."""
        last = self.job.gate + SAVE_EVERY
        self.job.order(gate=last, last=last)
        ended = [self.job.wait_told(rank, "finished") for rank in self.job.ranks]
        self.job.wait_ended()
        assert self.job.torchrun.returncode == 0, self.job.story()
        self.check()
        reference = self._uninterrupted(last)
        for rank, event in enumerate(ended):
            assert (event["whole"], event["own"]) == reference[rank, last], f"rank {rank} has come to another end"
        for job, rank, event in self._saved():
            assert (event["whole"], event["own"]) == reference[rank, event["step"]], f"{job.number} {rank} {event}"
        self.check_that_gc_leaves_what_is_named()

    def _uninterrupted(self, last: int) -> dict[tuple[int, int], tuple[str, str]]:
        """Train without interruption; return digests by rank and step."""
        number = len(self.jobs)
        arguments = ["--save-every", "1"]
        folder = self._folder / "uninterrupted"
        job = Job(
            number, folder, environment={}, arguments=arguments, world_size=self._world_size, gate=last, last=last
        )
        try:
            for rank in job.ranks:
                job.wait_told(rank, "finished")
            job.wait_ended()
            return {
                (rank, event["step"]): (event["whole"], event["own"])
                for rank in job.ranks
                for event in [*job.events(rank, "saving"), job.last(rank, "finished")]
            }
        finally:
            job.end()

    # ---- checks

    def check(self) -> None:
        """Check that live checkpoints load as saved, and that no committed checkpoint is gone that should be kept."""
        catalog = self.catalog()
        for entry in catalog.entries:
            try:
                self._check_that_it_is_what_was_saved(entry)
            except CheckpointNotFoundError:
                # Retention goes on after a save has returned; the history says whether it was right.
                assert all(one.save_id != entry.save_id for one in self.catalog().entries), f"{entry} cannot be read"
        self._check_history()
        live = {(entry.step, entry.save_id) for entry in catalog.entries}
        ever = live | {(entry.step, entry.save_id) for one in self.relay.catalogs for entry in one.entries}
        for job in self.jobs:
            for rank in job.ranks:
                for event in job.events(rank, "committed"):
                    assert (event["step"], event["save_id"]) in ever, f"never committed: {event}{job.story()}"

    def check_restored(self, job: Job, expected: Entry | None) -> None:
        """Check that every rank restored the checkpoint bit for bit, with that rank's own values."""
        for rank in job.ranks:
            if expected is None:
                assert job.events(rank, "fresh"), job.story()
                continue
            event = job.last(rank, "restored")
            assert (event["step"], event["save_id"]) == (expected.step, expected.save_id), job.story()
            assert len(event["jobs"]) == 1, f"a mixture of what several jobs saved: {event}"
            saver = self.jobs[event["jobs"][0]]
            saved = self._saving(saver, min(rank, saver.world_size - 1), expected.step)
            assert event["whole"] == saved["whole"], f"rank {rank} has restored something else: {event} {saved}"
            assert event["own_rank"] == rank, job.story()
            if rank < saver.world_size:
                assert event["own"] == saved["own"], f"rank {rank} draws other random numbers"

    def check_that_gc_leaves_what_is_named(self) -> None:
        """Check that gc without a grace period leaves exactly what the catalog names."""
        store, catalog = self.store(), self.catalog()
        remove_orphans(store, grace_seconds=0)
        named = {CATALOG_KEY}
        for entry in catalog.entries:
            named |= {entry.manifest, *read_entry(store, entry).shards.keys}
        assert {info.key for info in store.list()} == named
        assert find_orphans(store, grace_seconds=0).old == ()
        self.check()

    def told(self, job: Job, step: int, rank: int = 0) -> bool:
        """Return whether a rank reported that this step was committed."""
        return any(event["step"] == step for event in job.events(rank, "committed"))

    def errors(self, job: Job, rank: int) -> list[Event]:
        """Return the events of a rank's failure; the first is the cause."""
        return [event for event in job.events(rank) if event["event"] in ("failed", "save failed")]

    def save_error(self, job: Job, rank: int) -> Event:
        """Return the error of the save in progress; assert that it failed."""
        errors = [event for event in self.errors(job, rank) if event["error"] != "RuntimeError"]
        assert errors, f"the save did not fail on rank {rank}{job.story()}"
        return errors[0]

    def _check_that_it_is_what_was_saved(self, entry: Entry) -> None:
        state = load(URL, step=entry.step, storage_options=self.server.storage_options)
        jobs = {state["job"], *state["mark"].tolist()} | {own["own"]["job"] for own in state["per_rank"].values()}
        assert len(jobs) == 1, f"a mixture of what jobs {jobs} saved at step {entry.step}"
        saved = self._saving(self.jobs[jobs.pop()], 0, entry.step)
        assert whole_digest(state) == saved["whole"], f"not what was saved: {entry} {saved}"

    def _check_history(self) -> None:
        catalogs = self.relay.catalogs
        for before, after in pairwise(catalogs[max(0, self._checked_catalogs - 1) :]):
            live = {entry.save_id for entry in after.entries}
            for entry in before.entries:
                if entry.save_id not in live:
                    assert _may_go(entry, before, after), f"{entry} went from {before} to {after}"
        self._checked_catalogs = len(catalogs)

    def _saving(self, job: Job, rank: int, step: int) -> Event:
        """Return the event of a rank that began to save a step; a job saves a step once."""
        (event,) = [one for one in job.events(rank, "saving") if one["step"] == step]
        return event

    def _saved(self) -> Sequence[tuple[Job, int, Event]]:
        return [
            (job, rank, event)
            for job in self.jobs
            if job.world_size == self._world_size
            for rank in job.ranks
            for event in job.events(rank, "saving")
        ]


def _may_go(entry: Entry, before: Catalog, after: Catalog) -> bool:
    """Return whether retention, or a newer job's replacement, may have removed a checkpoint."""
    replacement = after.entry_at(entry.step)
    if replacement is not None:
        return replacement.token > entry.token
    newer = [one for one in before.entries if not one.abandoned and one.step > entry.step]
    return not entry.abandoned and entry.step % KEEP_EVERY != 0 and len(newer) >= KEEP_LAST
