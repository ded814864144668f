"""Saves into a run: checks against the catalog before a byte is uploaded, and the commit.

The rules are in `format/catalog.py`. This module holds one job's state: its token, the checkpoint that it resumed from,
and whether its last attempt was committed. Any writer of shards can save into a run with it.
"""

from __future__ import annotations

import logging
import math
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import SupportsFloat

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.provenance import describe_process
from dcp_remote.errors import CheckpointExistsError, FencedError, InvalidArgumentError, SaveTimeoutError
from dcp_remote.format.catalog import (
    NEWEST_WORDS,
    Attempt,
    Catalog,
    Entry,
    Owner,
    add_entry,
    label_entry,
    raise_revision,
    require_owner,
    take_fence,
)
from dcp_remote.format.keys import manifest_key
from dcp_remote.run.catalog_store import require_catalog, swap
from dcp_remote.run.lookup import require_no_checkpoint_by_itself, require_not_lost, wrong_step
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.retrying import RetryingStore

logger = logging.getLogger(__name__)

# Names and metrics that a catalog and a manifest can hold, and a person can read in a list.
_WORD = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,200}")
STEP_MAX = 2**53

# A message lists so many abandoned steps, the newest.
_STEPS_NAMED_MAX = 10


@dataclass(frozen=True, slots=True)
class CheckpointLabels:
    """Step, names and metrics of a checkpoint, as given by the user."""

    step: int
    names: tuple[str, ...] = ()  # each belongs to one checkpoint at a time, the last that was given it
    metrics: tuple[tuple[str, float], ...] = ()  # names and finite values
    overwrite: bool = False  # replace the live checkpoint of this step, if there is one
    # Keep the live checkpoint of this step if it is this job's, and add names and metrics to it. None: keep the
    # checkpoint only if this job has saved nothing since, and add nothing.
    exist_ok: bool | None = None

    @classmethod
    def of(
        cls,
        step: int,
        *,
        name: str | Iterable[str] | None = None,
        metrics: Mapping[str, SupportsFloat] | None = None,
        overwrite: bool = False,
        exist_ok: bool | None = None,
    ) -> CheckpointLabels:
        """Check the arguments of a save, before anything is copied or sent."""
        require_step(step)
        if overwrite and exist_ok:
            raise InvalidArgumentError("overwrite and exist_ok exclude each other: pass one of them.", step=step)
        names = check_names(name if name is not None else (), step=step)
        if metrics is not None and not isinstance(metrics, Mapping):
            raise InvalidArgumentError("metrics must be a mapping of names to numbers.", type=type(metrics).__name__)
        for word in metrics or ():
            _require_word(word)
        numbers = {key: _number(key, value) for key, value in (metrics or {}).items()}
        for key, number in numbers.items():
            if not math.isfinite(number):
                # NaN has no order, so that it cannot be the best; and a diverging training must not fail here.
                logger.warning("a metric that is not finite is left out: step=%d metric=%s value=%s", step, key, number)
        finite = tuple((key, number) for key, number in numbers.items() if math.isfinite(number))
        return cls(step, names, finite, overwrite, exist_ok)


def check_names(names: object, *, step: int | None = None) -> tuple[str, ...]:
    """Check one name or several of a checkpoint, and return them in order.

    A name is any text of 1 to 200 characters without control characters, such as "checkpoint-500" or
    "epoch=3-step=500.ckpt", but none of `NEWEST_WORDS`. A name of digits alone would be taken for a step, on the
    command line; so it may only be that of its own step, and is not refused while `step` is not known.
    """
    if not isinstance(names, Iterable):
        raise InvalidArgumentError("name must be a text, or several texts.", name=names)
    checked = (names,) if isinstance(names, str) else tuple(names)
    for word in checked:
        _require_word(word)
        if word in NEWEST_WORDS:
            raise InvalidArgumentError(
                "This name means the newest checkpoint wherever a step is taken, so no checkpoint can have it. Leave "
                "it out, or choose another name.",
                name=word,
                reserved=", ".join(NEWEST_WORDS),
            )
        if step is not None and word.isdecimal() and int(word) != step:
            raise InvalidArgumentError(
                "A name of digits alone would be taken for another step. Add letters, as in 'checkpoint-500'.",
                name=word,
                step=step,
            )
    if len(set(checked)) != len(checked):
        raise InvalidArgumentError("A name is given twice.", names=", ".join(checked))
    return checked


def _require_word(word: object) -> None:
    if not isinstance(word, str) or not _WORD.fullmatch(word):
        raise InvalidArgumentError(
            "A name must be a text of 1 to 200 characters, none of them a control character.", name=ascii(word)[:300]
        )


def require_step_or_name(step: object) -> None:
    """Refuse what is neither a step nor a name."""
    if not isinstance(step, str):
        if type(step) is not int:
            raise wrong_step(step, "A step must be an integer, or a checkpoint's name.")
        require_step(step)


def require_step(step: object) -> None:
    """Refuse a step that is no number of finished steps."""
    if type(step) is not int or not 0 <= step < STEP_MAX:
        raise wrong_step(step, "A step must be an integer from 0 to 2**53 - 1: the number of finished steps.")


def _number(name: str, value: SupportsFloat) -> float:
    # torch warns of the conversion of a loss that still requires a gradient; this module does not import torch.
    detach = getattr(value, "detach", None)
    try:
        return float(detach() if callable(detach) else value)  # a numpy scalar, a tensor of one element
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidArgumentError(
            "A metric must be one number. Of a tensor of several elements, pass the mean.", metric=name, value=value
        ) from error


def warn_of_going_back(catalog: Catalog, entry: Entry, *, url: str) -> None:
    """Log the checkpoints that the next save abandons when this one is restored; nothing if it is the newest."""
    newer = [live for live in catalog.entries if live.step > entry.step and not live.abandoned]
    if newer:
        logger.warning(
            "%s: this job restores step %d: the next save abandons %s. To look at an older checkpoint without going "
            "back to it, use dcp_remote.load(url, step=%d) or RemoteReader; or restore the newest before the next save",
            url,
            entry.step,
            _describe_abandoned(newer),
            entry.step,
        )


def _describe_abandoned(entries: Sequence[Entry]) -> str:
    """List the steps of abandoned checkpoints, the newest, and those that a later save may not replace."""
    steps, held = (
        ", ".join(str(entry.step) for entry in listed[-_STEPS_NAMED_MAX:])
        for listed in (entries, [entry for entry in entries if not entry.is_replaceable_by(())])
    )
    note = " (pinned or named, and so not replaced unless a save is given the name, exist_ok or overwrite: "
    return steps + (f"{note}{held})" if held else "")


class JobSession:
    """Saves of one job into a run; on the coordinator, for one thread at a time.

    A job takes the fence with its first save, and again after it went back to an older checkpoint: from then on no
    earlier job commits. If another job has saved since this one restored its checkpoint, this one is fenced.
    """

    def __init__(self, store: ObjectStore) -> None:
        """Store the settings; no request."""
        self._store = store
        self.owner: Owner | None = None  # this job, by whose token it outranks earlier ones; None before its first save
        self._resumed_from: int | None = None
        self._seen: Owner | None = None
        self._has_open_attempt = False
        self._fence_error: FencedError | None = None

    def resume_from(self, step: int | None, seen: Owner | None = None) -> None:
        """Set the checkpoint that the state was restored from; -1: none, on purpose; None: there was none.

        `seen` is the owner of the run at that time; None if that is not known. The next save takes the fence anew, and
        abandons newer checkpoints. A job that was fenced stays fenced, or the two jobs would fence each other in turn.
        """
        self._resumed_from, self.owner, self._seen = step, None, seen

    def after(self, step: int, seen: Owner) -> JobSession:
        """Make a session of this job, resumed from a checkpoint, that a thread stuck in this session cannot change."""
        job = JobSession(self._store)
        job.resume_from(step, seen)
        job._fence_error = self._fence_error
        return job

    def begin(self, note: CheckpointLabels, *, borrow: bool, deadline: Deadline) -> Attempt | Entry:
        """Check that this step may be saved, and make the attempt to commit; the first save also takes the fence.

        Costs one GET; also a PUT after an attempt that was not committed; a PUT and a HEAD for the first save of a job,
        and a LIST where the run begins; and on a server other than the clouds' own, once per process and bucket, four
        requests that check its conditional writes.

        Returns the checkpoint of this step instead, if this job wrote or resumed from it, and the save may keep it:
        with `exist_ok`, or without a choice if this job has saved nothing since.

        With `borrow`, shards of the newest checkpoint may be reused. Refused are (`CheckpointExistsError`) a run with
        checkpoints of which this job resumed from none, a live checkpoint of this step that is not abandoned, is pinned
        or has a name that the new one is not given, and a checkpoint by itself; (`InvalidArgumentError`) a step that is
        older than the newest checkpoint and overwrites none; (`FencedError`, at every later save of this job, too) a
        job after which a newer one took the run. Nothing is changed then, except perhaps the fence.
        """
        if self._fence_error is not None:
            raise self._fence_error.with_details()
        with self._noting_fence():
            catalog = self._catalog(deadline)
        there = catalog.entry_at(note.step)
        if there is not None and not (there.abandoned or note.overwrite or note.exist_ok is False):
            # Written by this job, or resumed from, with nothing saved since.
            is_own = there.token == self._token() or there.step == self._resumed_from
            if is_own and (note.exist_ok or there == self._newest(catalog)):
                return there
        self._require_progress(note, catalog)
        names = note.names
        if there is not None and not note.overwrite:
            if note.exist_ok:
                # The names of an abandoned checkpoint do not keep the checkpoint, but go on to the new one.
                names = tuple(dict.fromkeys((*names, *there.names)))
            self._require_replaceable(there, names, note.step)
        self._has_open_attempt = True
        base = self._newest(catalog) if borrow else None
        return Attempt(
            Entry(
                step=note.step,
                save_id=uuid.uuid4().hex,
                manifest=manifest_key(revision=catalog.revision, step=note.step),
                size_bytes=0,  # not known before the commit, nor is the time
                created="",
                token=catalog.token,
                began_revision=catalog.revision,
                names=names,
                metrics=note.metrics,
            ),
            catalog.run_id,
            before=there.save_id if there is not None and note.overwrite else None,
            reused=(base.save_id, base.manifest) if base is not None else None,
        )

    def label(self, entry: Entry, note: CheckpointLabels, *, deadline: Deadline) -> Entry:
        """Add the names and metrics of a repeated save to the checkpoint of its step, and return its entry.

        Costs a GET and a PUT; only the GET if the checkpoint has them, and nothing if there are none to add. After a
        crash at any moment the catalog has all of them or none. After `CommitUnknownError` the same save again finds
        out whether they were added.
        """
        if not note.names and not note.metrics:
            return entry
        token = self._token()
        with self._noting_fence():
            catalog = swap(
                self._store,
                lambda now: label_entry(now, entry.save_id, token=token, names=note.names, metrics=note.metrics),
                deadline=deadline,
            )
        return next(live for live in catalog.entries if live.save_id == entry.save_id)

    @contextmanager
    def _noting_fence(self) -> Iterator[None]:
        """Refuse all later saves of this job once a newer job has the fence."""
        try:
            yield
        except FencedError as error:
            self._fence_error = error
            raise

    def commit(
        self,
        begun: Attempt,
        body: bytes,
        *,
        size_bytes: int,
        deadline: Deadline,
        look: Callable[[Catalog], object] = lambda _: None,
    ) -> tuple[Catalog, Entry]:
        """Put the manifest, whose segments are there, and swap the catalog; then the checkpoint exists.

        Costs two PUTs and a GET. After a crash at any moment the catalog is the old or the new one, and objects that no
        live checkpoint names are orphans. `body` is the manifest, sealed, of the attempt that `begin` has returned;
        `look` is called with each catalog that the commit was decided on. Returns the catalog with the checkpoint, and
        its entry.

        Nothing is committed after `FencedError`; `BeginAgainError` (orphans were removed since this save began, or a
        reused checkpoint is gone); `CommitConflictError` (another save of this step was committed meanwhile, or the
        checkpoint to be replaced was pinned); `SaveTimeoutError` (the deadline passed before the swap); `StorageError`.
        It is not known after `CommitUnknownError`.
        """
        # No other save writes this key, and none reads it before the swap, so that the PUT can be repeated.
        RetryingStore(self._store, deadline).put(begun.entry.manifest, [body])
        # After the deadline the caller has given up, and must not find a checkpoint committed later.
        self._require_time(deadline)
        created = datetime.now(UTC).isoformat(timespec="seconds")
        entry = replace(begun.entry, size_bytes=size_bytes, created=created)
        attempt = replace(begun, entry=entry, abandons=self._resumed_from)

        def change(now: Catalog) -> Catalog | None:
            look(now)
            return add_entry(now, attempt)

        with self._noting_fence():
            catalog = swap(self._store, change, deadline=deadline)
        self._has_open_attempt = False
        # The commit has marked the abandoned checkpoints, so that later saves need not.
        self._resumed_from = None
        return catalog, entry

    def _catalog(self, deadline: Deadline) -> Catalog:
        """Return the catalog, in which this job has the fence."""
        if self.owner is None:
            reading = RetryingStore(self._store, deadline)
            require_no_checkpoint_by_itself(reading)

            def fence(now: Catalog) -> Catalog:
                # A thread that was held up past its deadline would fence its own job, which went on without it.
                self._require_time(deadline)
                if now.revision == 0:  # a run that begins
                    require_not_lost(reading)
                return self._take_fence(now)

            catalog = swap(self._store, fence, deadline=deadline, create=True)
            # If the answer came after the deadline, a later save has taken a fence of its own.
            self._require_time(deadline)
            self.owner = Owner(catalog.run_id, catalog.token)
            logger.info("%s: this job holds the fence, token %d", self._store.url, catalog.token)
        elif self._has_open_attempt:
            self._require_time(deadline)
            catalog = swap(self._store, self._refresh, deadline=deadline)
        else:
            catalog = require_catalog(RetryingStore(self._store, deadline))
        require_owner(catalog, self.owner, url=self._store.url)
        return catalog

    def _require_progress(self, note: CheckpointLabels, catalog: Catalog) -> None:
        """Refuse a step that no job would restore, since a newer checkpoint is live; warn of those that it abandons."""
        newest = self._newest(catalog)
        if newest is not None and note.step < newest.step and not note.overwrite:
            raise InvalidArgumentError(
                "This step is older than the newest checkpoint, from which every job would go on.",
                url=self._store.url,
                step=note.step,
                newest=newest.step,
            ).advise(
                restore="the loop goes on at the step that restore() returned; restore(state, <older step>) goes back"
            )
        left = [entry for entry in catalog.entries if self._abandons(entry) and not entry.abandoned]
        if left:
            logger.warning(
                "%s: this job %s: its first commit abandons %s",
                self._store.url,
                "starts over" if self._resumed_from == -1 else f"goes on from step {self._resumed_from}",
                _describe_abandoned(left),
            )

    def _require_replaceable(self, there: Entry, names: Iterable[str], step: int) -> None:
        if not (there.abandoned or self._abandons(there)):
            raise CheckpointExistsError(
                "Checkpoint already exists at this step. Save another step.",
                url=self._store.url,
                step=step,
                save_id=there.save_id,
            ).advise(
                exist_ok="exist_ok=True keeps it if this job saved or restored it",
                overwrite="overwrite=True replaces it",
            )
        if not there.is_replaceable_by(names):
            raise CheckpointExistsError(
                "Checkpoint already exists at this step: it was abandoned, and stays because it is pinned or has a "
                "name. Save another step; or unpin it (`dcp-remote pin --undo`) and give this save its names.",
                url=self._store.url,
                step=step,
                save_id=there.save_id,
                pinned=there.pinned,
                names=", ".join(there.names) or None,
            ).advise(overwrite="overwrite=True replaces it")

    def _take_fence(self, catalog: Catalog) -> Catalog:
        newest = catalog.latest()
        if catalog.entries and self._resumed_from is None:
            raise CheckpointExistsError(
                "The run has checkpoints, and this job was restored from none of them: a save would abandon them.",
                url=self._store.url,
                newest=newest.step if newest is not None else None,
                holder=catalog.holder or None,
            ).advise(
                restore="restore() before the first save goes on from the newest",
                resumed_from="CheckpointManager(…, resumed_from=<step>) goes on from a state that was loaded another "
                "way",
                start_over="CheckpointManager(…, start_over=True) begins anew",
            )
        return take_fence(catalog, describe_process(), seen=self._seen)

    def _refresh(self, catalog: Catalog) -> Catalog:
        require_owner(catalog, self.owner, url=self._store.url)
        return raise_revision(catalog)

    def _require_time(self, deadline: Deadline) -> None:
        if deadline.expired():
            raise SaveTimeoutError(
                "The deadline passed before the save was committed; nothing was committed.", url=self._store.url
            )

    def _token(self) -> int:
        assert self.owner is not None, "the fence is taken first"
        return self.owner.token

    def _abandons(self, entry: Entry) -> bool:
        return self._resumed_from is not None and entry.step > self._resumed_from and entry.token < self._token()

    def _newest(self, catalog: Catalog) -> Entry | None:
        counted = [entry for entry in catalog.entries if not entry.abandoned and not self._abandons(entry)]
        return max(counted, key=lambda entry: entry.step, default=None)
