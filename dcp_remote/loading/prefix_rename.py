"""PrefixRename: other names for entries of a checkpoint, by their first parts, and for what repeats the names. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.entry_names import near_names
from dcp_remote.serialization.name_links import NameLink


class PrefixRename:
    """Mapping of names and prefixes as a function of a name; the longest prefix that ends before a dot applies.

    A parameter that gets another name below its model gets that name below its optimizers and averages as well, unless
    the mapping has a prefix for these entries themselves. None in the place of a name leaves entries out.
    """

    def __init__(
        self, mapping: Mapping[str, str | None], names: Collection[str], links: Sequence[NameLink] = ()
    ) -> None:
        """Find the parameters that get another name: one pass over all names for each linked model."""
        self._given = {key.rstrip(".") or key: key for key in mapping}
        self._mapping = {
            prefix: value if value is None else value.rstrip(".")
            for prefix, value in zip(self._given, mapping.values(), strict=True)
        }
        self._lengths = {len(prefix) for prefix in self._mapping}
        self._names = names
        self._used: set[str] = set()
        renamed = {model: self._parameters_renamed(model) for model in dict.fromkeys(link.model for link in links)}
        self._copies = [
            (link.copy, renamed[link.model], {len(name) for name in renamed[link.model]})
            for link in links
            if renamed[link.model]
        ]

    def __call__(self, name: str) -> str | None:
        """Return the name in the state; None if the entry is left out."""
        prefix = _longest_prefix(name, self._mapping, self._lengths)
        if prefix is not None:
            self._used.add(prefix)
        new = self._replace(name, prefix)
        if new is None:
            return None
        for copy, renamed, lengths in self._copies:
            if not new.startswith(copy) or (prefix is not None and (self._mapping[prefix] or "").startswith(copy)):
                continue
            rest = new[len(copy) :]
            parameter = _longest_prefix(rest, renamed, lengths)
            if parameter is not None:
                other = renamed[parameter]
                return None if other is None else f"{copy}{other}{rest[len(parameter) :]}"
        return new

    def parameters(self) -> dict[str, Mapping[str, str | None]]:
        """Return the new names of parameters by their old ones, by the place that repeats them."""
        return {copy: renamed for copy, renamed, _ in self._copies}

    def require_used(self) -> None:
        """Refuse a prefix that no entry has, after all names were renamed; the error gives similar names."""
        for prefix, given in self._given.items():
            if prefix not in self._used:
                prefixes = _prefixes(self._names)
                above = _longest_prefix(prefix.rpartition(".")[0], prefixes, range(1, len(prefix)))
                near = near_names(prefix, [*self._names, *prefixes]) or ([above] if above else [])
                raise InvalidArgumentError(
                    "rename takes names of the checkpoint, or their first parts up to a dot; no entry has this one. "
                    "If an earlier start of this job has renamed it, leave rename out.",
                    name=given,
                    near=", ".join(near) or None,
                )

    def _replace(self, name: str, prefix: str | None) -> str | None:
        if prefix is None:
            return name
        value = self._mapping[prefix]
        return None if value is None else (value + name[len(prefix) :]).removeprefix("." if not value else "")

    def _parameters_renamed(self, model: str) -> dict[str, str | None]:
        """Return the new names of entries by their old ones, both below the model; None for those left out."""
        places = [f"{prefix}." for prefix, value in self._mapping.items() if value is not None and f"{value}." == model]
        if model.removesuffix(".") not in self._mapping:
            places.append(model)
        renamed: dict[str, str | None] = {}
        for name in self._names:
            for place in places:
                if not name.startswith(place):
                    continue
                prefix = _longest_prefix(name, self._mapping, self._lengths)
                old, new = name[len(place) :], self._replace(name, prefix)
                if new is None:
                    # A prefix for the whole model says nothing of its parameters.
                    if prefix is not None and len(prefix) >= len(place):
                        renamed[old] = None
                elif new.startswith(model) and new[len(model) :] != old:
                    renamed[old] = new[len(model) :]
        return renamed


def _longest_prefix(name: str, known: Collection[str], lengths: Collection[int]) -> str | None:
    """Return the longest part of a name up to a dot, or the name itself, that is known; None if none is."""
    stop = len(name)
    while stop > 0:
        if stop in lengths and (prefix := name[:stop]) in known:
            return prefix
        stop = name.rfind(".", 0, stop)
    return None


def _prefixes(names: Iterable[str]) -> list[str]:
    """Return the first parts of names, up to a dot; those of up to 128 characters, since names may be hostile."""
    return sorted({name[:stop] for name in names for stop, sign in enumerate(name[:128]) if sign == "." and stop})
