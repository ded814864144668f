"""Errors of `dcp.save` and `dcp.load` as a user reads them: the last line of a traceback is ours, whole."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from dcp_remote import RemoteReader, RemoteWriter, plain_errors
from dcp_remote.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DcpRemoteError,
    InvalidArgumentError,
    SaveFailedError,
)

CALLS: dict[str, tuple[Callable[[], object], type[DcpRemoteError]]] = {
    "save": (
        lambda: dcp.save({"a": torch.ones(2)}, storage_writer=RemoteWriter("memory://torch-errors"), no_dist=True),
        CheckpointExistsError,
    ),
    "load": (
        lambda: dcp.load({"a": torch.ones(2)}, storage_reader=RemoteReader("memory://torch-nothing"), no_dist=True),
        CheckpointNotFoundError,
    ),
}


@pytest.fixture(autouse=True)
def _saved() -> None:
    writer = RemoteWriter("memory://torch-errors", overwrite=True)
    dcp.save({"a": torch.ones(2)}, storage_writer=writer, no_dist=True)


@pytest.mark.parametrize("call", CALLS)
def test_the_last_line_is_the_message(call: str) -> None:
    """Fail a save and a load: torch's text begins with its own line, which no reader or writer can change."""
    act, kind = CALLS[call]
    with pytest.raises(CheckpointException) as caught:
        act()
    ((error, _),) = caught.value.failures.values()
    assert type(error) is kind
    lines = "".join(traceback.format_exception(caught.value)).rstrip().splitlines()
    assert lines[-1] == f"dcp_remote.errors.{kind.__name__}: {error}"
    assert str(caught.value).splitlines()[0] == "CheckpointException ranks:dict_keys([0])"


@pytest.mark.parametrize("call", CALLS)
def test_plain_errors(call: str) -> None:
    """Fail in a block of `plain_errors`: the error is ours, and torch's text appears nowhere."""
    act, kind = CALLS[call]
    with pytest.raises(kind) as caught, plain_errors():
        act()
    text = "".join(traceback.format_exception(caught.value))
    assert text.rstrip().splitlines()[-1] == f"dcp_remote.errors.{kind.__name__}: {caught.value}"
    assert "CheckpointException" not in text.replace("except CheckpointException", "")


def _fail(*errors: BaseException | None) -> None:
    """Raise what torch raises when these ranks failed."""
    raise CheckpointException(
        "step", {rank: _wrap_exception(error) for rank, error in enumerate(errors) if error is not None}
    )


def test_plain_errors_of_several_ranks() -> None:
    """Fail on ranks 1 and 2: the error of rank 1 is raised, and lists both."""
    with pytest.raises(SaveFailedError) as caught, plain_errors():
        _fail(None, SaveFailedError("The disk is full.", rank=1), SaveFailedError("The disk is full.", rank=2))
    assert str(caught.value) == "The disk is full. rank=1 failed_ranks='1, 2'"
    with pytest.raises(SaveFailedError, match=r"'0, 1, .*, 15 and 4 more'"), plain_errors():
        _fail(*[SaveFailedError("The disk is full.")] * 20)


def test_two_values_with_one_name() -> None:
    """Save a state in which torch finds one name twice: the error is ours, and names them of all ranks."""
    state = {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}
    with pytest.raises(InvalidArgumentError) as caught, plain_errors():
        dcp.save(state, storage_writer=RemoteWriter("memory://torch-duplicate"), no_dist=True)
    text = "".join(traceback.format_exception(caught.value))
    last = text.rstrip().splitlines()[-1]
    assert last.startswith("dcp_remote.errors.InvalidArgumentError: Two values of the state have one name, ")
    assert "Rename one" in last
    assert last.endswith("names='a.b'")
    assert "duplicated flatten key" not in text
    with pytest.raises(InvalidArgumentError) as caught, plain_errors():
        _fail(None, *[ValueError(f"duplicated flatten key {name}") for name in ("x.1", "y.2", "x.1")])
    assert caught.value.details == {"names": "x.1, y.2", "failed_ranks": "1, 2, 3"}


@pytest.mark.parametrize(
    "others",
    [
        (KeyError("a"),),
        (SaveFailedError("ours"), KeyError("a")),
        (ValueError("duplicated flatten key x"), ValueError("another")),
    ],
)
def test_errors_of_others_stay_as_they_are(others: tuple[BaseException, ...]) -> None:
    """Fail with an error that is not ours, whose traceback is needed."""
    with pytest.raises(CheckpointException) as caught, plain_errors():
        _fail(*others)
    assert len(caught.value.failures) == len(others)


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), plain_errors():
        raise KeyError
