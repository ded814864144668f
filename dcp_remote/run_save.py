"""Saving into a run: what the coordinator asks the catalog before a byte is uploaded, and how the save is committed.

Every rule stands in `catalog.py`; this is one job's memory of the run: its token, what it went on from, and whether its
last attempt was committed. No torch: whatever writes shards can save into a run.
"""

from __future__ import annotations

import logging
import math
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import SupportsFloat

from dcp_remote.catalog import Attempt, Catalog, Entry, committed, fenced, refreshed
from dcp_remote.catalog_store import Change, read_catalog, swap
from dcp_remote.checkpoint import require_no_checkpoint_by_itself, require_not_lost
from dcp_remote.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    FencedError,
    InvalidArgumentError,
    SaveTimeoutError,
)
from dcp_remote.manifest import RunInfo
from dcp_remote.run_names import manifest_key
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.retrying import Deadline, RetryingStore, jitter

logger = logging.getLogger(__name__)

# What a catalog and a manifest can say, and a person can read in a list.
_WORD = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,200}")
STEP_MAX = 2**53

# Of those that are abandoned, the newest are named.
_STEPS_NAMED_MAX = 10


@dataclass(frozen=True, slots=True)
class Note:
    """What the user says of a checkpoint.

    Attributes:
        step: Finished steps of training.
        names: By which it can be asked for; each belongs to one checkpoint at a time, the last that was given it.
        metrics: Finite, by name.
        overwrite: Replace the live checkpoint of this step, if there is one.
    """

    step: int
    names: tuple[str, ...] = ()
    metrics: tuple[tuple[str, float], ...] = ()
    overwrite: bool = False

    @classmethod
    def of(
        cls,
        step: int,
        *,
        name: str | Iterable[str] | None = None,
        metrics: Mapping[str, SupportsFloat] | None = None,
        overwrite: bool = False,
    ) -> Note:
        """Check what a user passed, before anything is copied or sent.

        Raises:
            InvalidArgumentError: Says what.
        """
        require_step(step)
        if name is not None and not isinstance(name, Iterable):
            raise InvalidArgumentError("A name is a text, or several are.", name=name)
        if metrics is not None and not isinstance(metrics, Mapping):
            raise InvalidArgumentError("metrics must be a mapping of names to numbers.", type=type(metrics).__name__)
        names = (name,) if isinstance(name, str) else tuple(name or ())
        for word in (*names, *(metrics or ())):
            if not isinstance(word, str) or not _WORD.fullmatch(word):
                raise InvalidArgumentError(
                    "A name is a text of 1 to 200 characters, none of them a control character.", name=ascii(word)[:300]
                )
        if any(word.isdecimal() for word in names):
            raise InvalidArgumentError("A name of digits alone would be taken for a step.", names=", ".join(names))
        if len(set(names)) != len(names):
            raise InvalidArgumentError("A name is given twice.", names=", ".join(names))
        numbers = {key: _number(key, value) for key, value in (metrics or {}).items()}
        for key, number in numbers.items():
            if not math.isfinite(number):
                # It compares with nothing, and a training that diverges is not to end for want of its metric.
                logger.warning("a metric that is not finite is left out: step=%d metric=%s value=%s", step, key, number)
        return cls(step, names, tuple(one for one in numbers.items() if math.isfinite(one[1])), overwrite)


def require_step(step: object) -> None:
    """Refuse what is no number of finished steps.

    Raises:
        InvalidArgumentError: Not an integer, or out of bounds.
    """
    if type(step) is not int or not 0 <= step < STEP_MAX:
        raise InvalidArgumentError(
            "A step is an integer from 0 on: how many are finished.", step=step, type=type(step).__name__
        )


def _number(name: str, value: SupportsFloat) -> float:
    try:
        return float(value)  # a numpy scalar, a tensor of one element
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidArgumentError("A metric is a number.", metric=name, value=value) from error


@dataclass(frozen=True, slots=True)
class Begun:
    """A save as it began: what every rank must know. It pickles.

    Attributes:
        save_id: Of this save; 32 lower-case hex digits.
        run: What its manifest says of the run.
        borrowed: save_id and manifest key of the checkpoint whose shards may be named again; None if of none.
        before: The save_id at this step that it was told to overwrite; None if none is there.
        manifest: Key under which its manifest will be put; no other save writes this name.
    """

    save_id: str
    run: RunInfo
    borrowed: tuple[str, str] | None
    before: str | None
    manifest: str


def warn_of_going_back(catalog: Catalog, entry: Entry, *, url: str) -> None:
    """Log what the next save abandons, if this is the checkpoint that is restored; nothing if it is the newest."""
    newer = [one for one in catalog.entries if one.step > entry.step and not one.abandoned]
    if newer:
        logger.warning(
            "%s: this job restores step %d: the next save abandons %s. To look at an older checkpoint without going "
            "back to it, use dcp_remote.load(url, step=%d) or RemoteReader; or restore the newest before the next save",
            url,
            entry.step,
            _listed(newer),
            entry.step,
        )


def _listed(entries: Sequence[Entry]) -> str:
    """The newest of what is abandoned, and which of those a later save of their step may not replace."""
    steps, held = (
        ", ".join(str(one.step) for one in some[-_STEPS_NAMED_MAX:])
        for some in (entries, [one for one in entries if not one.is_replaceable_by(())])
    )
    note = " (pinned or named, and so not replaced unless a save is given the name, or overwrite=True: "
    return steps + (f"{note}{held})" if held else "")


class Job:
    """One job's side of a run; on the coordinator, for one thread at a time.

    A job that begins takes the fence: from then on no earlier one commits. It does so with its first save, and again
    after it went back to an older checkpoint.

    Args:
        store: Opened at the run.
        sleep: For tests.
        uniform: For tests.
        new_id: Gives save_ids; for tests.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[float, float], float] = jitter,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        """See the class; no request is made."""
        self._store = store
        self._sleep, self._uniform, self._new_id = sleep, uniform, new_id
        self._run_id: str | None = None
        self._token: int | None = None
        self._went_on_from: int | None = None
        self._open = False
        self._outranked: FencedError | None = None

    @property
    def token(self) -> int | None:
        """By which this job outranks earlier ones; None before its first save."""
        return self._token

    def go_on_from(self, step: int | None) -> None:
        """The state is that of this checkpoint (-1: of none, on purpose; None: of none, since there was none).

        The next save takes the fence anew, and abandons what is newer. A job that was fenced stays so: it would fight
        with the one that fenced it.
        """
        self._went_on_from, self._token = step, None

    def after(self, step: int) -> Job:
        """The same job, gone on from this checkpoint; a thread that is stuck in this one does not change that."""
        job = Job(self._store, sleep=self._sleep, uniform=self._uniform, new_id=self._new_id)
        job.go_on_from(step)
        job._outranked = self._outranked
        return job

    def begin(self, note: Note, *, borrow: bool, deadline: Deadline) -> Begun:
        """Look whether this step may be saved; the first save also takes the fence.

        Costs one GET; one that follows an attempt that was not committed also a PUT, and the first save of a job that
        and a HEAD; where the run begins, also a LIST; and on a server that is none of the clouds' own, once per process
        and bucket, the four requests that see whether it keeps to conditions.

        Args:
            note: What is to be saved.
            borrow: Whether shards of an earlier checkpoint may be named again.
            deadline: Until when requests are repeated.

        Raises:
            CheckpointExistsError: The run has checkpoints and this job went on from none of them; or a checkpoint of
                this step is live, and not abandoned, or it is pinned, or has a name that is not given to the new one;
                or here is a checkpoint by itself. Nothing was changed, but for the fence.
            InvalidArgumentError: The step is older than the newest checkpoint, and does not overwrite one.
            FencedError: A newer job owns the run; told again at every save of this one.
            CheckpointNotFoundError: The run is gone.
            CorruptCheckpointError: The run has lost its catalog.
            CommitUnknownError: The store never said whether the fence was taken.
            SaveTimeoutError: The deadline passed meanwhile.
            StorageError: The store refused, or did not answer.
        """
        if self._outranked is not None:
            raise FencedError(self._outranked.what, **self._outranked.details)
        try:
            catalog = self._catalog(deadline)
        except FencedError as error:
            self._outranked = error
            raise
        there = catalog.at(note.step)
        self._require_progress(note, catalog)
        if there is not None and not note.overwrite:
            self._require_replaceable(there, note)
        self._open = True
        base = self._newest(catalog) if borrow else None
        return Begun(
            save_id=self._new_id(),
            run=RunInfo(
                run_id=catalog.run_id,
                step=note.step,
                token=catalog.token,
                revision=catalog.revision,
                names=note.names,
                metrics=note.metrics,
            ),
            borrowed=(base.save_id, base.manifest) if base is not None else None,
            before=there.save_id if there is not None and note.overwrite else None,
            manifest=manifest_key(revision=catalog.revision, step=note.step),
        )

    def commit(
        self,
        begun: Begun,
        body: bytes,
        *,
        size_bytes: int,
        deadline: Deadline,
        look: Callable[[Catalog], object] = lambda _: None,
    ) -> tuple[Catalog, Entry]:
        """Put the manifest and swap the catalog: when this returns, the checkpoint exists.

        Costs two PUTs and a GET. Killed at any moment, the catalog is the old or the new one; what no live checkpoint
        names is an orphan.

        Args:
            begun: From `begin`.
            body: The manifest; it carries `begun.save_id` and `begun.run`.
            size_bytes: Of the shards that it names.
            deadline: Until when an unclear answer is pursued.
            look: Called with each catalog that the commit was decided on.

        Returns:
            The catalog that holds it, and its entry there.

        Raises:
            FencedError: A newer job owns the run.
            BeginAgainError: Orphans were removed since this save began, or what it borrowed is gone. Save again.
            CommitConflictError: Another save of this step was committed meanwhile, or what it was to replace pinned.
            CommitUnknownError: The store never said.
            SaveTimeoutError: The deadline passed before it came to that; nothing was committed.
            StorageError: The store refused; nothing was committed.
        """
        run = begun.run
        # Nobody else writes this name, and nobody reads it before the swap: it may be sent as often as it takes.
        RetryingStore(self._store, deadline, sleep=self._sleep).put(begun.manifest, [body])
        # If this was held up for so long, whoever waited has given up: nothing is to be committed behind his back.
        self._require_time(deadline)
        entry = Entry(
            step=run.step,
            save_id=begun.save_id,
            manifest=begun.manifest,
            size_bytes=size_bytes,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            token=run.token,
            began=run.revision,
            names=run.names,
            metrics=run.metrics,
        )
        attempt = Attempt(entry, run.run_id, before=begun.before, borrowed=begun.borrowed, abandons=self._went_on_from)

        def change(now: Catalog) -> Catalog | None:
            look(now)
            return committed(now, attempt)

        try:
            catalog = self._swap(change, deadline)
        except FencedError as error:
            self._outranked = error
            raise
        self._open = False
        # What it went on from was said; saves that follow are beyond it.
        self._went_on_from = None
        return catalog, entry

    def _catalog(self, deadline: Deadline) -> Catalog:
        if self._token is None:
            asking = RetryingStore(self._store, deadline, sleep=self._sleep)
            require_no_checkpoint_by_itself(asking)

            def fence(now: Catalog) -> Catalog:
                # A thread that was held up would fence the very job that went on without it.
                self._require_time(deadline)
                if now.revision == 0:  # a run that begins
                    require_not_lost(asking)
                return self._fenced(now)

            catalog = self._swap(fence, deadline, create=True)
            # If the answer came late, a later save has taken a fence of its own.
            self._require_time(deadline)
            self._run_id, self._token = catalog.run_id, catalog.token
            logger.info("%s: this job holds the fence, token %d", self._store.url, catalog.token)
        elif self._open:
            self._require_time(deadline)
            catalog = self._swap(self._refreshed, deadline)
        else:
            seen = read_catalog(RetryingStore(self._store, deadline, sleep=self._sleep))
            if seen is None:
                raise CheckpointNotFoundError(
                    "The catalog of the run is gone. `dcp-remote recover` makes it again from the manifests.",
                    url=self._store.url,
                )
            catalog = seen.catalog
        self._require_ours(catalog)
        return catalog

    def _require_progress(self, note: Note, catalog: Catalog) -> None:
        """Refuse a step that nobody would ever restore: the loop does not go on from what it was restored from."""
        newest = self._newest(catalog)
        if newest is not None and note.step < newest.step and not note.overwrite:
            raise InvalidArgumentError(
                "This step is older than the newest checkpoint, from which every job would go on. Does the loop go on "
                "from the step that restore() returned? restore(state, <older step>) goes back.",
                url=self._store.url,
                step=note.step,
                newest=newest.step,
            )
        left = [one for one in catalog.entries if self._abandons(one) and not one.abandoned]
        if left:
            logger.warning(
                "%s: this job %s: its first commit abandons %s",
                self._store.url,
                "starts over" if self._went_on_from == -1 else f"goes on from step {self._went_on_from}",
                _listed(left),
            )

    def _require_replaceable(self, there: Entry, note: Note) -> None:
        if not (there.abandoned or self._abandons(there)):
            raise CheckpointExistsError(
                "Checkpoint already exists at this step. Save another step, or pass overwrite=True to replace it.",
                url=self._store.url,
                step=note.step,
                save_id=there.save_id,
            )
        if not there.is_replaceable_by(note.names):
            raise CheckpointExistsError(
                "Checkpoint already exists at this step: it was abandoned, and stays since it is pinned or has a name. "
                "Save another step; or unpin it (`dcp-remote pin --undo`) and give this save its names; or pass "
                "overwrite=True to replace it.",
                url=self._store.url,
                step=note.step,
                save_id=there.save_id,
                pinned=there.pinned,
                names=", ".join(there.names) or None,
            )

    def _fenced(self, catalog: Catalog) -> Catalog:
        newest = catalog.latest()
        if newest is not None and self._went_on_from is None:
            raise CheckpointExistsError(
                "The run has checkpoints, and this job was restored from none of them: saving would leave them "
                "behind. Call restore() first; or pass resumed_from=<step> if the state was loaded another way, or "
                "start_over=True if the run shall begin anew.",
                url=self._store.url,
                newest=newest.step,
            )
        return fenced(catalog)

    def _refreshed(self, catalog: Catalog) -> Catalog:
        self._require_ours(catalog)
        return refreshed(catalog)

    def _require_time(self, deadline: Deadline) -> None:
        if deadline.expired():
            raise SaveTimeoutError(
                "The deadline passed before the save was committed; nothing was committed.", url=self._store.url
            )

    def _require_ours(self, catalog: Catalog) -> None:
        if (catalog.run_id, catalog.token) != (self._run_id, self._token):
            raise FencedError(
                "A newer job owns this run; stop this one.",
                url=self._store.url,
                token=self._token,
                newest=catalog.token,
            )

    def _abandons(self, entry: Entry) -> bool:
        assert self._token is not None, "taken by now"
        return self._went_on_from is not None and entry.step > self._went_on_from and entry.token < self._token

    def _newest(self, catalog: Catalog) -> Entry | None:
        living = [one for one in catalog.entries if not one.abandoned and not self._abandons(one)]
        return max(living, key=lambda one: one.step, default=None)

    def _swap(self, change: Change, deadline: Deadline, *, create: bool = False) -> Catalog:
        return swap(self._store, change, deadline=deadline, create=create, sleep=self._sleep, uniform=self._uniform)
