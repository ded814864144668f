"""Comparison of each rank's state with a checkpoint, before a tensor is read, and one error for all ranks. Pure.

Entries of the checkpoint that one rank has no value for may be those of another rank, as in a pipeline: each rank makes
a bitmap of such entries, and only those in all bitmaps are unexpected.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata

from dcp_remote.common.digests import digest
from dcp_remote.common.text import escape_unprintable, format_count
from dcp_remote.errors import DcpRemoteError, InvalidArgumentError, StateMismatchError
from dcp_remote.format.entry_names import near_names, no_match_error
from dcp_remote.loading.selection import Path, Selection
from dcp_remote.serialization.state_dict import PER_RANK_KEY
from dcp_remote.serialization.tensors import dtype_name

# Bounds of the message: names of each kind, characters of a name, ranks.
_SHOWN_MAX = 10
_NAME_CHARACTERS_MAX = 128
_RANKS_NAMED_MAX = 16

# Names of each kind that a rank sends to the others.
_LISTED_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Misfit:
    """Difference between a tensor or object of the checkpoint and the value that the state has under its name.

    Attributes:
        kind: Property that differs; "kind" is tensor or object.
        name: Name in the state.
        saved: Property of the checkpoint.
        state: Property of the state.
    """

    kind: Literal["shape", "dtype", "kind"]
    name: str
    saved: str
    state: str


@dataclass(frozen=True, slots=True)
class StateCheck:
    """Result of comparing one rank's state; lists end after 1,000 names.

    Attributes:
        missing: Names of values that the checkpoint lacks, without those in `empty`.
        empty: Names of values that are not loaded and have no memory to be kept: they are on the meta device.
        misfits: Differences of values that both have.
        uncovered: Compressed bitmap, one bit per entry of the checkpoint, of those that the state has no value for; b""
            if there are none.
        own_left: Top-level keys of the values of this very rank that its state has no `PerRank` for.
        unmatched: Patterns that match nothing.
        kept: Top-level keys below which values stay as they are and none is loaded.
        loaded: Top-level keys below which values are loaded.
        loads: True if a value is loaded at all.
    """

    missing: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    misfits: tuple[Misfit, ...] = ()
    uncovered: bytes = b""
    own_left: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    loaded: tuple[str, ...] = ()
    loads: bool = True

    @property
    def is_plain(self) -> bool:
        """True if state and checkpoint have the same names, and all values fit."""
        return self == StateCheck(loaded=self.loaded)

    @property
    def has_misfits(self) -> bool:
        """True if torch's planner cannot plan the load."""
        return bool(self.misfits or self.empty)

    @property
    def has_own_findings(self) -> bool:
        """True if the state of this rank differs, whatever the other ranks have."""
        return bool(self.missing or self.empty or self.misfits or self.own_left)

    def digest(self) -> bytes:
        """Return a digest by which equal checks of different ranks are recognized; 16 bytes."""
        return digest(repr(self).encode("utf-8", "surrogatepass"))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Decision on the checks of all ranks.

    Attributes:
        error: Error that every rank raises; None if the load goes on.
        untouched: Top-level keys of the state below which no rank loads a value.
        note: Text for the log on the values that stay as they are or are left out; "" if there are none.
    """

    error: DcpRemoteError | None = None
    untouched: frozenset[str] = frozenset()
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """Check of this rank, and what this rank needs of it.

    Attributes:
        check: Check, for the coordinator.
        sources: Name in the checkpoint of each value that is loaded, by its name in the state.
        entries: Name in the state of each entry of the checkpoint, in its order; of those left out, their own.
    """

    check: StateCheck
    sources: Mapping[str, str]
    entries: tuple[str, ...]


def compare_state(
    state: Mapping[str, Any],
    paths: Mapping[str, Path],
    entries: Mapping[str, STORAGE_TYPES],
    selection: Selection,
    *,
    rank: int | None,
    on_meta: Collection[str] = (),
) -> Comparison:
    """Compare a flattened state with the entries of a checkpoint; builds no object per chunk.

    Args:
        state: Values by name.
        paths: Paths of the values by name.
        entries: Entries of the checkpoint by name.
        selection: Options of the load.
        rank: This rank, whose `PerRank` values are below its number; None if nothing in the checkpoint is a `PerRank`.
        on_meta: Names of values that were on the meta device.

    Raises:
        InvalidArgumentError: `rename` is wrong.
    """
    renamed = selection.rename_entries(entries)
    origins = {new: name for name, new in renamed.items()}
    chosen_names, unmatched = selection.choose(dict.fromkeys([*state, *origins]))
    chosen = set(chosen_names)
    sources: dict[str, str] = {}
    missing: list[str] = []
    misfits: list[Misfit] = []
    for name, value in state.items():
        if name not in chosen:
            continue
        if name not in origins:
            missing.append(name)
            continue
        sources[name] = origins[name]
        misfits += _misfits(name, entries[origins[name]], value, is_dtype_free=selection.dtype == "convert")
    left = bytearray(len(entries))
    own_left: list[str] = []
    for number, name in enumerate(entries):
        new = renamed.get(name)
        if new is None or new in state or new not in chosen:
            continue
        owner = None if rank is None else _owner(new)
        if owner is None:
            left[number] = 1
        elif owner == (str(rank), owner[1]):
            own_left.append(owner[1])
    kept = {str(paths[name][0]) for name in state if name not in sources and len(paths[name]) > 1}
    loaded = {str(paths[name][0]) for name in sources if len(paths[name]) > 1}
    empty = [name for name in state if name in on_meta and name not in sources]
    check = StateCheck(
        missing=tuple(name for name in missing if name not in on_meta)[:_LISTED_MAX],
        empty=tuple(empty[:_LISTED_MAX]),
        misfits=tuple(misfits[:_LISTED_MAX]),
        uncovered=_compress(left),
        own_left=tuple(own_left),
        unmatched=tuple(unmatched),
        kept=tuple(sorted(kept - loaded - {PER_RANK_KEY})),
        loaded=tuple(sorted(loaded - {PER_RANK_KEY})),
        loads=bool(sources) or not state,
    )
    return Comparison(check, sources, tuple(renamed.get(name, name) for name in entries))


def _misfits(name: str, entry: STORAGE_TYPES, value: Any, *, is_dtype_free: bool) -> list[Misfit]:
    is_tensor = isinstance(value, torch.Tensor) or hasattr(value, "__create_chunk_list__")
    if not isinstance(entry, TensorStorageMetadata):
        return [Misfit("kind", name, "an object", "a tensor")] if is_tensor else []
    if not is_tensor:
        return [Misfit("kind", name, "a tensor", f"an object ({type(value).__name__})")]
    found: list[Misfit] = []
    if tuple(value.size()) != tuple(entry.size):
        found.append(Misfit("shape", name, str(tuple(entry.size)), str(tuple(value.size()))))
    dtype = getattr(value, "dtype", None)
    if not is_dtype_free and isinstance(dtype, torch.dtype) and dtype != entry.properties.dtype:
        found.append(Misfit("dtype", name, dtype_name(entry.properties.dtype), dtype_name(dtype)))
    return found


def _owner(name: str) -> tuple[str, str] | None:
    """Return rank and key of a `PerRank` value; None for any other."""
    top, _, rest = name.partition(".")
    rank, _, key = rest.partition(".")
    return (rank, key) if top == PER_RANK_KEY and rank.isdecimal() and key else None


def _compress(mask: bytearray) -> bytes:
    return zlib.compress(np.packbits(np.frombuffer(mask, np.uint8)).tobytes(), 1) if any(mask) else b""


def judge(
    checks: Sequence[StateCheck],
    own: Comparison,
    selection: Selection,
    *,
    empty_places: Collection[str] = (),
    thinned: Collection[str] = (),
    **details: object,
) -> Verdict:
    """Decide on the checks of all ranks; called on the coordinator.

    Args:
        checks: Checks of all ranks, by rank; nearly always they are equal.
        own: Comparison of the coordinator.
        selection: Options of the load.
        empty_places: Names of the empty dicts of the coordinator's state.
        thinned: Top-level keys of entries that retention deleted.
        **details: URL and step, for the error.
    """
    distinct = list(dict.fromkeys(checks))
    unmatched = [pattern for pattern in checks[0].unmatched if all(pattern in check.unmatched for check in distinct)]
    if unmatched:
        names = list(dict.fromkeys([*own.entries, *own.check.missing]))
        near = no_match_error(unmatched[0], names, {name: name.split(".") for name in names}).details
        what = "Neither the checkpoint nor the state has a name that matches this pattern."
        return Verdict(error=InvalidArgumentError(what, **near, **details))
    findings = _Findings(distinct, own, thinned)
    is_nothing_loaded = not any(check.loads for check in distinct)
    if findings.is_error(selection) or is_nothing_loaded:
        ranks = [rank for rank, check in enumerate(checks) if check.has_own_findings]
        text = findings.describe(empty_places=empty_places, is_nothing_loaded=is_nothing_loaded)
        return Verdict(error=StateMismatchError(text, **details, **findings.counts(), **_named(ranks, len(checks))))
    untouched = {key for check in distinct for key in check.kept}
    untouched -= {key for check in distinct for key in check.loaded}
    return Verdict(untouched=frozenset(untouched), note=findings.note())


def _named(ranks: Sequence[int], world_size: int) -> dict[str, object]:
    """Return the details that name the ranks whose states differ; nothing if all do."""
    if len(ranks) == world_size:
        return {}
    if len(ranks) == 1:
        return {"rank": ranks[0]}
    more = ", …" if len(ranks) > _RANKS_NAMED_MAX else ""
    return {"ranks": ", ".join(map(str, ranks[:_RANKS_NAMED_MAX])) + more or None}


class _Findings:
    """Findings of all ranks, each once.

    Args:
        checks: Different checks of the ranks.
        own: Comparison of the coordinator.
        thinned: Top-level keys of entries that retention deleted.
    """

    def __init__(self, checks: Iterable[StateCheck], own: Comparison, thinned: Collection[str]) -> None:
        checks = list(checks)
        missing = list(dict.fromkeys(name for check in checks for name in check.missing))
        self._thinned = [name for name in missing if name.partition(".")[0] in thinned]
        self._missing = [name for name in missing if name.partition(".")[0] not in thinned]
        self._empty = list(dict.fromkeys(name for check in checks for name in check.empty))
        self._misfits = list(dict.fromkeys(misfit for check in checks for misfit in check.misfits))
        bits = np.ones(len(own.entries), dtype=np.bool_)
        for check in checks:
            bits &= _decompress(check.uncovered, len(own.entries))
        shared = [own.entries[number] for number in np.flatnonzero(bits).tolist()]
        keys = dict.fromkeys(key for check in checks for key in check.own_left)
        self._unexpected = [*shared, *(f"{PER_RANK_KEY}.*.{key}" for key in keys)]

    def is_error(self, selection: Selection) -> bool:
        """Return whether the options forbid a load."""
        is_missing = selection.missing == "error" and (self._missing or self._thinned)
        is_unexpected = selection.unexpected == "error" and self._unexpected
        return bool(is_missing or is_unexpected or self._empty or self._misfits)

    def counts(self) -> dict[str, int | None]:
        """Return the number of findings of each kind; None for none."""
        kinds = Counter(misfit.kind for misfit in self._misfits)
        return {
            "missing": len(self._missing) + len(self._thinned) + len(self._empty) or None,
            "unexpected": len(self._unexpected) or None,
            **{f"{kind}s": kinds[kind] or None for kind in ("shape", "dtype", "kind")},
        }

    def note(self) -> str:
        """Return a text on the values that stay as they are or are left out; "" if there are none."""
        parts = []
        if kept := [*self._missing, *self._thinned]:
            parts.append(f"{_count(kept)} that the checkpoint lacks stay as they are: {_listed(kept)}")
        if self._unexpected:
            parts.append(f"{_count(self._unexpected)} of the checkpoint are left out: {_listed(self._unexpected)}")
        return ". ".join(parts)

    def describe(self, *, empty_places: Collection[str], is_nothing_loaded: bool) -> str:
        """Return the message: a line for each kind of finding, and the options that allow it."""
        lines = ["The checkpoint does not fit the state; nothing was loaded."]
        if is_nothing_loaded:
            lines.append("No value of the state would be loaded.")
        if self._thinned:
            keys = ", ".join(dict.fromkeys(_shown(name.partition(".")[0]) for name in self._thinned))
            lines.append(
                f"{_count(self._thinned)} missing because retention deleted them (thinned): {keys}. Restore a newer "
                "step, or leave them out of the state."
            )
        if self._missing:
            lines.append(f"{_count(self._missing)} missing in the checkpoint: {self._list_missing()}")
        if self._empty:
            text = f"{_count(self._empty)} on the meta device, with no value to keep: {_listed(self._empty)}"
            lines.append(f"{text}. Allocate them, or load them.")
        if self._unexpected:
            lines.append(f"{_count(self._unexpected)} unexpected, not in the state: {_listed(self._unexpected)}")
            lines += [
                f"{_shown(place)} is empty in the state. An optimizer has no state before its first step: use torch's "
                "get_optimizer_state_dict."
                for place in empty_places
                if any(name.startswith(f"{place}.") for name in self._unexpected)
            ]
        for kind in ("shape", "dtype", "kind"):
            found = [misfit for misfit in self._misfits if misfit.kind == kind]
            if found:
                texts = [f"{_shown(one.name)} (saved: {one.saved}, state: {one.state})" for one in found[:_SHOWN_MAX]]
                lines.append(f"{_count(found)} of another {kind}: {_joined(texts, len(found))}")
        return "\n".join([*lines, f"Options: {'; '.join(self._options())}."])

    def _list_missing(self) -> str:
        # A value whose name has changed is among those that no state has.
        texts = []
        for name in self._missing[:_SHOWN_MAX]:
            near = ", ".join(map(_shown, near_names(name, self._unexpected)))
            texts.append(f"{_shown(name)} (near: {near})" if near else _shown(name))
        return _joined(texts, len(self._missing))

    def _options(self) -> Iterator[str]:
        if self._missing or self._thinned:
            yield 'missing="keep" keeps what the state has'
        if self._unexpected:
            yield 'unexpected="ignore" leaves out what the state lacks'
        if self._missing and self._unexpected:
            yield 'rename={"name in the checkpoint": "name in the state"} takes names or their first parts'
        if any(misfit.kind == "dtype" for misfit in self._misfits):
            yield 'dtype="convert" converts to the dtypes of the state'
        yield 'exclude="pattern" leaves values as they are, whether saved or not'


def _decompress(bitmap: bytes, count: int) -> npt.NDArray[np.bool_]:
    if not bitmap:
        return np.zeros(count, dtype=np.bool_)
    return np.unpackbits(np.frombuffer(zlib.decompress(bitmap), np.uint8), count=count).astype(np.bool_)


def _count(found: Sequence[object]) -> str:
    values = format_count(len(found), "value")
    return f"{values} or more" if len(found) >= _LISTED_MAX else values


def _listed(names: Sequence[str]) -> str:
    return _joined([_shown(name) for name in names[:_SHOWN_MAX]], len(names))


def _joined(texts: Sequence[str], count: int) -> str:
    return "; ".join(texts) + (f"; and {count - len(texts)} more" if count > len(texts) else "")


def _shown(name: str) -> str:
    text = escape_unprintable(name)
    return text if len(text) <= _NAME_CHARACTERS_MAX else f"{text[:_NAME_CHARACTERS_MAX]}…"
