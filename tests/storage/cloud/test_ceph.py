"""S3 on Ceph's gateway: what moto cannot show, since it races, verifies and breaks off nothing."""

from __future__ import annotations

import http.client
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_remote import RemoteWriter, load
from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import (
    CommitConflictError,
    ConditionFailedError,
    CorruptCheckpointError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.run import commit
from dcp_remote.storage import ObjectStore, open_store
from dcp_remote.storage.base import Condition
from tests.run.test_commit import body as manifest_body
from tests.support.ceph import CephGateway, ceph_gateway, ceph_is_installed
from tests.support.clouds import S3Suite
from tests.support.scripted_server import HttpAnswer, HttpRequest, scripted_server
from tests.support.training import assert_same, full

pytestmark = [
    pytest.mark.torture(smoke=False),
    pytest.mark.skipif(not ceph_is_installed(), reason="Ceph 16 is not installed; tests/support/ceph.py says how"),
]


@pytest.fixture(scope="module")
def ceph() -> Iterator[CephGateway]:
    with ceph_gateway() as server:
        yield server


@pytest.fixture(scope="module")
def raw_s3(ceph: CephGateway) -> Any:
    """Client of botocore, which bypasses the store."""
    return ceph.client()


@pytest.fixture
def bucket(raw_s3: Any) -> str:
    """An empty bucket."""
    name = f"test-{uuid.uuid4().hex}"
    raw_s3.create_bucket(Bucket=name)
    return name


@pytest.fixture(scope="module")
def suite_store(ceph: CephGateway) -> ObjectStore:
    """Store for the whole suite: creating a client takes longer than most tests."""
    ceph.create_bucket("suite")
    return open_store("s3://suite", ceph.storage_options)


class TestS3OnCeph(S3Suite):
    """Run the store suite, each test under a prefix of its own, and check by botocore."""

    @pytest.fixture
    def store(self, suite_store: ObjectStore) -> ObjectStore:
        return suite_store.child(uuid.uuid4().hex)


def run_at_once(number: int, work: Callable[[int], str]) -> list[str]:
    """Run `work` in `number` threads that begin together; return their results."""
    barrier = threading.Barrier(number)

    def run(index: int) -> str:
        barrier.wait()
        return work(index)

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(run, range(number)))


# ---- concurrent writers


# Above 4 MiB the gateway stores a tail before it checks the condition.
@pytest.mark.parametrize("size_bytes", [100, 5_000_000])
@pytest.mark.parametrize("condition", ["absent", "swap"])
def test_one_of_eight_writers_wins(ceph: CephGateway, bucket: str, condition: str, size_bytes: int) -> None:
    """Race eight threads four times: exactly one put succeeds, and the object has its bytes.

    Losers of a swap get a failed condition or 500, the gateway's answer to a writer that read the old object and wrote
    second. The outcome of a 500 is unknown to the loser, so `commit` reads.
    """
    store = open_store(f"s3://{bucket}", ceph.storage_options)
    for attempt in range(4):
        key = f"race-{attempt}"
        before: Condition = store.put(key, [b"before"]) if condition == "swap" else "absent"
        bodies = [f"writer {index} ".encode() * (size_bytes // 9) for index in range(8)]

        def write(index: int, key: str = key, before: Condition = before, bodies: list[bytes] = bodies) -> str:
            try:
                store.put(key, [bodies[index]], condition=before)
            except (ConditionFailedError, TransientStorageError) as error:
                return f"{type(error).__name__} {error.details.get('code')}"
            return "won"

        told = run_at_once(8, write)
        assert told.count("won") == 1
        assert set(told) <= {"won", "ConditionFailedError PreconditionFailed"} | (
            {"TransientStorageError UnknownError"} if condition == "swap" else set()
        )
        assert store.get(key, limit_bytes=size_bytes).data == bodies[told.index("won")]


def test_one_of_eight_commits_wins(ceph: CephGateway, bucket: str) -> None:
    """Race eight commits to one slot, five rounds: one returns, the others raise a conflict, even after a 500."""
    store = open_store(f"s3://{bucket}", ceph.storage_options)
    for _ in range(5):
        slot = commit.read_slot(store)
        save_ids = [uuid.uuid4().hex for _ in range(8)]

        def put_manifest(index: int, slot: commit.Slot = slot, save_ids: list[str] = save_ids) -> str:
            body = manifest_body(save_ids[index], slot)
            try:
                commit.commit(store, slot, body, save_id=save_ids[index], deadline=Deadline(60))
            except CommitConflictError:
                return "conflict"
            return "committed"

        told = run_at_once(8, put_manifest)
        assert sorted(told) == ["committed"] + ["conflict"] * 7
        head = commit.read_slot(store).content
        assert head is not None
        assert head.save_id == save_ids[told.index("committed")]


# ---- bytes damaged in transit

# Headers of the connection, not forwarded; Host stays as the client signed it.
HOP_HEADERS = {"connection", "date", "server", "transfer-encoding"}


def forward(ceph: CephGateway, request: HttpRequest, body: bytes) -> HttpAnswer:
    """Send a request with another body to the gateway; return the answer."""
    connection = http.client.HTTPConnection(urlsplit(ceph.endpoint_url).netloc, timeout=30)
    headers = {name: value for name, value in request.headers.items() if name not in HOP_HEADERS}
    connection.request(request.method, request.path, body=body, headers=headers)
    response = connection.getresponse()
    kept = {name: value for name, value in response.getheaders() if name.lower() not in HOP_HEADERS}
    answer = HttpAnswer(response.status, response.read(), kept)
    connection.close()
    return answer


def is_shard_put(request: HttpRequest) -> bool:
    return request.method == "PUT" and "/shards/" in request.path


@contextmanager
def link_that_flips_a_bit(ceph: CephGateway) -> Iterator[tuple[str, list[int]]]:
    """Run a proxy that damages the first shard; yield its endpoint and the statuses of the answers to shard puts."""
    statuses: list[int] = []

    def answer(request: HttpRequest) -> HttpAnswer:
        body = request.body
        if is_shard_put(request) and not statuses:
            body = body[:-1] + bytes([body[-1] ^ 1])
        answered = forward(ceph, request, body)
        if is_shard_put(request):
            statuses.append(answered.status)
        return answered

    with scripted_server(answer) as link:
        yield link.endpoint_url, statuses


STATE = {"weight": torch.arange(1000.0), "bias": torch.ones(3)}


def test_a_shard_damaged_in_transit_is_sent_again(ceph: CephGateway, bucket: str) -> None:
    """Flip one bit of the first attempt: the server refuses it by its SHA-256, and the second attempt is stored."""
    url = f"s3://{bucket}/checkpoint"
    with link_that_flips_a_bit(ceph) as (endpoint_url, statuses):
        options = ceph.storage_options | {"endpoint_url": endpoint_url}
        dcp.save({"model": STATE}, storage_writer=RemoteWriter(url, storage_options=options))
    assert statuses == [400, 200]
    assert_same(full(load(url, storage_options=ceph.storage_options)["model"]), full(STATE))


def default_options(ceph: CephGateway) -> dict[str, Any]:
    """Return the options of a user who gives the endpoint and no setting for Ceph."""
    habits = ("etag_quotes", "sign_payload", "checksum_algorithm")
    return {name: value for name, value in ceph.storage_options.items() if name not in habits}


def test_a_load_detects_what_ceph_did_not_verify(ceph: CephGateway, bucket: str) -> None:
    """Flip a bit with default options, whose CRC64NVME this server ignores: it is stored, and the load refuses it."""
    url = f"s3://{bucket}/checkpoint"
    with link_that_flips_a_bit(ceph) as (endpoint_url, statuses):
        options = default_options(ceph) | {"endpoint_url": endpoint_url}
        dcp.save({"model": STATE}, storage_writer=RemoteWriter(url, storage_options=options))
    assert statuses == [200]
    with pytest.raises(CorruptCheckpointError, match="shards/"):
        load(url, storage_options=default_options(ceph))


# ---- error messages


def test_quoted_etags_are_refused_and_the_error_names_the_option(ceph: CephGateway, bucket: str) -> None:
    """Commit over a commit with default options: nothing is replaced, and the error names `etag_quotes`."""
    store = open_store(f"s3://{bucket}", default_options(ceph))
    first, second = uuid.uuid4().hex, uuid.uuid4().hex
    slot = commit.read_slot(store)
    commit.commit(store, slot, manifest_body(first, slot), save_id=first, deadline=Deadline(60))
    slot = commit.read_slot(store)
    with pytest.raises(StorageError, match="etag_quotes"):
        commit.commit(store, slot, manifest_body(second, slot), save_id=second, deadline=Deadline(600))
    assert commit.read_slot(store) == slot


# ---- puts that are broken off


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        ({"aws_secret_access_key": "not-the-secret"}, "The secret key is not that of the access key."),
        ({"aws_access_key_id": "not-the-key"}, "The store does not know this access key."),
    ],
)
def test_wrong_credentials(ceph: CephGateway, bucket: str, wrong: dict[str, str], advice: str) -> None:
    """Read, write and list with one wrong key each: the error says which of the two, and shows neither."""
    store = open_store(f"s3://{bucket}", ceph.storage_options | wrong)
    calls: list[Callable[[], object]] = [
        lambda: store.get("key", limit_bytes=1),
        lambda: store.put("key", [b"x"]),
        lambda: list(store.list()),
    ]
    for call in calls:
        with pytest.raises(PermissionDeniedError, match=advice) as caught:
            call()
        assert "not-the-secret" not in str(caught.value)


def test_a_put_that_is_broken_off(ceph: CephGateway, bucket: str, raw_s3: Any) -> None:
    """Send half of a body and disconnect, as a killed rank does: there is no object, and none of it is listed."""
    raw_s3.put_object(Bucket=bucket, Key="whole", Body=b"x")
    address = urlsplit(ceph.endpoint_url)
    url = urlsplit(raw_s3.generate_presigned_url("put_object", Params={"Bucket": bucket, "Key": "half"}))
    lines = [f"PUT {url.path}?{url.query} HTTP/1.1", f"Host: {url.netloc}", "Content-Length: 1000", "", ""]
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=30) as connection:
        connection.sendall("\r\n".join(lines).encode() + b"x" * 500)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1000):  # until the gateway has handled the request
            pass
    store = open_store(f"s3://{bucket}", ceph.storage_options)
    assert [info.key for info in store.list()] == ["whole"]
