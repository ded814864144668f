"""The exception tree: the docstring draws all classes, and every class can be pickled."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from traceback import StackSummary

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from dcp_remote import errors
from dcp_remote.errors import DcpRemoteError


def tree(kind: type[DcpRemoteError] = DcpRemoteError) -> Iterator[type[DcpRemoteError]]:
    """Yield a class and all classes below it."""
    yield kind
    for below in kind.__subclasses__():
        yield from tree(below)


# A class with two bases is found twice.
CLASSES = list(dict.fromkeys(kind for kind in tree() if kind.__module__ == errors.__name__))


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_survives_pickling_both_ways(kind: type[DcpRemoteError]) -> None:
    """Pickling keeps message and details, also with values that cannot be pickled, and inside torch's exception."""
    error = kind(
        "What happened.", key="a b", count=3, ratio=0.5, flag=True, nothing=None, cause=ValueError("x"), odd=iter
    )
    error.__cause__ = RuntimeError(lambda: None)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert again.details == error.details
    assert again.details["cause"] == "ValueError: x"
    crossed = pickle.loads(pickle.dumps(CheckpointException("write", {2: (error, StackSummary())})))
    assert type(crossed.failures[2][0]) is kind
    assert str(error) in str(crossed)


def test_messages_read_what_then_values() -> None:
    """Details that are None are left out, and one whose `str` raises is replaced by its type."""

    class Untellable:
        def __str__(self) -> str:
            raise ValueError

    error = errors.StorageError("It failed.", key="a", size_bytes=3, region=None, odd=Untellable())
    assert str(error) == "It failed. key='a' size_bytes=3 odd='<Untellable>'"
    assert repr(error).startswith('StorageError("It failed.')
    assert str(errors.StorageError("It failed.")) == "It failed."


def test_docstring_draws_the_tree() -> None:
    drawn = re.findall(r"^ {4}(?:[│ ]*[├└]── )?(\w+Error)\b", errors.__doc__ or "", re.MULTILINE)
    assert sorted(drawn) == sorted(kind.__name__ for kind in CLASSES)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.CheckpointNotFoundError, FileNotFoundError),
        (errors.CheckpointExistsError, FileExistsError),
        (errors.ObjectNotFoundError, FileNotFoundError),
        (errors.BucketNotFoundError, FileNotFoundError),
        (errors.InvalidArgumentError, ValueError),
    ],
)
def test_builtin_base_classes(kind: type[DcpRemoteError], builtin: type[Exception]) -> None:
    """Code that knows only the builtin classes can handle these errors."""
    with pytest.raises(builtin):
        raise kind("x")
