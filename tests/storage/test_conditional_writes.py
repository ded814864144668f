"""The probe of conditional writes: servers that ignore a condition are refused, and correct ones are not.

The servers are a `MemoryStore` whose conditions are dropped, and a small S3 server that drops headers.
"""

from __future__ import annotations

import itertools
import re
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_remote import RemoteWriter, load
from dcp_remote.common.arrays import Buffer
from dcp_remote.common.deadline import Clock, Deadline
from dcp_remote.errors import (
    ConditionFailedError,
    InvalidArgumentError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.run.catalog_store import swap
from dcp_remote.run.gc import find_orphans, remove_orphans
from dcp_remote.run.job import CheckpointLabels, JobSession
from dcp_remote.run.recovery import recover
from dcp_remote.storage import MemoryStore, ObjectStore, open_store
from dcp_remote.storage.base import Condition, Version
from dcp_remote.storage.conditional_writes import PROBES_PREFIX, require_conditional_writes
from dcp_remote.storage.wrapper import Request, Verb, WrappedStore
from dcp_remote.testing import Fault, FaultyStore, RecordingStore, nth
from dcp_remote.testing.wrappers import Lost
from tests.support.clouds import always, error_body, open_s3, open_s3fs
from tests.support.runs import a_run, steps
from tests.support.scripted_server import HttpAnswer, HttpRequest, scripted_server
from tests.support.threads import opened

_Answer = TypeVar("_Answer")

BOTH = frozenset({"If-None-Match", "If-Match"})


class LaxStore(WrappedStore):
    """Store behind an unknown server, which ignores some conditions."""

    def __init__(self, store: ObjectStore, *ignored: str) -> None:
        super().__init__(store)
        self.server = uuid.uuid4().hex
        self.ignored = ignored

    def find_unproven_server(self) -> str:
        return self.server

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        header = "If-None-Match" if condition == "absent" else "If-Match"
        return super().put(key, buffers, condition="any" if header in self.ignored else condition)


def keys(store: MemoryStore) -> set[str]:
    return set(store.space.objects)


def probe(store: ObjectStore, *, swaps: bool = True, seconds: float = 60) -> None:
    require_conditional_writes(store, Deadline(seconds, Clock(sleep=lambda _: None)), swaps=swaps)


def s3(ignored: frozenset[str]) -> Callable[[HttpRequest], HttpAnswer]:
    """Return a server with those parts of S3 that a probe needs; it drops the ignored headers."""
    memory = MemoryStore()

    def answer(request: HttpRequest) -> HttpAnswer:
        key = urlsplit(request.path).path.removeprefix("/bucket/")
        condition: Condition = "any"
        if request.method == "PUT":
            if "if-none-match" in request.headers and "If-None-Match" not in ignored:
                condition = "absent"
            elif "if-match" in request.headers and "If-Match" not in ignored:
                condition = Version(request.headers["if-match"])
            try:
                version = memory.put(key, [request.body], condition=condition)
            except ConditionFailedError:
                return HttpAnswer(412, error_body("PreconditionFailed"))
            return HttpAnswer(headers={"ETag": version.etag or ""})
        if request.method == "POST":  # DeleteObjects
            memory.delete(re.findall(r"<Key>(.*?)</Key>", request.body.decode()))
            return HttpAnswer(200, b"<DeleteResult></DeleteResult>")
        return HttpAnswer(404)

    return answer


@pytest.mark.parametrize("ignored", [frozenset[str](), frozenset({"If-Match"}), frozenset({"If-None-Match"}), BOTH])
@pytest.mark.parametrize("client", ["s3", "s3fs"])
def test_servers(client: str, ignored: frozenset[str]) -> None:
    """Probe over HTTP, by both clients of S3."""
    with scripted_server(s3(ignored)) as server:
        store: ObjectStore = open_s3(server.endpoint_url)
        if client == "s3fs":
            store = open_s3fs(server.endpoint_url, "bucket/run")
        if ignored:
            with pytest.raises(StorageError, match="ignores the condition"):
                probe(store)
        else:
            probe(store)
            asked = len(server.requests)
            probe(store.child("elsewhere"))
            assert len(server.requests) == asked
        assert {request.path.rpartition("/")[0] for request in server.requests} >= {"/bucket/run/dcp-remote-probes"}


@pytest.mark.parametrize("swaps", [True, False])
@pytest.mark.parametrize("ignored", [(), ("If-None-Match",), ("If-Match",), ("If-None-Match", "If-Match")])
def test_ignored_conditions_are_found(ignored: tuple[str, ...], swaps: bool) -> None:
    """Probe servers that ignore each set of conditions; no object stays, whatever the result."""
    memory = MemoryStore()
    store = LaxStore(memory, *ignored)
    wrong = [header for header in ignored if header == "If-None-Match" or swaps]
    if not wrong:
        probe(store, swaps=swaps)
    for _ in range(2 if wrong else 0):  # probed again, since the server may have been updated
        with pytest.raises(StorageError, match=rf"ignores the condition of a write \({wrong[0]}\)") as caught:
            probe(store, swaps=swaps)
        assert caught.value.details["server"] == store.server
    assert keys(memory) == set()


def test_a_server_is_probed_once_per_process() -> None:
    """Count the requests: two PUTs and a DELETE, one more PUT for swaps; none for another prefix, and none later."""
    store = RecordingStore(LaxStore(MemoryStore()))
    probe(store.child("a"), swaps=False)
    assert [call[0] for call in store.calls] == ["put", "put", "delete"]
    store.clear()
    probe(store.child("b"))
    assert [call[0] for call in store.calls] == ["put", "put", "put", "delete"]
    store.clear()
    for swaps in (True, False):
        probe(store.child("c"), swaps=swaps)
    assert store.calls == []


@pytest.mark.parametrize("lost", ["request", "response"])
@pytest.mark.parametrize("number", range(1, 6))
@pytest.mark.parametrize("ignored", [(), ("If-Match",), ("If-None-Match",)])
def test_lost_answers_do_not_change_the_result(ignored: tuple[str, ...], number: int, lost: Lost) -> None:
    """Lose each request in turn, before it is carried out or after: the result is the same."""
    memory = MemoryStore()
    store = FaultyStore(LaxStore(memory, *ignored), [nth(number, lost)])
    if ignored:
        with pytest.raises(StorageError, match="ignores the condition"):
            probe(store)
    else:
        probe(store)
    deleting = any(request.verb == "delete" for request in store.hits)
    assert len(keys(memory)) <= deleting


def test_a_store_that_does_not_answer() -> None:
    """Probe a silent store: a transient error at the deadline, and the next call probes again."""
    fails = [True]

    def is_put(verb: Verb, key: str, number: int) -> bool:
        return verb == "put" and fails[0]

    store = FaultyStore(LaxStore(MemoryStore()), [Fault(is_put, "request", persistent=True)])
    with pytest.raises(TransientStorageError):
        probe(store, seconds=0.05)
    fails[0] = False
    probe(store)


def test_without_a_grant_to_delete(caplog: pytest.LogCaptureFixture) -> None:
    """Deny the delete: the probe passes, and the name of the object that stays is logged."""
    memory = MemoryStore()

    def is_delete(verb: Verb, key: str, number: int) -> bool:
        return verb == "delete"

    denied = Fault(is_delete, "request", persistent=True, error=lambda: PermissionDeniedError("No."))
    with caplog.at_level("INFO"):
        probe(FaultyStore(LaxStore(memory), [denied]))
    (left,) = keys(memory)
    assert left.startswith(PROBES_PREFIX)
    assert left in caplog.text


def test_leftover_probes_are_ignored() -> None:
    """Leave objects of killed probes in a run and beside a checkpoint: gc, listings and loads ignore them."""
    run = a_run(1, 2)
    checkpoint = MemoryStore()
    save(checkpoint)
    for memory in (run, checkpoint):
        memory.put(f"{PROBES_PREFIX}{'0' * 32}", [b"x"])
    assert steps(run) == [1, 2]
    assert find_orphans(run, grace_seconds=0).old == ()
    assert remove_orphans(checkpoint, grace_seconds=0).old == ()
    assert load(checkpoint)["weight"].tolist() == [1, 1, 1]


# ---- where it counts


def begin(store: ObjectStore) -> None:
    JobSession(store).begin(CheckpointLabels.of(1), borrow=False, deadline=Deadline(60))


def save(store: ObjectStore) -> None:
    dcp.save({"weight": torch.ones(3)}, storage_writer=RemoteWriter(store))


@pytest.mark.parametrize("ignored", sorted(BOTH))
@pytest.mark.parametrize("act", [begin, save])
def test_nothing_is_written(act: Callable[[ObjectStore], None], ignored: str) -> None:
    """Begin a job, and save a single checkpoint: refused. A checkpoint needs no comparison of versions."""
    memory = MemoryStore()
    store = LaxStore(memory, ignored)
    if act is save and ignored == "If-Match":
        act(store)
        assert "manifest.json" in keys(memory)
        return
    with pytest.raises((StorageError, dcp.CheckpointException), match="ignores the condition"):
        act(store)
    assert keys(memory) == set()


class FarStore(LaxStore):
    """Unknown server in a cloud: the GET waits for the second PUT of a probe, and the DELETE for that of a shard."""

    url = f"s3://bucket/{uuid.uuid4().hex}"

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.probes = itertools.count(1)
        self.is_probed, self.is_uploading = threading.Event(), threading.Event()

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        if request.verb == "get":
            opened(self.is_probed)
        elif request.verb == "delete":
            opened(self.is_uploading)
        elif request.key.startswith(PROBES_PREFIX) and next(self.probes) == 2:
            self.is_probed.set()
        elif request.key.startswith("shards/"):
            self.is_uploading.set()
        return super()._request(request, send)


def test_a_probe_of_a_far_server_runs_beside_the_save() -> None:
    """Save: the manifest is read beside the probe, whose object is deleted beside the upload, and before the end."""
    memory = MemoryStore()
    store = RecordingStore(FarStore(memory))
    save(store)
    assert sorted(verb for verb, _ in store.calls) == ["delete", "get", "put", "put", "put", "put"]
    assert [key for key in keys(memory) if key.startswith(PROBES_PREFIX)] == []


def test_an_interrupt_of_the_probe_does_not_wait_for_the_read_beside_it() -> None:
    """Interrupt the probe of a store whose GET is not answered before the save has ended."""

    class Interrupted(FarStore):
        ended = threading.Event()

        def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
            if request.verb == "get":
                opened(self.ended)
                raise TransientStorageError("No answer.")
            if request.verb == "put":
                raise KeyboardInterrupt
            return send()

    with pytest.raises(KeyboardInterrupt):
        RemoteWriter(Interrupted(MemoryStore())).set_up_storage_writer(is_coordinator=True)
    Interrupted.ended.set()


def test_a_checkpoint_that_exists_is_told_although_the_probe_fails() -> None:
    """Save over a checkpoint, on a server that ignores conditions: refused as a checkpoint that exists."""
    memory = MemoryStore()
    save(memory)
    with pytest.raises(dcp.CheckpointException, match="Checkpoint already exists"):
        save(LaxStore(memory, *BOTH))


def test_without_a_thread_a_probe_is_deleted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no thread start: the object is deleted before the upload."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    memory = MemoryStore()
    store = RecordingStore(LaxStore(memory))
    monkeypatch.setattr(threading.Thread, "start", start)
    save(store)
    assert [verb for verb, _ in store.calls] == ["put", "put", "delete", "get", "put", "put"]


def test_an_overwrite_compares_versions() -> None:
    """Overwrite a checkpoint on a server that ignores `If-Match`: refused, and the checkpoint is unchanged."""
    memory = MemoryStore()
    save(memory)
    before = {key: found.data for key, found in memory.space.objects.items()}
    with pytest.raises(dcp.CheckpointException, match="ignores the condition"):
        dcp.save({"weight": torch.zeros(3)}, storage_writer=RemoteWriter(LaxStore(memory, "If-Match"), overwrite=True))
    assert {key: found.data for key, found in memory.space.objects.items()} == before


def test_maintenance_probes_too() -> None:
    """Swap a catalog, recover a run, and collect garbage of a checkpoint: each refused before a change."""
    run = a_run(1, 2)
    checkpoint = MemoryStore()
    save(checkpoint)
    orphan = next(key for key in keys(checkpoint) if key.startswith("shards/")).replace("rank-00000", "rank-00001")
    checkpoint.put(orphan, [b"x"])
    for memory, act in (
        (run, lambda store: swap(store, lambda catalog: catalog, deadline=Deadline(60))),
        (run, lambda store: (run.space.objects.pop("catalog.json", None), recover(store))),
        (checkpoint, lambda store: remove_orphans(store, grace_seconds=0)),
    ):
        before = keys(memory) - {"catalog.json"}
        with pytest.raises(StorageError, match="ignores the condition"):
            act(LaxStore(memory, "If-Match"))
        assert keys(memory) - {"catalog.json"} == before


# ---- servers


@pytest.mark.parametrize(
    ("url", "options", "unproven"),
    [
        ("s3://bucket", {"region": "eu-west-1"}, None),
        ("s3://bucket", {"region": "cn-north-1"}, None),
        ("s3://bucket", {"endpoint_url": "https://b.vpce-1.s3.us-east-1.vpce.amazonaws.com"}, None),
        ("s3://bucket", {"endpoint_url": "https://amazonaws.com.example"}, "https://amazonaws.com.example bucket"),
        ("s3://bucket", {"endpoint_url": "https://storage.googleapis.com"}, "https://storage.googleapis.com bucket"),
        ("gs://bucket", {}, None),
        ("gs://bucket", {"endpoint_url": "http://127.0.0.1:9000"}, "http://127.0.0.1:9000 bucket"),
        ("az://bucket", {"account_name": "a"}, None),
        ("az://bucket", {"connection_string": "AccountName=a;AccountKey=k;EndpointSuffix=core.windows.net"}, None),
        ("az://bucket", {"account_name": "a", "endpoint_url": "http://127.0.0.1/a"}, "http://127.0.0.1/a bucket"),
    ],
)
def test_known_servers(
    url: str, options: dict[str, Any], unproven: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare server names with those of the clouds; nothing is sent."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    region = {"region": "us-east-1"} if url.startswith("s3") else {}
    assert find_unproven(url, {**region, **options, "anon": True}) == unproven
    if url.startswith("s3"):
        client_kwargs = {"region_name": options.get("region", "us-east-1")}
        store: Any = open_s3fs(options.get("endpoint_url"), "bucket/run", client_kwargs=client_kwargs)
        assert store.find_unproven_server() == unproven


def find_unproven(url: str, options: dict[str, Any]) -> str | None:
    store: Any = open_store(url, options).child("run")
    server: str | None = store.find_unproven_server()  # of no part of the contract
    return server


def test_a_denied_probe() -> None:
    """Deny every request: `PermissionDeniedError`, whatever the condition."""
    with scripted_server(always(403, "AccessDenied")) as server:
        store = open_s3(server.endpoint_url)
        with pytest.raises(PermissionDeniedError, match=PROBES_PREFIX):
            probe(store)


@pytest.mark.parametrize(
    ("url", "name", "options"),
    [
        ("s3://bucket", "AWS_ENDPOINT_URL_S3", {"region": "us-east-1", "anon": True}),
        ("gs://bucket", "GOOGLE_BASE_URL", {"bearer_token": "token"}),
        ("az://bucket", "AZURE_ENDPOINT", {"bearer_token": "token", "account_name": "account"}),
        ("az://bucket", "AZURE_STORAGE_ENDPOINT", {"bearer_token": "token", "account_name": "account"}),
    ],
)
def test_endpoints_in_the_environment(
    url: str, name: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set endpoints that botocore or obstore read from the environment: they are probed, and secrets are refused."""
    assert find_unproven(url, options) is None
    monkeypatch.setenv(name, "http://127.0.0.1:9000")
    assert find_unproven(url, options) == "http://127.0.0.1:9000 bucket"
    monkeypatch.setenv(name, "http://user:a-password@127.0.0.1:9000")
    with pytest.raises(InvalidArgumentError, match=name.removesuffix("_S3")) as refused:
        find_unproven(url, options)
    assert "a-password" not in str(refused.value)
