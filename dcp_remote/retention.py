"""Which checkpoints of a run to keep: a function from what is live to what may go. Pure; nothing is deleted here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dcp_remote.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live checkpoint, as far as retention looks at it.

    Attributes:
        step: Of training, finished.
        pinned: Kept whatever the rest says.
        abandoned: Newer than what a later job went on from: it counts for nothing, and only `rm` retires it.
        thinned: Without its optimizer already.
        metrics: What the user noted, by name.
        names: By which it can be asked for.
    """

    step: int
    pinned: bool = False
    abandoned: bool = False
    thinned: bool = False
    metrics: tuple[tuple[str, float], ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Best:
    """Keep those with the best values of a metric.

    Attributes:
        metric: Its name; a checkpoint without it is none of the best, nor is one whose value is NaN.
        count: How many.
        largest: Whether more is better; a loss wants False.
    """

    metric: str
    count: int = 1
    largest: bool = False

    def __post_init__(self) -> None:
        """Refuse what keeps nothing.

        Raises:
            InvalidArgumentError: No name, or a count below 1.
        """
        if not self.metric:
            raise InvalidArgumentError("keep_best needs the name of a metric.")
        _require_count("keep_best's count", self.count)


@dataclass(frozen=True, slots=True)
class Retention:
    """What to keep; a checkpoint goes if no part of it keeps it. The newest one is always kept, and so are pinned ones.

        Retention(keep_last=3, keep_every=10_000, keep_best=Best("validation loss", 2))

    What has a name is kept, too, and whole. It goes by `dcp-remote rm`, or when its name has moved on (`save(…,
    name="best")` again) and no other part keeps it. Where every checkpoint has a name of its own, as some frameworks
    give them ("global_step1000"), nothing would ever go: `keep_named=False` is for those.

    Attributes:
        keep_last: So many of the newest; None keeps all.
        keep_every: Also those whose step is a multiple of this.
        keep_best: Also these.
        keep_optimizer_last: Of what is kept, all but the so many newest lose what only resuming needs: the shards of
            the optimizer go. None leaves all whole.
        optimizer_keys: Top-level keys of the state that are the optimizer's.
        keep_named: Also those that have a name, whole. False: a name keeps nothing.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: Best | None = None
    keep_optimizer_last: int | None = None
    optimizer_keys: tuple[str, ...] = ("optim", "optimizer", "optimizers")
    keep_named: bool = True

    def __post_init__(self) -> None:
        """Refuse parts of another type, and counts or parts that change nothing beside the others.

        Raises:
            InvalidArgumentError: Says which.
        """
        for name in ("keep_last", "keep_every", "keep_optimizer_last"):
            value = getattr(self, name)
            if value is not None:
                _require_count(name, value)
        # Retention runs in the background, after the first saves: what is wrong must be refused here.
        if not isinstance(self.keep_best, Best | None):
            raise InvalidArgumentError("keep_best must be a Best, such as Best('loss', 2).", value=self.keep_best)
        keys: object = self.optimizer_keys
        if not isinstance(keys, tuple | list) or not all(isinstance(key, str) for key in keys):
            raise InvalidArgumentError(
                "optimizer_keys must be a tuple of top-level keys of the state.", value=self.optimizer_keys
            )
        if self.keep_last is None and (self.keep_every is not None or self.keep_best is not None):
            raise InvalidArgumentError("keep_every and keep_best add to keep_last, which keeps everything by default.")


@dataclass(frozen=True, slots=True)
class Decision:
    """What retention lets go.

    Attributes:
        retire: Steps whose checkpoint goes, ascending.
        thin: Steps whose checkpoint loses its optimizer, ascending; none of `retire`.
    """

    retire: tuple[int, ...]
    thin: tuple[int, ...]


def decide(retention: Retention, candidates: Sequence[Candidate]) -> Decision:
    """Apply a retention to what is live. Deciding again after the decision was carried out changes nothing more."""
    counted = sorted((one for one in candidates if not one.abandoned), key=lambda one: one.step)
    newest_first = [one.step for one in reversed(counted)]
    held = {one.step for one in counted if one.pinned or (retention.keep_named and one.names)}
    kept = held | set(newest_first[: retention.keep_last])
    if retention.keep_every is not None:
        kept |= {step for step in newest_first if step % retention.keep_every == 0}
    if retention.keep_best is not None:
        kept |= _best(retention.keep_best, counted)
    # Of what is kept: what goes must not be counted, or another decision would follow when it is gone.
    whole = held | set([step for step in newest_first if step in kept][: retention.keep_optimizer_last])
    return Decision(
        retire=tuple(one.step for one in counted if one.step not in kept),
        thin=tuple(one.step for one in counted if one.step in kept and one.step not in whole and not one.thinned),
    )


def _best(best: Best, counted: Sequence[Candidate]) -> set[int]:
    values = ((dict(one.metrics).get(best.metric, math.nan), one.step) for one in counted)
    # Of equal values the newer checkpoint is the better one.
    known = [(value if best.largest else -value, step) for value, step in values if not math.isnan(value)]
    return {step for _, step in sorted(known, reverse=True)[: best.count]}


def _require_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise InvalidArgumentError(f"{name} must be an integer above zero.", value=value)
