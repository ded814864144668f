"""Work and requests of each operation on a state of many small tensors: they grow with the number, and no faster."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import dcp_remote
from dcp_remote import CheckpointManager, export_checkpoint, import_checkpoint, load, open_run
from dcp_remote.cli.main import main
from dcp_remote.storage import LocalStore
from dcp_remote.storage.counting import CountingStore
from dcp_remote.storage.wrapper import WrappedStore
from dcp_remote.transfer.ranges import FileRange, RangeReader
from dcp_remote.transfer.torch_file_source import find_stored, load_layout
from tests.support.threads import PATIENCE_SECONDS

PACKAGE = str(Path(dcp_remote.__file__).parent)


def make_state(tensors: int, *, scale: float = 1.0) -> dict[str, Any]:
    """Return a state of that many tensors of two values."""
    return {"model": {f"experts.{n}.bias": torch.tensor([n, n + 0.5]) * scale for n in range(tensors)}}


def save(folder: Path, tensors: int) -> None:
    with CheckpointManager(folder / "run") as checkpoints:
        checkpoints.save(1, make_state(tensors), wait=True)
        checkpoints.save(2, make_state(tensors, scale=2.0), wait=True)


def restore(folder: Path, tensors: int) -> None:
    state = make_state(tensors, scale=0.0)
    with CheckpointManager(folder / "run") as checkpoints:
        checkpoints.restore(state)
    assert state["model"][f"experts.{tensors - 1}.bias"].tolist() == [2 * tensors - 2, 2 * tensors - 1]


def command(*arguments: str) -> Callable[[Path, int], None]:
    def run(folder: Path, _tensors: int) -> None:
        main([arguments[0], str(folder / "run"), *arguments[1:]])

    return run


ACTIONS: dict[str, Callable[[Path, int], object]] = {
    "save": save,
    "restore": restore,
    "load": lambda folder, _: load(folder / "run"),
    "verify": lambda folder, _: open_run(folder / "run").verify(),
    "show": command("show"),
    "du": command("du"),
    "diff": command("diff", "--step", "1", "--step", "2", "--values"),
    "export to safetensors": lambda folder, _: export_checkpoint(folder / "run", folder / "out", progress=False),
    "export to torch.save": lambda folder, _: export_checkpoint(
        folder / "run", folder / "out.pt", kind="torch", progress=False
    ),
    "import of torch.save": lambda folder, _: import_checkpoint(folder / "a.pt", folder / "a", step=1, progress=False),
    "import of safetensors": lambda folder, _: import_checkpoint(
        folder / "b", folder / "b-run", step=1, progress=False
    ),
    "import of torch's folder": lambda folder, _: import_checkpoint(
        folder / "c", folder / "c-run", step=1, progress=False
    ),
}


def write_sources(folder: Path, tensors: int) -> None:
    state = make_state(tensors)
    torch.save(state, folder / "a.pt")
    (folder / "b").mkdir()
    save_file(state["model"], folder / "b" / "model.safetensors")
    dcp.save(state, checkpoint_id=folder / "c", no_dist=True)


def count_calls(act: Callable[[], object]) -> int:
    """Return the number of calls that functions of the package make and receive, in all threads."""
    counted = [0]

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event in {"call", "c_call"} and frame.f_code.co_filename.startswith(PACKAGE):
            counted[0] += 1

    before, of_threads = sys.getprofile(), threading.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
        threading.setprofile(of_threads)
    return counted[0]


def test_no_step_is_quadratic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twice as many tensors again cost twice as many calls again; a step that is quadratic would cost four times."""
    calls: dict[str, list[int]] = {name: [] for name in ACTIONS}
    for round_, tensors in enumerate((50, 150, 300, 600)):
        folder = tmp_path / str(tensors)
        folder.mkdir()
        write_sources(folder, tensors)
        for name, act in ACTIONS.items():
            counted = count_calls(partial(act, folder, tensors))
            if round_:  # the first imports modules
                calls[name].append(counted)
    capsys.readouterr()
    growth = {name: (third - second) / (second - first) for name, (first, second, third) in calls.items()}
    assert {name: ratio for name, ratio in growth.items() if not ratio < 2.5} == {}, calls


class Together(WrappedStore):
    """Store that answers reads of headers between its first and its last MiB once 15 of them are under way."""

    def __init__(self, store: LocalStore, *, size_bytes: int) -> None:
        super().__init__(store)
        self.between = range(64 * 2**10, size_bytes - 2**20)
        self.barrier, self.headers = threading.Barrier(15), list[int]()

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        if len(buffer) < 2**10 and start in self.between:
            self.headers.append(start)
            self.barrier.wait(PATIENCE_SECONDS)
        super().get_into(key, start, buffer)


def test_places_of_large_storages_are_read_many_at_a_time(tmp_path: Path) -> None:
    """Each place costs a GET of a header, but that of the first, which is read with that of the pickle."""
    torch.save({str(n): torch.zeros(2**18 + 100) for n in range(16)}, tmp_path / "a.pt")
    size_bytes = (tmp_path / "a.pt").stat().st_size
    store = Together(LocalStore(tmp_path), size_bytes=size_bytes)
    value = load_layout(RangeReader(store, store.list(), retry_seconds=1), FileRange("a.pt", 0, size_bytes))
    places = [find_stored(tensor, store.url) for tensor in value.values()]
    assert [place.storage.length for place in places if place is not None] == [2**20 + 400] * 16
    assert len(store.headers) == 15


def test_neighbors_are_read_together(tmp_path: Path) -> None:
    """A hundred times as many tensors of a source take no more requests."""

    def requests(tensors: int) -> list[int]:
        folder = tmp_path / str(tensors)
        folder.mkdir()
        write_sources(folder, tensors)
        found = []
        for name in ("b", "c"):
            store = CountingStore(LocalStore(folder / name))
            import_checkpoint(store, folder / f"{name}-run", step=1, progress=False)
            found.append(store.counts.requests)
        return found

    few, many = requests(4), requests(400)
    assert [a - b for a, b in zip(many, few, strict=True)] == [0, 0]
