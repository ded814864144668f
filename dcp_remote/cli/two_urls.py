"""Stores of commands that take two URLs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeAlias

from dcp_remote.cli.arguments import AddPair, argument, parse_setting
from dcp_remote.storage import ObjectStore, open_store
from dcp_remote.storage.url import is_remote, parse_url

FirstOptions: TypeAlias = Annotated[
    Mapping[str, object] | None,
    argument(
        "--first-option",
        type=parse_setting,
        action=AddPair,
        metavar="NAME=VALUE",
        help="storage option of the first URL alone, to which no other option applies then; repeatable",
    ),
]


def open_two(
    first: str, second: str, first_options: Mapping[str, object] | None, options: Mapping[str, object] | None
) -> tuple[ObjectStore, ObjectStore]:
    """Open the stores of two URLs. Sends no request.

    Without options of its own the first store shares those of the second if both are of one kind, and has them alone if
    the second is a folder.
    """
    if first_options is not None:
        return open_store(first, first_options), open_store(second, options)
    is_one_kind = parse_url(first).scheme == parse_url(second).scheme
    of_first = options if is_one_kind or not is_remote(second) else None
    return open_store(first, of_first), open_store(second, options if is_one_kind or is_remote(second) else None)
