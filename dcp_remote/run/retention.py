"""Retention: a pure function from the live checkpoints of a run to those that are retired or thinned.

A user's own function in place of a `Retention` gets the checkpoints and returns the steps to delete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.catalog import Catalog, Entry
from dcp_remote.run.info import CheckpointInfo

# Function of a user: it gets the live checkpoints that are not abandoned, by ascending step, and returns the steps to
# delete. The newest and the pinned stay whatever it returns; named ones go, since the function sees the names.
ChooseToDelete: TypeAlias = Callable[[Sequence[CheckpointInfo]], Iterable[int]]


@dataclass(frozen=True, slots=True)
class Best:
    """Part of a retention that keeps the checkpoints with the best values of a metric.

    Attributes:
        metric: Name of the metric; a checkpoint without it, or with NaN, is not kept by this part.
        count: Number of checkpoints to keep.
        largest: True if larger values are better, as of an accuracy; False for a loss.
    """

    metric: str
    count: int = 1
    largest: bool = False

    def __post_init__(self) -> None:
        """Refuse a part that keeps nothing, or keeps the worst because a text counts as true.

        Raises:
            InvalidArgumentError: The metric is no text or empty, the count is below 1, or `largest` is no bool.
        """
        metric: object = self.metric
        if not isinstance(metric, str) or not metric:
            raise InvalidArgumentError("keep_best needs the name of a metric, as a text.", metric=metric)
        _require_count("keep_best's count", self.count)
        if type(self.largest) is not bool:
            raise InvalidArgumentError(
                "largest must be True or False: True for an accuracy, False for a loss.", largest=self.largest
            )


@dataclass(frozen=True, slots=True)
class Retention:
    """Checkpoints to keep: those that any part keeps, the newest, and the pinned ones. All others are retired.

        Retention(keep_last=3, keep_every=10_000, keep_best=Best("validation loss", 2))

    A checkpoint with a name is kept, too, with its optimizer. `dcp-remote rm` retires it; or retention does, once the
    name has moved to another checkpoint (`save(…, name="best")` again) and no other part keeps it. If a framework gives
    every checkpoint a name of its own ("global_step1000"), nothing would ever be retired: pass `keep_named=False`.

    Attributes:
        keep_last: Number of newest checkpoints to keep; None keeps all.
        keep_every: Number of which a step must be a multiple to be kept.
        keep_best: Metric whose best checkpoints are kept.
        keep_optimizer_last: Number of newest kept checkpoints that keep their optimizer, which only resuming needs; its
            shards are dropped from the others. None drops none.
        optimizer_keys: Top-level keys of the state that belong to the optimizer.
        keep_named: True if checkpoints with a name are kept, with their optimizer.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: Best | None = None
    keep_optimizer_last: int | None = None
    optimizer_keys: tuple[str, ...] = ("optim", "optimizer", "optimizers")
    keep_named: bool = True

    def __post_init__(self) -> None:
        """Refuse parts of a wrong type, and parts that have no effect beside the others.

        Raises:
            InvalidArgumentError: A part is refused; the error names it.
        """
        for name in ("keep_last", "keep_every", "keep_optimizer_last"):
            value = getattr(self, name)
            if value is not None:
                _require_count(name, value)
        # Retention is applied in the background, after the first saves, so that mistakes must be refused here.
        if not isinstance(self.keep_best, Best | None):
            raise InvalidArgumentError("keep_best must be a Best, such as Best('loss', 2).", value=self.keep_best)
        keys: object = self.optimizer_keys
        if not isinstance(keys, tuple | list) or not all(isinstance(key, str) for key in keys):
            raise InvalidArgumentError(
                "optimizer_keys must be a tuple of top-level keys of the state.", value=self.optimizer_keys
            )
        object.__setattr__(self, "optimizer_keys", tuple(keys))  # hashable, since it becomes part of a dict's keys
        if self.keep_last is None and (self.keep_every is not None or self.keep_best is not None):
            raise InvalidArgumentError(
                "keep_every and keep_best have no effect without keep_last, which keeps everything by default."
            )


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision of a retention.

    Attributes:
        retire: Steps of the checkpoints to retire, ascending.
        thin: Steps of the checkpoints to drop the optimizer of, ascending; none of `retire`.
    """

    retire: tuple[int, ...]
    thin: tuple[int, ...]


def decide(retention: Retention, entries: Iterable[Entry], *, bare: Collection[str] = ()) -> Decision:
    """Apply a retention to the live checkpoints. Applied again to the result, it decides on nothing more.

    `bare` has the keys of manifests that are known to hold no optimizer.
    """
    counted = sorted((live for live in entries if not live.abandoned), key=lambda live: live.step)
    newest_first = [live.step for live in reversed(counted)]
    held = {live.step for live in counted if live.pinned or (retention.keep_named and live.names)}
    kept = held | set(newest_first[: retention.keep_last])
    if retention.keep_every is not None:
        kept |= {step for step in newest_first if step % retention.keep_every == 0}
    if retention.keep_best is not None:
        kept |= _best(retention.keep_best, counted)
    # Counted among the kept checkpoints only, or the decision would change once the others are retired.
    whole = held | set([step for step in newest_first if step in kept][: retention.keep_optimizer_last])
    can_thin = (
        live for live in counted if live.manifest not in bare and set(retention.optimizer_keys).isdisjoint(live.thinned)
    )
    return Decision(
        retire=tuple(live.step for live in counted if live.step not in kept),
        thin=tuple(live.step for live in can_thin if live.step in kept and live.step not in whole),
    )


def decide_by(choose: ChooseToDelete, catalog: Catalog) -> Decision:
    """Apply a user's function to the live checkpoints of a run. Steps that are not live are ignored.

    Raises:
        InvalidArgumentError: The function does not return steps.
        Exception: Whatever the function raises.
    """
    counted = [entry for entry in catalog.entries if not entry.abandoned]
    chosen: object = choose([CheckpointInfo.of(entry) for entry in counted]) if counted else ()
    if isinstance(chosen, str) or not isinstance(chosen, Iterable):
        raise InvalidArgumentError(
            "The function passed as retention must return the steps to delete, as integers; [] to delete none.",
            returned=chosen,
            type=type(chosen).__name__,
        )
    steps = set()
    for step in chosen:
        if type(step) is not int:
            raise InvalidArgumentError(
                "The function passed as retention must return the steps to delete, as integers.",
                step=step,
                type=type(step).__name__,
            )
        steps.add(step)
    # `counted` ascends, so that the last is the newest.
    return Decision(retire=tuple(e.step for e in counted[:-1] if e.step in steps and not e.pinned), thin=())


def require_retention(retention: object) -> None:
    """Refuse what is neither a `Retention`, nor a function, nor None.

    Raises:
        InvalidArgumentError: The value is of another type, or a class.
    """
    if retention is None or isinstance(retention, Retention):
        return
    if callable(retention) and not isinstance(retention, type):
        return
    raise InvalidArgumentError(
        "retention must be a Retention, such as Retention(keep_last=3), or a function from the list of checkpoints to "
        "the steps to delete.",
        value=retention,
        type=type(retention).__qualname__,
    )


def _best(best: Best, counted: Sequence[Entry]) -> set[int]:
    values = ((dict(live.metrics).get(best.metric, math.nan), live.step) for live in counted)
    # Between equal values the newer checkpoint counts as better.
    known = [(value if best.largest else -value, step) for value, step in values if not math.isnan(value)]
    return {step for _, step in sorted(known, reverse=True)[: best.count]}


def _require_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise InvalidArgumentError(f"{name} must be an integer above zero.", value=value)
