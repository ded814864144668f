"""One training under many faults: its jobs, one after another, and what must hold after each fault.

Every fault begins with a job whose ranks wait at a gate, nothing under way, and ends so; what it does in between is its
own. After each it is checked, past the link, at the server:

- what is live loads, and is bit for bit what the job that saved it had then;
- what was told as committed is in the catalog, unless retention or a job that went back let it go;
- what a job restored is the newest checkpoint, bit for bit, random states included;

and at the end that the training has come, by way of all jobs, to the very bits of one that was never interrupted, and
that gc without a grace leaves exactly what the catalog names.
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

# So that retention has something to do from the first fault on.
_STEPS_BEFORE = (KEEP_LAST + 1) * SAVE_EVERY


class Campaign:
    """See the module; use as a context manager, which ends whatever still runs.

    Args:
        folder: For the jobs.
        seed: Of everything that is chosen.
        world_size: Of all jobs but those that say otherwise.

    Attributes:
        random: What moments and victims are drawn from.
        relay: The link between the ranks and the server.
        job: That trains now.
        suffered: The faults so far, by name.
    """

    def __init__(self, folder: Path, seed: int, world_size: int) -> None:
        self.random = random.Random(seed)
        self.suffered: list[str] = []
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

    # ---- the server, past the link

    @property
    def server(self) -> S3Server:
        """The one that runs now."""
        return self.relay.server

    def store(self) -> ObjectStore:
        """The run, opened past the link."""
        return open_store(URL, self.server.storage_options)

    def replace_server(self) -> None:
        """Start another server that holds the same, and end the one that runs; the link must be down."""
        stack = ExitStack()
        server = stack.enter_context(moto_server())
        server.create_bucket(BUCKET)
        old, new = self.store(), open_store(URL, server.storage_options)
        for info in old.list():
            # The same bytes have the same ETag: to its clients it is the same server, started again.
            assert new.put(info.key, [old.get(info.key, limit_bytes=info.size_bytes).data]).etag == info.version.etag
        self._server_stack.close()
        self._server_stack, self.relay.server = stack, server

    def catalog(self) -> Catalog:
        """As it lies there."""
        seen = read_catalog(self.store())
        assert seen is not None, "there is a run"
        return seen.catalog

    # ---- jobs

    @property
    def job(self) -> Job:
        """That trains now."""
        return self.jobs[-1]

    def launch(
        self,
        *,
        restore_step: int | None = None,
        world_size: int | None = None,
        gate: int | None = None,
        environment: dict[str, str] | None = None,
    ) -> Job:
        """Start a job, which becomes the one that trains; returns at once."""
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
        """Start a job, wait until it has restored, and see that this is the newest checkpoint, whole."""
        expected = self.expected(options.get("restore_step"))
        job = self.launch(**options)
        job.wait_idle()
        self.check_restored(job, expected)
        return job

    def restart(self, **options: Any) -> Job:
        """The job that trained ends, if it has not; the next one starts, as a cluster would do it."""
        self.job.wait_ended()
        return self.start(**options)

    def expected(self, restore_step: int | None = None) -> Entry | None:
        """What a job that starts now will restore; None if there is no run yet."""
        seen = read_catalog(self.store())
        if seen is None:
            return None
        return seen.catalog.latest() if restore_step is None else seen.catalog.at(restore_step)

    def advance(self, steps: int = SAVE_EVERY) -> int:
        """Let the job train so many steps more; the first of them at which it saves."""
        gate = self.job.gate
        self.job.order(gate=gate + steps)
        return gate + SAVE_EVERY - gate % SAVE_EVERY

    def next_save(self) -> int:
        """One of the next steps at which the job saves."""
        gate = self.job.gate
        return gate + SAVE_EVERY - gate % SAVE_EVERY + SAVE_EVERY * self.random.randrange(2)

    def victim(self) -> int:
        """A rank that is not the coordinator."""
        return self.random.randrange(1, self.job.world_size)

    def asks(self, what: str, *, step: int | None = None, rank: int | None = None) -> Callable[[Asked], bool]:
        """Requests of this kind."""

        def wanted(asked: Asked) -> bool:
            return asked.what == what and step in (None, asked.step) and rank in (None, asked.rank)

        return wanted

    # ---- the story

    def begin(self) -> None:
        """The first job makes its first checkpoints."""
        self.start()
        self.advance(_STEPS_BEFORE)
        self.job.wait_idle()
        self.check()

    def suffer(self, name: str, fault: Callable[[Campaign], None]) -> None:
        """One fault; and what must hold after it."""
        try:
            fault(self)
            self.relay.clear()
            self.job.order(raises=None, refuses=None, sleeps=None)
            # That it goes on is seen by a save that nothing happens to.
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
        """Train to an end, and hold it against a training that was never interrupted."""
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
        """Digests by rank and step."""
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

    # ---- what must hold

    def check(self) -> None:
        """What is live loads and is what was saved; nothing that was committed is gone that should not be."""
        catalog = self.catalog()
        for entry in catalog.entries:
            try:
                self._check_that_it_is_what_was_saved(entry)
            except CheckpointNotFoundError:
                # Retention goes on when a save has been told already; whether it was let go by right, the history says.
                assert all(one.save_id != entry.save_id for one in self.catalog().entries), f"{entry} cannot be read"
        self._check_history()
        live = {(entry.step, entry.save_id) for entry in catalog.entries}
        ever = live | {(entry.step, entry.save_id) for one in self.relay.catalogs for entry in one.entries}
        for job in self.jobs:
            for rank in job.ranks:
                for event in job.events(rank, "committed"):
                    assert (event["step"], event["save_id"]) in ever, f"never committed: {event}{job.story()}"

    def check_restored(self, job: Job, expected: Entry | None) -> None:
        """Every rank has what that checkpoint's job had, bit for bit; and of its own what that rank had."""
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
        """Without a grace, past all jobs."""
        store, catalog = self.store(), self.catalog()
        remove_orphans(store, grace_seconds=0)
        named = {CATALOG_KEY}
        for entry in catalog.entries:
            named |= {entry.manifest, *read_entry(store, entry).shards.keys}
        assert {info.key for info in store.list()} == named
        assert find_orphans(store, grace_seconds=0).old == ()
        self.check()

    def told(self, job: Job, step: int, rank: int = 0) -> bool:
        """Whether a rank has told that this step was committed."""
        return any(event["step"] == step for event in job.events(rank, "committed"))

    def errors(self, job: Job, rank: int) -> list[Event]:
        """What a rank failed with, first of all."""
        return [event for event in job.events(rank) if event["event"] in ("failed", "save failed")]

    def save_error(self, job: Job, rank: int) -> Event:
        """What the save under way failed with; an assertion fails if it did not."""
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
        """What a rank had when it began to save a step; a job saves a step once."""
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
    """Whether a checkpoint that is live no more was let go by right."""
    replacement = after.at(entry.step)
    if replacement is not None:
        return replacement.token > entry.token
    newer = [one for one in before.entries if not one.abandoned and one.step > entry.step]
    return not entry.abandoned and entry.step % KEEP_EVERY != 0 and len(newer) >= KEEP_LAST
