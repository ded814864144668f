"""Comparison of each rank's state with a checkpoint, before a tensor is read; `state_verdict` decides on them. Pure.

Entries of the checkpoint that one rank has no value for may be those of another rank, as in a pipeline: each rank makes
a bitmap of such entries, and only those in all bitmaps are unexpected.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata

from dcp_remote.common.digests import digest
from dcp_remote.loading.load_options import LoadOptions, Path
from dcp_remote.serialization.state_dict import PER_RANK_KEY
from dcp_remote.serialization.tensors import dtype_name, memory_of

# End of the text of a dtype to which a conversion would lose more than precision.
NOT_CONVERTIBLE = ", which cannot hold such values"

# Names of each kind that a rank sends to the others.
LISTED_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Misfit:
    """Difference between a tensor or object of the checkpoint and the value that the state has under its name."""

    kind: Literal["shape", "dtype", "kind"]  # the property that differs; "kind" is tensor or object
    name: str  # in the state
    saved: str  # property of the checkpoint
    state: str  # property of the state


@dataclass(frozen=True, slots=True)
class StateCheck:
    """Result of comparing one rank's state, sent to the coordinator; the first three lists end after 1,000 names."""

    missing: tuple[str, ...] = ()  # names of values that the checkpoint lacks, without those in `empty`
    empty: tuple[str, ...] = ()  # values on the meta device that are not loaded: no memory holds a value to keep
    misfits: tuple[Misfit, ...] = ()
    uncovered: bytes = b""  # compressed bitmap of the entries of the checkpoint that the state has no value for
    own_left: tuple[str, ...] = ()  # keys of the saved values of this very rank that its state has no `PerRank` for
    unmatched: tuple[str, ...] = ()  # patterns that match nothing
    kept_keys: tuple[str, ...] = ()  # top-level keys below which values stay as they are and none is loaded
    loaded_keys: tuple[str, ...] = ()  # top-level keys below which values are loaded
    has_loaded: bool = True  # True if any value is loaded, or the state has none

    @property
    def is_plain(self) -> bool:
        """True if state and checkpoint have the same names, and all values fit."""
        return self == StateCheck(loaded_keys=self.loaded_keys)

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


@dataclass(frozen=True)
class Comparison:
    """Check of this rank, and what stays with this rank."""

    check: StateCheck
    sources: Mapping[str, str]  # name in the checkpoint of each value that is loaded, by its name in the state
    entries: tuple[str, ...]  # name in the state of each entry, in the checkpoint's order; of those left out, their own
    kept: tuple[str, ...]  # names of values of the state that are not loaded
    excluded: tuple[str, ...]  # names of entries of the checkpoint that the options leave out

    @property
    def skipped_keys(self) -> list[str]:
        """Top-level keys of which the options leave all values out, although the checkpoint has some."""
        saved = {name.partition(".")[0] for name in self.excluded}
        return [key for key in self.check.kept_keys if key in saved]

    def left_out(self, unexpected: bytes) -> list[str]:
        """Return the names of entries that are not loaded: those of `excluded`, and those that the state lacks.

        The bitmap is a verdict's, of the entries that no rank has a value for.
        """
        numbers = np.flatnonzero(decompress_bits(unexpected, len(self.entries))).tolist()
        own = (f"{PER_RANK_KEY}.*.{key}" for key in self.check.own_left)
        return [*self.excluded, *(self.entries[number] for number in numbers), *own]


def compare_state(
    state: Mapping[str, Any],
    paths: Mapping[str, Path],
    entries: Mapping[str, STORAGE_TYPES],
    options: LoadOptions,
    *,
    renamed: Mapping[str, str],
    rank: int | None,
    on_meta: Collection[str],
) -> Comparison:
    """Compare a flattened state, with the paths of its values, with the entries of a checkpoint.

    `renamed` has the name in the state of each entry that `rename` does not leave out. `PerRank` values of the rank are
    below its number; None if the checkpoint has none. Builds no object per chunk.
    """
    origins = {new: name for name, new in renamed.items()}
    chosen_names, unmatched = options.choose(dict.fromkeys([*state, *origins]))
    chosen = set(chosen_names)
    wanted = [name for name in state if name in chosen]
    sources = {name: origins[name] for name in wanted if name in origins}
    missing = [name for name in wanted if name not in origins]
    misfits = [
        misfit
        for name, source in sources.items()
        for misfit in _misfits(name, entries[source], state[name], converts=options.dtype == "convert")
    ]
    tied = _find_tied(missing, state, sources)
    left, own_left, excluded = _find_left(state, entries, renamed, chosen, rank)
    kept_names = tuple(name for name in state if name not in sources and name not in tied)
    kept = {str(paths[name][0]) for name in kept_names if len(paths[name]) > 1}
    loaded = {str(paths[name][0]) for name in sources if len(paths[name]) > 1}
    empty = [name for name in state if name in on_meta and name not in sources]
    check = StateCheck(
        missing=tuple(name for name in missing if name not in on_meta and name not in tied)[:LISTED_MAX],
        empty=tuple(empty[:LISTED_MAX]),
        misfits=tuple(misfits[:LISTED_MAX]),
        uncovered=compress_bits(left),
        own_left=tuple(own_left),
        unmatched=tuple(unmatched),
        kept_keys=tuple(sorted(kept - loaded - {PER_RANK_KEY})),
        loaded_keys=tuple(sorted(loaded - {PER_RANK_KEY})),
        has_loaded=bool(sources) or not state,
    )
    return Comparison(
        check,
        sources,
        entries=tuple(renamed.get(name, name) for name in entries),
        kept=kept_names,
        excluded=tuple(excluded),
    )


def _find_left(
    state: Collection[str],
    entries: Collection[str],
    renamed: Mapping[str, str],
    chosen: Collection[str],
    rank: int | None,
) -> tuple[npt.NDArray[np.bool_], list[str], list[str]]:
    """Return which entries the state lacks, the keys of this rank's own ones among them, and those not chosen.

    Chosen values of other ranks are in none of these.
    """
    left = np.zeros(len(entries), dtype=np.bool_)
    own_left: list[str] = []
    excluded: list[str] = []
    for number, name in enumerate(entries):
        new = renamed.get(name)
        if new is None or new not in chosen:
            excluded.append(name if new is None else new)
            continue
        if new in state:
            continue
        owner = None if rank is None else _owner(new)
        if owner is None:
            left[number] = True
        elif owner == (str(rank), owner[1]):
            own_left.append(owner[1])
    return left, own_left, excluded


def _find_tied(missing: Sequence[str], state: Mapping[str, Any], sources: Collection[str]) -> set[str]:
    """Return the missing names whose memory is loaded under another name, as that of a weight that was tied."""
    places = {memory_of(state[name]) for name in sources} if missing else set()
    return {name for name in missing if (place := memory_of(state[name])) is not None and place in places}


def _misfits(name: str, entry: STORAGE_TYPES, value: Any, *, converts: bool) -> list[Misfit]:
    is_tensor = isinstance(value, torch.Tensor) or hasattr(value, "__create_chunk_list__")
    if not isinstance(entry, TensorStorageMetadata):
        return [Misfit("kind", name, "an object", "a tensor")] if is_tensor else []
    if not is_tensor:
        return [Misfit("kind", name, "a tensor", f"an object ({type(value).__name__})")]
    found: list[Misfit] = []
    if tuple(value.size()) != tuple(entry.size):
        found.append(Misfit("shape", name, str(tuple(entry.size)), str(tuple(value.size()))))
    dtype = getattr(value, "dtype", None)
    saved = entry.properties.dtype
    if isinstance(dtype, torch.dtype) and dtype != saved:
        is_convertible = _is_convertible(saved, dtype)
        if not (converts and is_convertible):
            here = dtype_name(dtype) + ("" if is_convertible else NOT_CONVERTIBLE)
            found.append(Misfit("dtype", name, dtype_name(saved), here))
    return found


def _is_convertible(saved: torch.dtype, dtype: torch.dtype) -> bool:
    """Return whether a conversion rounds at most: no imaginary part, fraction or high bits are lost."""
    if not torch.can_cast(saved, dtype):
        return False
    try:
        torch.iinfo(saved), torch.iinfo(dtype)
    except TypeError:  # at least one of them holds no integers
        return True
    return torch.iinfo(dtype).min <= torch.iinfo(saved).min and torch.iinfo(saved).max <= torch.iinfo(dtype).max


def _owner(name: str) -> tuple[str, str] | None:
    """Return rank and key of a `PerRank` value; None for any other."""
    top, _, rest = name.partition(".")
    rank, _, key = rest.partition(".")
    return (rank, key) if top == PER_RANK_KEY and rank.isdecimal() and key else None


def compress_bits(mask: npt.NDArray[np.bool_]) -> bytes:
    """Return a bitmap as compressed bytes; b"" if no bit is set."""
    return zlib.compress(np.packbits(mask).tobytes(), 1) if mask.any() else b""


def decompress_bits(bitmap: bytes, count: int) -> npt.NDArray[np.bool_]:
    """Return a bitmap of `count` bits that `compress_bits` has made."""
    if not bitmap:
        return np.zeros(count, dtype=np.bool_)
    return np.unpackbits(np.frombuffer(zlib.decompress(bitmap), np.uint8), count=count).astype(np.bool_)
