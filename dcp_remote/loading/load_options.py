"""`LoadOptions`: which entries a load takes, their names in the state, and its rules for differences. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.entry_names import match_names
from dcp_remote.loading.prefix_rename import PrefixRename
from dcp_remote.serialization.name_links import NameLink
from dcp_remote.storage.location import require_choice

Patterns: TypeAlias = str | Sequence[str]
Rename: TypeAlias = Mapping[str, str | None] | Callable[[str], str | None]
Path: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of a load, as `RemoteLoadPlanner` describes them; wrong values raise `InvalidArgumentError`.

    Patterns are kept as tuples. `exclude` takes precedence over `include`.
    """

    include: Patterns | None = None
    exclude: Patterns = ()
    rename: Rename | None = None
    missing: Literal["error", "keep"] = "error"
    unexpected: Literal["error", "ignore"] = "error"
    dtype: Literal["error", "convert"] = "error"

    def __post_init__(self) -> None:
        require_choice("missing", self.missing, ("error", "keep"))
        require_choice("unexpected", self.unexpected, ("error", "ignore"))
        hint = " The argument converts to the dtypes of the state; `load` takes a torch.dtype."
        require_choice("dtype", self.dtype, ("error", "convert"), hint)
        if self.rename is not None and not callable(self.rename):
            _require_texts(self.rename)
        if self.include is not None:
            object.__setattr__(self, "include", _to_patterns("include", self.include))
        object.__setattr__(self, "exclude", _to_patterns("exclude", self.exclude))

    @property
    def given(self) -> list[str]:
        """Names of the options that differ from their defaults."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]

    @property
    def comparable(self) -> dict[str, object]:
        """Options that differ from their defaults and can be compared between ranks: all but functions."""
        values = {name: getattr(self, name) for name in self.given if not callable(getattr(self, name))}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}

    def rename_entries(
        self, names: Collection[str], links: Sequence[NameLink] = ()
    ) -> tuple[dict[str, str], dict[str, Mapping[str, str | None]]]:
        """Return the name in the state of each entry of the checkpoint, without those that `rename` leaves out.

        The second value has the new names of parameters by their old ones, by the linked place; for a mapping alone.

        Links are places of the state that repeat the names of a model. A mapping renames a parameter there as well; a
        function is called for these entries itself. A name of the mapping that no entry has, and two entries with one
        name, are refused.
        """
        if self.rename is None:
            return {name: name for name in names}, {}
        rename = self.rename if callable(self.rename) else PrefixRename(self.rename, names, links)
        renamed: dict[str, str] = {}
        sources: dict[str, str] = {}
        for name in names:
            try:
                new: object = rename(name)  # a user's function may return anything
            except Exception as error:
                raise InvalidArgumentError(
                    "rename raised an error for this entry of the checkpoint. A function must return a name for each, "
                    "or None for an entry to leave out.",
                    name=name,
                    error=f"{type(error).__name__}: {error}",
                ) from error
            if new is None:
                continue
            if not isinstance(new, str) or not new:
                raise InvalidArgumentError("rename must return a name, or None for an entry to leave out.", name=name)
            if new in sources:
                raise InvalidArgumentError(
                    "rename gives two entries of the checkpoint one name. Leave the other out.",
                    name=new,
                    entries=f"{sources[new]}, {name}",
                ).advise(rename="rename={name: None} leaves an entry out")
            renamed[name], sources[new] = new, name
        if not isinstance(rename, PrefixRename):
            return renamed, {}
        rename.require_used()
        return renamed, rename.parameters()

    def choose(self, names: Collection[str]) -> tuple[Collection[str], list[str]]:
        """Return the names that are chosen, and the patterns that match none of the names."""
        if self.include is None and not self.exclude:
            return names, []
        included, unmatched = (names, []) if self.include is None else match_names(names, self.include)
        excluded, more = match_names(names, self.exclude)
        return [name for name in names if name in included and name not in excluded], unmatched + more

    def keep(self, names: Collection[str], saved: Collection[str]) -> set[str]:
        """Return those of these names in the state that stay as they are; `saved` are the names of all entries."""
        if self.include is None and not self.exclude and self.missing == "error":
            return set()
        chosen = set(self.choose(dict.fromkeys([*names, *saved]))[0])
        return {name for name in names if name not in chosen or (self.missing == "keep" and name not in saved)}


def rename_path(path: Path, new: str) -> Path:
    """Return the path of an entry whose name, the parts of its path joined by dots, was changed to `new`.

    Parts at the end and at the beginning that the new name has as well stay as they are. If they leave one part of the
    path, what is left of the name replaces that part; otherwise it is split at its dots.
    """
    parts: list[str | int] = list(path)
    tail: list[str | int] = []
    while parts and new and (new == str(parts[-1]) or new.endswith(f".{parts[-1]}")):
        tail.insert(0, parts.pop())
        new = new[: -len(str(tail[0]))].removesuffix(".")
    head: list[str | int] = []
    while parts and new.startswith(f"{parts[0]}."):
        head.append(parts.pop(0))
        new = new[len(str(head[-1])) + 1 :]
    middle: list[str | int] = [new] if len(parts) == 1 else [*new.split(".")]
    if len(parts) == 1 and isinstance(parts[0], int) and new.isdecimal():
        middle = [int(new)]  # a place in a list
    return (*head, *(middle if new else []), *tail)


def _to_patterns(name: str, patterns: Any) -> tuple[str, ...]:
    found = (patterns,) if isinstance(patterns, str) else patterns
    if not isinstance(found, Collection) or not all(isinstance(pattern, str) for pattern in found):
        raise InvalidArgumentError(
            f"{name} takes a name or pattern such as 'model.*', or a list of them.", **{name: patterns}
        )
    return tuple(found)


def _require_texts(rename: Any) -> None:
    if not isinstance(rename, Mapping) or not all(
        isinstance(old, str) and isinstance(new, str | None) for old, new in rename.items()
    ):
        raise InvalidArgumentError(
            "rename takes a dict of names or prefixes in the checkpoint to those in the state (None leaves entries "
            "out), or a function of a name in the checkpoint.",
            rename=rename,
        )
