"""Runs by the paths of frameworks."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dcp_remote import SavePolicy, open_run
from dcp_remote.errors import CheckpointNotFoundError, InvalidArgumentError, StateMismatchError
from dcp_remote.integrations.runs import (
    CheckpointPath,
    can_repeat,
    close_managers,
    find_checkpoint,
    framework_words,
    manager_of,
    note_step,
    require_settings,
    save_step,
    split_path,
    wait_for_saves,
)
from dcp_remote.storage import MemoryStore
from tests.support.threads import opened

RUN = "memory://integrations/run"


@pytest.fixture(autouse=True)
def no_manager_is_left() -> Iterator[None]:
    yield
    close_managers()


def test_a_run_has_one_manager() -> None:
    """As long as it is open: a framework calls with the URL alone."""
    manager = manager_of(RUN, timeout_seconds=60)
    assert manager_of(f"{RUN}/") is manager
    assert manager_of(RUN, timeout_seconds=60) is manager
    close_managers()
    assert manager_of(RUN) is not manager


def test_a_manager_takes_settings_until_it_is_used() -> None:
    """A first call that passes none, to look for a checkpoint, does not fix them; a save or a load does."""
    url = f"{RUN}-settings"
    first = manager_of(url, timeout_seconds=60)
    manager = manager_of(url, dedup=False)
    assert manager is not first
    assert manager_of(url, timeout_seconds=60) is manager  # the settings of both calls
    manager.save(3, {"x": torch.zeros(3)}, exist_ok=True)  # under way, or just committed, in the next call
    with pytest.raises(InvalidArgumentError, match="settings='timeout_seconds, dedup'"):
        manager_of(url, timeout_seconds=61, dedup=True)
    assert manager_of(url, dedup=False) is manager
    close_managers()
    manager_of(url).restore({"x": torch.zeros(3)})
    with pytest.raises(InvalidArgumentError, match="settings='dedup'"):
        manager_of(url, dedup=False)


def test_what_was_just_saved_is_found() -> None:
    """`find_checkpoint` reads the catalog, which knows what is committed alone."""
    manager_of(RUN).save(7, {"x": torch.zeros(3)}, name="seven")
    wait_for_saves()
    assert find_checkpoint(f"{RUN}/seven") == CheckpointPath(RUN, "seven")


def test_a_save_that_is_left_out_is_told_each_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By name, also one that would only have been added: Fabric and Accelerate drop what `save` returns."""
    gate, put = threading.Event(), MemoryStore.put

    def put_late(store: MemoryStore, key: str, *arguments: Any, **options: Any) -> Any:
        if key.startswith("shards/"):
            opened(gate)
        return put(store, key, *arguments, **options)

    monkeypatch.setattr(MemoryStore, "put", put_late)
    url, model = f"{RUN}-skip", torch.nn.Linear(1, 1)

    def save(step: int, name: str) -> bool:
        settings = {"when_busy": "skip"}
        return save_step(url, step, model.state_dict, settings=settings, owners={"model": model}, name=name)

    assert save(1, "first")
    assert [save(1, "final"), save(2, "second")] == [False, False]
    gate.set()
    wait_for_saves()
    assert save(1, "final")
    wait_for_saves()
    assert [info.names for info in open_run(url).checkpoints()] == [("first", "final")]
    told = [record.getMessage() for record in caplog.records if "wait_for_saves" in record.getMessage()]
    assert [text.partition(", since")[0] for text in told] == [
        f"{url}: the save of step 1 was left out (name: final)",
        f"{url}: the save of step 2 was left out (name: second)",
    ]


def test_an_error_of_a_save_is_raised_when_all_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = manager_of(RUN), manager_of(f"{RUN}-2")
    closed = []

    def close_badly() -> None:
        raise ValueError("boo")

    monkeypatch.setattr(first, "close", close_badly)
    monkeypatch.setattr(second, "close", lambda: closed.append(second))
    with pytest.raises(ValueError, match="boo"):
        close_managers()
    assert closed == [second]
    close_managers()  # nothing is left


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/", "s3://", "/run/checkpoint-5", "checkpoint-5", ""])
def test_no_path_of_a_checkpoint(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="s3://bucket/run/name"):
        split_path(url)


def test_a_path_is_split() -> None:
    assert split_path("s3://bucket/a/run/checkpoint-5/") == CheckpointPath("s3://bucket/a/run", "checkpoint-5")
    assert split_path("s3://bucket/checkpoint-5") == CheckpointPath("s3://bucket", "checkpoint-5")


def test_a_checkpoint_is_found() -> None:
    """By the URL of its run, by its name, by its step; else the error lists what there is."""
    url = f"{RUN}-found"
    with pytest.raises(CheckpointNotFoundError, match="neither a run, nor a name or step"):
        find_checkpoint(url)
    manager = manager_of(url)
    manager.save(5, {"x": torch.ones(2)}, name="checkpoint-5", wait=True)
    manager.save(7, {"x": torch.ones(2)}, wait=True)
    assert find_checkpoint(url) == CheckpointPath(url, None)
    assert find_checkpoint(f"{url}/checkpoint-5/") == CheckpointPath(url, "checkpoint-5")
    assert find_checkpoint(f"{url}/7") == CheckpointPath(url, 7)
    with pytest.raises(CheckpointNotFoundError, match="names='checkpoint-5, 7'"):
        find_checkpoint(f"{url}/checkpoint-7")


def test_a_step_is_repeated_for_the_same_objects_alone() -> None:
    """Two engines of one process that save to one run would else be one checkpoint, with two names."""
    first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    assert can_repeat(RUN, 0, engine=first)
    note_step(RUN, 5, engine=first)
    assert can_repeat(f"{RUN}/", 5, engine=first)
    assert can_repeat(RUN, 6, engine=second)
    assert not can_repeat(RUN, 5, engine=second)
    assert not can_repeat(RUN, 5, engine=first, optimizer=second)
    assert not can_repeat(RUN, 4, engine=first)
    note_step(RUN, 6)
    assert not can_repeat(RUN, 6)
    optimizer = torch.optim.SGD(first.parameters())
    note_step(RUN, 7, engine=first, optimizer=optimizer)
    assert can_repeat(RUN, 7, engine=first, optimizer=optimizer)
    optimizer.step()
    assert not can_repeat(RUN, 7, engine=first, optimizer=optimizer)
    close_managers()
    assert can_repeat(RUN, 5, engine=second)


def test_errors_name_what_the_user_of_the_framework_can_pass() -> None:
    """Texts by the argument of the manager; advice for which the framework has no words is left out."""

    @framework_words({"missing": "strict=False keeps it", "unexpected": "strict=False keeps it"})
    def run(**advice: str) -> None:
        raise StateMismatchError("A.", step=3).advise(**advice)

    for advice, text in (
        ({"missing": "a", "unexpected": "b", "rename": "c"}, "A. Options: strict=False keeps it. step=3"),
        ({"rename": "c"}, "A. step=3"),
    ):
        with pytest.raises(StateMismatchError) as raised:
            run(**advice)
        assert str(raised.value) == str(pickle.loads(pickle.dumps(raised.value))) == text


def test_settings_are_checked_before_a_run_is_opened() -> None:
    require_settings({"retention": None, "storage_options": {}, "arrival_seconds": 5.0})
    with pytest.raises(InvalidArgumentError, match="setting='keep_last'"):
        require_settings({"keep_last": 3})
    with pytest.raises(InvalidArgumentError, match="near='timeout_seconds'"):
        require_settings({"timeout_second": 3})
    with pytest.raises(InvalidArgumentError, match="setting='url'"):
        require_settings({"url": "s3://bucket/run"})


def test_settings_that_no_framework_asks_for(caplog: pytest.LogCaptureFixture) -> None:
    """The log names settings by which a manager decides, except those that the integration asks it about."""
    settings: dict[str, Any] = {"notice_seconds": 30, "save_policy": SavePolicy(every_steps=5), "retention": None}
    for listens, names in ((False, ["notice_seconds", "save_policy"]), (True, ["save_policy"])):
        caplog.clear()
        require_settings(settings, listens=listens)
        assert sorted(record.getMessage().split()[0] for record in caplog.records) == names
    caplog.clear()
    require_settings({"notice_seconds": None, "timeout_seconds": 60})
    assert not caplog.records
