"""Errors of `dcp.save` and `dcp.load` as themselves, not inside the one that torch makes of the errors of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from dcp_remote.common.text import join_some
from dcp_remote.errors import DcpRemoteError, InvalidArgumentError

# Text of torch's ValueError for two values with one name, before that name (`_nested_dict.py` of torch 2.13). torch
# flattens a state before it gives anything to a writer, which therefore cannot refuse such a state itself.
_DUPLICATE = "duplicated flatten key "


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise the errors of a block's `dcp.save`, `dcp.load` or `dcp.async_save(…).result()` as errors of this package.

        with plain_errors():
            dcp.save(state, storage_writer=RemoteWriter(url))

    torch raises a `CheckpointException`: a `BaseException`, which `except Exception` does not catch, and whose text
    begins with `CheckpointException ranks:dict_keys([0])` and the traceback of each rank. Here the error of the lowest
    rank that failed is raised in its place, and its traceback ends in one line, the message. Costs nothing.

    Raises:
        DcpRemoteError: Error of the lowest rank that failed; `failed_ranks` lists them if rank 0 is not the only one.
            `InvalidArgumentError` in the place of torch's error for two values of a state with one name.
        CheckpointException: An error of a rank is none of this package, as those of templates and planners of torch.
    """
    try:
        yield
    except CheckpointException as failed:
        found = {rank: error for rank, (error, _) in sorted(failed.failures.items())}
        repeated = {rank: name for rank, error in found.items() if (name := _find_repeated_name(error)) is not None}
        errors = found | dict.fromkeys(repeated, _repeated_name_error(dict.fromkeys(repeated.values())))
        first = next(iter(errors.values()), None)
        if not isinstance(first, DcpRemoteError) or not all(
            isinstance(error, DcpRemoteError) for error in errors.values()
        ):
            raise
        ranks = list(errors)
        if ranks != [0]:
            first = first.with_details(failed_ranks=join_some(ranks))
        raise first from None


def _find_repeated_name(error: BaseException) -> str | None:
    """Return the name that torch found twice in a state; None for any other error."""
    text = str(error)
    return text.removeprefix(_DUPLICATE) if type(error) is ValueError and text.startswith(_DUPLICATE) else None


def _repeated_name_error(names: Iterable[str]) -> InvalidArgumentError:
    return InvalidArgumentError(
        "Two values of the state have one name, since torch writes keys as text and joins them by dots; nothing was "
        "saved or loaded. Rename one, such as the key 'a.b' beside the key 'a', or the key '1' beside the number 1.",
        names=", ".join(names),
    )
