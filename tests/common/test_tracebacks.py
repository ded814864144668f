"""Tracebacks without the frames of the package: of its errors, and of those of a user's code."""

from __future__ import annotations

import json
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_remote
from dcp_remote import CheckpointManager, load
from dcp_remote.common.tracebacks import FULL_NAME, hides_frames
from dcp_remote.errors import CheckpointExistsError, CheckpointNotFoundError, StorageError

# Source of a function of the package.
IN_A_THREAD = """
def run(function):
    with ThreadPoolExecutor(1) as threads:
        threads.submit(function).result()
"""


@pytest.fixture(autouse=True)
def _as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FULL_NAME, raising=False)


def functions_of(error: BaseException) -> list[str]:
    """Return the file and the function of each frame, the innermost last; of this file the function alone."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{Path(one.filename).name} {one.name}".removeprefix("test_tracebacks.py ") for one in frames]


def test_of_a_call(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError) as caught:
        load(tmp_path / "run")
    assert functions_of(caught.value) == ["test_of_a_call"]


def test_of_a_save_in_the_background(tmp_path: Path) -> None:
    """Save a step again: the error of the thread is raised at the line that waits for it."""
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"w": torch.ones(1)})
        with pytest.raises(CheckpointExistsError) as caught:
            checkpoints.save(1, {"w": torch.ones(1)}, exist_ok=False, wait=True)
        assert functions_of(caught.value) == ["test_of_a_save_in_the_background"]


def test_on_request_all_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FULL_NAME, "1")
    with pytest.raises(CheckpointNotFoundError) as caught:
        load(tmp_path / "run")
    assert {"tracebacks.py call", "load.py load", "lookup.py read_manifest"} < set(functions_of(caught.value))


def test_frames_of_others_stay() -> None:
    """Raise in a user's function, which a thread of the package calls: its frames stay, and those that it calls."""

    def fail() -> None:
        json.loads("{")

    def explain() -> None:
        try:
            fail()
        except ValueError as error:
            raise StorageError("It failed.") from error

    names: dict[str, Any] = {"ThreadPoolExecutor": ThreadPoolExecutor}
    exec(compile(IN_A_THREAD, str(Path(dcp_remote.__file__).with_name("made_up.py")), "exec"), names)
    with pytest.raises(StorageError) as caught:
        hides_frames(names["run"])(explain)
    assert functions_of(caught.value) == ["test_frames_of_others_stay", "explain"]
    assert functions_of(caught.value.__cause__ or caught.value)[:3] == ["explain", "fail", "__init__.py loads"]


def test_an_exception_that_is_being_handled_keeps_all(tmp_path: Path) -> None:
    """Load while another exception is handled: that one comes from elsewhere, and a later report shows all of it."""
    handled, frames = ValueError(), [""]
    try:
        json.loads("{")
    except ValueError as error:
        handled, frames = error, functions_of(error)
        with pytest.raises(CheckpointNotFoundError, match="There is no"):
            load(tmp_path / "run")
    assert functions_of(handled) == frames
    assert len(frames) > 1


def test_other_exceptions_keep_all() -> None:
    """Raise what is no error of the package: nothing is left out, since it may be a defect of the package."""

    @hides_frames
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        fail()
    assert functions_of(caught.value) == ["test_other_exceptions_keep_all", "tracebacks.py call", "fail"]
