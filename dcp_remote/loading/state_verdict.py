"""Decision on the comparisons of all ranks' states with a checkpoint: one error for all ranks, or one warning. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dcp_remote.common.text import escape_unprintable, format_count, join_some
from dcp_remote.errors import DcpRemoteError, InvalidArgumentError, StateMismatchError
from dcp_remote.format.entry_names import near_names, no_match_error
from dcp_remote.loading.key_renames import find_key_renames, find_prefix_renames
from dcp_remote.loading.load_options import LoadOptions
from dcp_remote.loading.state_check import (
    LISTED_MAX,
    NOT_CONVERTIBLE,
    Comparison,
    StateCheck,
    compress_bits,
    decompress_bits,
)
from dcp_remote.serialization.state_dict import PER_RANK_KEY

# Bounds of the message: names of each kind, characters of a name.
_SHOWN_MAX = 10
_NAME_CHARACTERS_MAX = 128

# Names below a top-level key that only state or checkpoint has, up to which each is named.
_NAMES_OF_KEY_MAX = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """Decision on the checks of all ranks."""

    error: DcpRemoteError | None = None  # error that every rank raises
    untouched: frozenset[str] = frozenset()  # top-level keys of the state below which no rank loads a value
    left_out: bytes = b""  # compressed bitmap of the entries of the checkpoint that no rank has a value for
    warning: str = ""  # text on the values that `missing` keeps and `unexpected` leaves out


def judge(
    checks: Sequence[StateCheck],
    own: Comparison,
    options: LoadOptions,
    *,
    empty_places: Collection[str],
    thinned: Collection[str],
    **details: object,
) -> Verdict:
    """Decide on the checks of all ranks, by rank, which are nearly always equal; called on the coordinator.

    `own` is the coordinator's comparison, `empty_places` the names of empty dicts of its state; `thinned` are top-level
    keys of entries that retention deleted; URL and step are the details of an error.
    """
    distinct = list(dict.fromkeys(checks))
    unmatched = [pattern for pattern in checks[0].unmatched if all(pattern in check.unmatched for check in distinct)]
    if unmatched:
        names = list(dict.fromkeys([*own.entries, *own.check.missing]))
        near = no_match_error(unmatched[0], names, {name: name.split(".") for name in names}).details
        what = "Neither the checkpoint nor the state has a name that matches this pattern. Correct the pattern."
        return Verdict(error=InvalidArgumentError(what, **near, **details))
    findings = _Findings(distinct, own, empty_places, thinned)
    if findings.is_error(options):
        ranks = [rank for rank, check in enumerate(checks) if check.has_own_findings]
        details |= findings.counts() | _named(ranks, len(checks))
        return Verdict(error=StateMismatchError(findings.describe(), **details).advise(**findings.advice()))
    untouched = {key for check in distinct for key in check.kept_keys}
    untouched -= {key for check in distinct for key in check.loaded_keys}
    return Verdict(untouched=frozenset(untouched), left_out=findings.left_out, warning=findings.warning())


def _is_optimizers(place: str, below: Iterable[str]) -> bool:
    """Return whether a checkpoint's values below a place of the state are states of an optimizer."""
    parts = {place.rpartition(".")[2], *(name[len(place) + 1 :].partition(".")[0] for name in below)}
    return not parts.isdisjoint({"state", "param_groups"})


def _is_of_optimizer(name: str) -> bool:
    """Return whether a name may be that of a value of an optimizer."""
    return not {"state", "param_groups"}.isdisjoint(name.split(".")[1:-2])


def _named(ranks: Sequence[int], world_size: int) -> dict[str, object]:
    """Return the details that name the ranks whose states differ; nothing if all do."""
    if len(ranks) == world_size:
        return {}
    if len(ranks) == 1:
        return {"rank": ranks[0]}
    return {"ranks": join_some(ranks) or None}


class _Findings:
    """Findings of all ranks, each once, of their different checks."""

    def __init__(
        self, checks: Sequence[StateCheck], own: Comparison, empty_places: Collection[str], thinned: Collection[str]
    ) -> None:
        missing = list(dict.fromkeys(name for check in checks for name in check.missing))
        self._thinned = [name for name in missing if _top(name) in thinned]
        self._missing = [name for name in missing if _top(name) not in thinned]
        self._empty = list(dict.fromkeys(name for check in checks for name in check.empty))
        self._misfits = list(dict.fromkeys(misfit for check in checks for misfit in check.misfits))
        bits = np.ones(len(own.entries), dtype=np.bool_)
        for check in checks:
            bits &= decompress_bits(check.uncovered, len(own.entries))
        shared = [own.entries[number] for number in np.flatnonzero(bits).tolist()]
        keys = dict.fromkeys(key for check in checks for key in check.own_left)
        self._unexpected = [*shared, *(f"{PER_RANK_KEY}.*.{key}" for key in keys)]
        self.left_out = compress_bits(bits)
        self._saved_tops = set(map(_top, own.entries))
        self._state_tops = {key for check in checks for key in (*check.loaded_keys, *check.kept_keys)}
        self._is_state_empty = not (own.sources or own.kept or self._state_tops or missing)
        self._is_nothing_loaded = not any(check.has_loaded for check in checks)
        self._renames = find_key_renames(
            [name for name in self._missing if _top(name) not in self._saved_tops],
            [name for name in shared if _top(name) not in self._state_tops],
        )
        # Names that no renamed key explains.
        renamed = {saved for found in self._renames.values() for saved in found}
        self._lost = [name for name in self._missing if _top(name) not in self._renames]
        self._new = [name for name in self._unexpected if _top(name) not in renamed]
        self._empty_places = empty_places

    def is_error(self, options: LoadOptions) -> bool:
        """Return whether the options forbid the load, or no rank would load a value."""
        is_missing = options.missing == "error" and (self._missing or self._thinned)
        is_unexpected = options.unexpected == "error" and self._unexpected
        return bool(is_missing or is_unexpected or self._empty or self._misfits or self._is_nothing_loaded)

    def counts(self) -> dict[str, int | None]:
        """Return the number of findings of each kind; None for none."""
        kinds = Counter(misfit.kind for misfit in self._misfits)
        return {
            "missing": len(self._missing) + len(self._thinned) + len(self._empty) or None,
            "unexpected": len(self._unexpected) or None,
            **{f"{kind}s": kinds[kind] or None for kind in ("shape", "dtype", "kind")},
        }

    def warning(self) -> str:
        """Return a text on the values that stay as they are or are left out; "" if there are none."""
        parts = []
        if kept := [*self._missing, *self._thinned]:
            parts.append(f"Kept {_count(kept)} that the checkpoint lacks: {self._listed_missing(kept)}.")
        if left := self._unexpected:
            parts.append(
                f"Left out {_count(left, is_bounded=False)} of the checkpoint: {self._listed_unexpected(left)}."
            )
        parts += self._rename_hints()
        return " ".join(parts)

    def describe(self) -> str:
        """Return the message: a line for each kind of finding."""
        lines = ["The checkpoint does not fit the state; nothing was loaded."]
        if self._is_state_empty:
            lines.append(
                "The state has no values. Put into it what to load, under the keys of the checkpoint: "
                '{"model": model, "optim": optimizer}, or training_state(model=model, optimizer=optimizer).'
            )
        elif self._is_nothing_loaded:
            lines.append("No value of the state would be loaded.")
        lines += self._rename_hints()
        if self._thinned:
            keys = ", ".join(dict.fromkeys(_shown(_top(name)) for name in self._thinned))
            lines.append(
                f"{_count(self._thinned)} missing because retention deleted them (thinned): {keys}. Restore a newer "
                "step, or leave them out of the state."
            )
        if self._lost:
            names = self._listed_missing(self._lost, is_near=True)
            lines.append(f"{_count(self._lost)} missing in the checkpoint: {names}")
        if self._empty:
            text = f"{_count(self._empty)} on the meta device, with no value to keep: {_listed(self._empty)}"
            lines.append(f"{text}. Allocate them, or load them.")
        if self._new:
            count = _count(self._new, is_bounded=False)
            lines.append(f"{count} unexpected, not in the state: {self._listed_unexpected(self._new)}")
            for place, below in self._places.items():
                kind = "empty" if place in self._empty_places else "one value"
                count = _count(below, is_bounded=False)
                lines.append(f"{_shown(place)} is {kind} in the state, and the checkpoint has {count} below it.")
        for kind in ("shape", "dtype", "kind"):
            found = [misfit for misfit in self._misfits if misfit.kind == kind]
            if found:
                texts = [f"{_shown(one.name)} (saved: {one.saved}, state: {one.state})" for one in found[:_SHOWN_MAX]]
                lines.append(f"{_count(found)} of another {kind}: {_joined(texts, len(found))}")
        return "\n".join(lines)

    def advice(self) -> dict[str, str]:
        """Return the options that allow the findings, as the advice of an error."""
        options = {}
        grown = {place: below for place, below in self._places.items() if not _is_optimizers(place, below)}
        if set(self._places).difference(grown):
            options["state"] = (
                "an optimizer has no state before its first step: put the optimizer itself into the state, or use "
                "torch's get_optimizer_state_dict; if it is there, make it with the class and options that were saved"
            )
        if self._lost or self._thinned:
            options["missing"] = 'missing="keep" keeps what the state has'
        if self._new:
            options["unexpected"] = 'unexpected="ignore" leaves out what the state lacks'
        if self._lost and self._new:
            pairs = ", ".join(f'"{_shown(saved)}": "{_shown(name)}"' for saved, name in self._prefixes.items())
            options["rename"] = (
                f"rename={{{pairs}}} gives the names of the checkpoint their names in the state"
                if pairs
                else 'rename={"name in the checkpoint": "name in the state"} takes names or their first parts'
            )
        if any(misfit.kind == "dtype" and not misfit.state.endswith(NOT_CONVERTIBLE) for misfit in self._misfits):
            options["dtype"] = 'dtype="convert" converts to the dtypes of the state'
        return options | {"exclude": self._exclude_advice(grown)}

    def _exclude_advice(self, grown: Mapping[str, Collection[str]]) -> str:
        """Return the advice on `exclude`; `grown` has the values below each place of the state that has grown."""
        found = {*self._lost, *self._new, *self._misfits, *self._thinned, *self._empty}
        if grown and not found.difference(grown, *grown.values()) and not self._is_nothing_loaded:
            first = next(iter(grown))
            place = _shown(first)
            pattern = f'"{place}.*"' if first in self._empty_places else f'["{place}", "{place}.*"]'
            return (
                f'exclude={pattern} restores the rest, dcp_remote.load(…, keys="{place}.*") returns these values, and '
                "a dict, list or object that grows comes back whole if Opaque(...) is around it when it is saved"
            )
        return 'exclude="pattern" leaves values as they are, whether saved or not'

    def _rename_hints(self) -> list[str]:
        pairs = {
            key: [f'"{_shown(saved)}": "{_shown(key)}"' for saved in found] for key, found in self._renames.items()
        }
        hints = [
            f"The names below {_shown(key)} in the state are those below several keys of the checkpoint: pass "
            f"rename={{{'} or {'.join(found)}}}, and exclude the others, or put them into the state."
            for key, found in pairs.items()
            if len(found) > 1
        ]
        if single := [found[0] for found in pairs.values() if len(found) == 1]:
            keys = "A top-level key has" if len(single) == 1 else "Top-level keys have"
            hints.append(f"{keys} another name in the checkpoint: pass rename={{{', '.join(single)}}}.")
        return hints

    @cached_property
    def _prefixes(self) -> dict[str, str]:
        """First parts of names of the checkpoint, with those of the state, that explain what is missing."""
        # The states of an optimizer follow the names of their parameters, which `rename` gives.
        lost, new = ([name for name in names if not _is_of_optimizer(name)] for names in (self._lost, self._new))
        # But they do not follow where a whole top-level key moves down.
        has_optimizer = len(lost) + len(new) < len(self._lost) + len(self._new)
        return find_prefix_renames(lost, new, whole_keys=not has_optimizer, is_cut=len(self._missing) >= LISTED_MAX)

    @cached_property
    def _places(self) -> dict[str, list[str]]:
        """Values of the checkpoint below each empty dict and each single value of the state, if any."""
        places: dict[str, list[str]] = {place: [] for place in (*self._empty_places, *self._missing)}
        for name in self._unexpected:
            for place in itertools.accumulate(name.split(".")[:-1], "{}.{}".format):
                if place in places:
                    places[place].append(name)
        return {place: below for place, below in places.items() if below}

    def _listed_missing(self, names: Sequence[str], *, is_near: bool = False) -> str:
        # A value whose name has changed is among those that no state has.
        def near(name: str) -> list[str]:
            return near_names(name, self._unexpected) if is_near and not self._prefixes else []

        return _listed(names, whole={_top(name) for name in names} - self._saved_tops, near=near)

    def _listed_unexpected(self, names: Sequence[str]) -> str:
        missing = {_top(name) for name in self._missing}
        return _listed(names, whole={_top(name) for name in names} - self._state_tops - missing)


def _count(found: Sequence[object], *, is_bounded: bool = True) -> str:
    """Return the number of values; of a list that a rank has cut off, the least number."""
    values = format_count(len(found), "value")
    return f"{values} or more" if is_bounded and len(found) >= LISTED_MAX else values


def _listed(
    names: Sequence[str], *, whole: Collection[str] = (), near: Callable[[str], list[str]] | None = None
) -> str:
    """Return names as a text: the first ones, with those near them, and one text for all names of a whole key."""
    numbers = Counter(_top(name) for name in names)
    texts: dict[str, int] = {}
    for name in names:
        top = _top(name)
        if top in whole and top != PER_RANK_KEY and numbers[top] > _NAMES_OF_KEY_MAX:
            texts.setdefault(f"{_shown(top)}.* ({format_count(numbers[top], 'value')})", numbers[top])
        elif len(texts) < _SHOWN_MAX:
            similar = ", ".join(map(_shown, near(name))) if near is not None else ""
            texts[f"{_shown(name)} (near: {similar})" if similar else _shown(name)] = 1
    shown = list(texts)[:_SHOWN_MAX]
    return _joined(shown, len(names), sum(texts[text] for text in shown))


def _joined(texts: Sequence[str], count: int, described: int | None = None) -> str:
    """Return texts in one, with the number of values that they do not describe; by default each describes one."""
    more = count - (len(texts) if described is None else described)
    return "; ".join(texts) + (f"; and {more} more" if more > 0 else "")


def _top(name: str) -> str:
    return name.partition(".")[0]


def _shown(name: str) -> str:
    text = escape_unprintable(name)
    return text if len(text) <= _NAME_CHARACTERS_MAX else f"{text[:_NAME_CHARACTERS_MAX]}…"
