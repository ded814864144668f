"""Errors of `dcp.save` and `dcp.load` as themselves, not inside the one that torch makes of the errors of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from dcp_remote.errors import DcpRemoteError

# Ranks that a message lists.
_RANKS_NAMED_MAX = 16


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
        CheckpointException: An error of a rank is none of this package, as those of templates and planners of torch.
    """
    try:
        yield
    except CheckpointException as failed:
        errors = {rank: error for rank, (error, _) in sorted(failed.failures.items())}
        first = next(iter(errors.values()), None)
        if not isinstance(first, DcpRemoteError) or not all(
            isinstance(error, DcpRemoteError) for error in errors.values()
        ):
            raise
        ranks = list(errors)
        if ranks != [0]:
            named = ", ".join(map(str, ranks[:_RANKS_NAMED_MAX]))
            more = f" and {len(ranks) - _RANKS_NAMED_MAX} more" if len(ranks) > _RANKS_NAMED_MAX else ""
            first = type(first)(first.what, **{**first.details, "failed_ranks": named + more})
        raise first from None
