"""Read-only stores on fsspec file systems: a run and a checkpoint in memory, in a zip archive and behind HTTP."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from zipfile import ZipFile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec import AbstractFileSystem
from fsspec.implementations.http import HTTPFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.implementations.zip import ZipFileSystem

from dcp_remote import CheckpointManager, RemoteReader, RemoteWriter, latest, load
from dcp_remote.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidArgumentError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.storage import LocalStore, open_fsspec_store
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.request_context import limit_requests
from tests.support.clouds import VERBS, answer_range
from tests.support.scripted_server import HttpAnswer, HttpRequest, scripted_server

RANGED = {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}


def make_state(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.arange(50_000.0).reshape(250, 200) * step, "bias": torch.ones(7)}, "step": step}


def require_equal(found: dict[str, Any], step: int) -> None:
    wanted = make_state(step)
    assert found["step"] == step
    assert all(torch.equal(found["model"][name], wanted["model"][name]) for name in wanted["model"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a run with the steps 1 and 2, and a checkpoint by itself, with `LocalStore`."""
    folder = tmp_path_factory.mktemp("saved")
    with CheckpointManager(folder / "run") as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(step), wait=True)
    dcp.save(make_state(3), storage_writer=RemoteWriter(folder / "single"), no_dist=True)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def serve(folder: Path, request: HttpRequest) -> HttpAnswer:
    """Answer as a plain web server does: files by range, and folders by an HTML page of links."""
    path = folder / unquote(request.path).strip("/")
    if path.is_dir():
        names = [f"{child.name}/" if child.is_dir() else child.name for child in path.iterdir()]
        page = "".join(f'<a href="{name}">{name}</a>' for name in names)
        return HttpAnswer(200, page.encode(), {"Content-Type": "text/html"})
    if not path.is_file():
        return HttpAnswer(404)
    answer = answer_range(request, path.read_bytes())
    if answer.status == 206 and not answer.body:
        return HttpAnswer(416)
    return HttpAnswer(answer.status, answer.body, {**answer.headers, **RANGED})


@pytest.fixture(params=["memory", "zip", "http"])
def store(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Iterator[ObjectStore]:
    """Copy the folder into a file system of each kind, and open a store there."""
    with ExitStack() as stack:
        if request.param == "memory":
            memory = MemoryFileSystem(global_store=False, skip_instance_cache=True)
            for name, data in files(folder).items():
                memory.pipe_file(f"/top/{name}", data)
            yield open_fsspec_store(memory, "top")
        elif request.param == "zip":
            with ZipFile(tmp_path / "archive.zip", "w") as archive:
                for name, data in files(folder).items():
                    archive.writestr(f"top/{name}", data)
            yield open_fsspec_store(ZipFileSystem(str(tmp_path / "archive.zip")), "zip://top")
        else:
            server = stack.enter_context(scripted_server(partial(serve, folder)))
            yield open_fsspec_store(HTTPFileSystem(skip_instance_cache=True), f"{server.endpoint_url}/")
            assert {sent.method for sent in server.requests} <= {"GET", "HEAD"}


def test_a_run_is_restored(store: ObjectStore) -> None:
    """Restore both steps by a manager, and load the newest; a save is refused, and nothing is sent."""
    run = store.child("run")
    info = latest(run)
    assert info is not None
    assert info.step == 2
    require_equal(load(run), 2)
    with CheckpointManager(run) as checkpoints:
        for step in (1, 2):
            state = make_state(0)
            assert checkpoints.restore(state, step) == step
            require_equal(state, step)
        with pytest.raises(InvalidArgumentError, match=r"read-only: fsspec's .* has no conditional PUT"):
            checkpoints.save(3, make_state(3), wait=True)


def test_a_checkpoint_is_loaded(store: ObjectStore) -> None:
    """Load through torch's protocol and by a pickled copy of the store; a missing checkpoint is said to be missing."""
    single = store.child("single")
    loaded = make_state(0)
    dcp.load(loaded, storage_reader=RemoteReader(single), no_dist=True)
    require_equal(loaded, 3)
    if not single.url.startswith("memory"):
        require_equal(load(pickle.loads(pickle.dumps(single))), 3)
    with pytest.raises(CheckpointNotFoundError):
        load(store.child("missing"))


def test_saves_are_refused_before_an_upload(store: ObjectStore) -> None:
    """Save beside the checkpoint, and over it: refused with the reason."""
    for child, overwrite in (("new", False), ("single", True)):
        writer = RemoteWriter(store.child(child), overwrite=overwrite)
        with pytest.raises(dcp.CheckpointException, match=r"read-only: fsspec's .* has no conditional PUT. Write with"):
            dcp.save(make_state(1), storage_writer=writer, no_dist=True)


def test_verbs_that_read(store: ObjectStore, folder: Path) -> None:
    """Compare every verb with `LocalStore`, on every object of the run."""
    run, local = store.child("run"), LocalStore(folder / "run")
    keys = [info.key for info in local.list()]
    assert [(info.key, info.size_bytes) for info in run.list()] == [
        (info.key, info.size_bytes) for info in local.list()
    ]
    assert [info.key for info in run.list("c", after="catalog.j")] == [key for key in keys if key.startswith("c")]
    assert list(run.list("missing/")) == []
    for key in keys:
        data = local.get(key, limit_bytes=10**7).data
        assert run.head(key).size_bytes == len(data)
        assert run.get(key, limit_bytes=len(data)).data == data
        buffer = bytearray(len(data) - 2)
        run.get_into(key, 1, memoryview(buffer))
        assert buffer == data[1:-1]
        with pytest.raises(CorruptCheckpointError, match="limit_bytes"):
            run.get(key, limit_bytes=len(data) - 1)
        for start in (1, len(data), len(data) + 5):
            with pytest.raises(CorruptCheckpointError, match="ends before"):
                run.get_into(key, start, memoryview(bytearray(len(data))))
    for call in (lambda: run.head("no"), lambda: run.get("no", limit_bytes=9), lambda: run.get("no/no", limit_bytes=9)):
        with pytest.raises(ObjectNotFoundError):
            call()


def test_a_file_system_is_opened_at_its_top() -> None:
    """Open the root of a file system, whose paths begin with a slash; a path may contain an `@`."""
    memory = MemoryFileSystem(global_store=False, skip_instance_cache=True)
    memory.pipe_file("/run@2/key", b"x")
    for path in ("", "/", "memory://"):
        store = open_fsspec_store(memory, path)
        assert [info.key for info in store.list("run@2/")] == ["run@2/key"]
        assert store.child("run@2").get("key", limit_bytes=1).data == b"x"
        assert store.child("run@2").url == "memory:///run@2"
    assert open_http("http://127.0.0.1:9/run@2").child("a").url == "http://127.0.0.1:9/run@2/a"


def open_http(url: str, **options: object) -> ObjectStore:
    return open_fsspec_store(HTTPFileSystem(**options, skip_instance_cache=True), url)


@pytest.mark.parametrize("verb", ["get", "get_into", "head"])
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, PermissionDeniedError),
        (403, PermissionDeniedError),
        (404, ObjectNotFoundError),
        (400, StorageError),
        (429, TransientStorageError),
        (503, TransientStorageError),
    ],
)
def test_failures_over_http(status: int, kind: type[StorageError], verb: str) -> None:
    """Fail each verb in each way: the error has the right class, and shows no secret of the file system."""
    secret = "Bearer a-secret-token"
    if (status, verb) == (400, "head"):
        kind = ObjectNotFoundError  # as fsspec's `info` has it
    with scripted_server(lambda _: HttpAnswer(status)) as server:
        store = open_http(f"{server.endpoint_url}/run", headers={"Authorization": secret})
        with pytest.raises(StorageError) as caught:
            VERBS[verb](store)
        assert server.requests[0].headers["authorization"] == secret
    assert type(caught.value) is kind
    assert secret not in str(caught.value)


@pytest.mark.parametrize("verb", ["get", "get_into"])
def test_a_cut_answer_over_http_is_transient(verb: str) -> None:
    """Send half of a body and close the connection."""
    answer = HttpAnswer(206, b"0123", RANGED, cut_bytes=2)
    with scripted_server(lambda _: answer) as server, pytest.raises(TransientStorageError):
        VERBS[verb](open_http(f"{server.endpoint_url}/run"))


def test_a_server_without_ranges_is_refused() -> None:
    """Answer a range with the whole object: refused, since each range would cost a whole shard."""
    with (
        scripted_server(lambda _: HttpAnswer(200, b"0123456789")) as server,
        pytest.raises(StorageError, match="more bytes than the requested range"),
    ):
        open_http(f"{server.endpoint_url}/run").get_into("key", 2, memoryview(bytearray(4)))


def test_a_closed_port_is_transient() -> None:
    """Connect to a server that has ended, by a read and by `info`."""
    with scripted_server(lambda _: HttpAnswer()) as server:
        store = open_http(f"{server.endpoint_url}/run")
    for call in (lambda: store.get("key", limit_bytes=9), lambda: store.head("key")):
        with pytest.raises(TransientStorageError):
            call()


class Slow(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no stubs
    """File system that is not asynchronous, and records how many calls it gets at a time."""

    protocol = "slow"
    cachable = False

    def __init__(self, release: threading.Event) -> None:
        super().__init__()
        self.release, self.inside, self.most_inside = release, 0, 0

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: object) -> bytes:
        self.inside += 1
        self.most_inside = max(self.inside, self.most_inside)
        self.release.wait(60)
        self.inside -= 1
        return b"0123"[start:end]


def test_a_file_system_that_blocks_ends_at_the_deadline() -> None:
    """Call a file system that is stuck, three times: each call ends, and the file system gets one at a time."""
    release = threading.Event()
    filesystem = Slow(release)
    store = open_fsspec_store(filesystem, "run")
    try:
        with limit_requests(lambda: 0.1):
            for _ in range(3):
                with pytest.raises(TransientStorageError):
                    store.child("below").get("key", limit_bytes=9)
    finally:
        release.set()
    assert store.get("key", limit_bytes=9).data == b"0123"
    assert filesystem.most_inside == 1


@pytest.mark.parametrize(
    "path",
    [
        "http://alice:a-password@127.0.0.1:9/run",
        "http://a-password@127.0.0.1:9/run",
        "http://127.0.0.1:9/run?sig=a-password",
        "http://127.0.0.1:9/run#a-password",
    ],
)
def test_no_secret_in_a_path(path: str) -> None:
    """Pass a path with a secret: refused, and not shown."""
    with pytest.raises(InvalidArgumentError, match="The path contains") as caught:
        open_http(path)
    assert "a-password" not in str(caught.value)


def test_errors_quote_no_url_with_a_signature() -> None:
    """Follow a redirect to a signed URL that is refused: the error does not show the signature."""

    def answer(request: HttpRequest) -> HttpAnswer:
        if "sig" in request.path:
            return HttpAnswer(403)
        return HttpAnswer(302, b"", {"Location": f"{request.path}?sig=a-signature"})

    with scripted_server(answer) as server, pytest.raises(PermissionDeniedError) as caught:
        open_http(f"{server.endpoint_url}/run").get("key", limit_bytes=9)
    assert "a-signature" not in str(caught.value)
    assert caught.value.__cause__ is None
