"""S3 on Ceph's gateway: what moto cannot show, since it races, verifies and breaks off nothing."""

from __future__ import annotations

import http.client
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_remote import RemoteWriter, commit, load
from dcp_remote.errors import (
    CommitConflictError,
    ConditionFailedError,
    CorruptCheckpointError,
    InvalidArgumentError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.storage import ObjectStore, open_store
from dcp_remote.storage.base import Condition
from dcp_remote.storage.retrying import Deadline
from dcp_remote.testing import ceph as ceph_module
from dcp_remote.testing.ceph import CephGateway, ceph_gateway, ceph_is_installed
from dcp_remote.testing.rank_pool import RankPool, RanksFailedError
from dcp_remote.testing.servers import HttpAnswer, HttpRequest, scripted_server
from dcp_remote.testing.store_suite import StoreSuite
from dcp_remote.url import parse_url
from tests.distributed.training import STRATEGIES, Leaves, assert_same, full, load_each, trained
from tests.figures import count
from tests.test_commit import body as manifest_body

pytestmark = [
    pytest.mark.torture,
    pytest.mark.skipif(not ceph_is_installed(), reason="Ceph 16 is not installed; dcp_remote/testing/ceph.py says how"),
]


@pytest.fixture(scope="module")
def ceph() -> Iterator[CephGateway]:
    with ceph_gateway() as server:
        yield server


@pytest.fixture(scope="module")
def client(ceph: CephGateway) -> Any:
    """To look past a store."""
    return ceph.client()


@pytest.fixture
def bucket(client: Any) -> str:
    """An empty bucket."""
    name = f"test-{uuid.uuid4().hex}"
    client.create_bucket(Bucket=name)
    return name


@pytest.fixture(scope="module")
def suite_store(ceph: CephGateway) -> ObjectStore:
    """One for the whole suite: clients take longer to make than most tests."""
    ceph.create_bucket("suite")
    return open_store("s3://suite", ceph.storage_options)


class TestS3OnCeph(StoreSuite):
    """The contract, each test under a prefix of its own; and botocore to look past the store."""

    version_is_digest = True

    @pytest.fixture
    def store(self, suite_store: ObjectStore) -> ObjectStore:
        return suite_store.child(uuid.uuid4().hex)

    @pytest.fixture(autouse=True)
    def _look_past(self, client: Any) -> None:
        self.client = client

    def raw_write(self, store: ObjectStore, key: str, data: bytes) -> None:
        url = parse_url(store.url)
        self.client.put_object(Bucket=url.bucket, Key=f"{url.prefix}/{key}", Body=data)

    def raw_read(self, store: ObjectStore, key: str) -> bytes:
        url = parse_url(store.url)
        return bytes(self.client.get_object(Bucket=url.bucket, Key=f"{url.prefix}/{key}")["Body"].read())


def at_once(number: int, work: Callable[[int], str]) -> list[str]:
    """What `number` threads return that begin together."""
    barrier = threading.Barrier(number)

    def run(index: int) -> str:
        barrier.wait()
        return work(index)

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(run, range(number)))


# ---- writers that race


# Above 4 MiB the gateway stores a tail before it looks at the condition.
@pytest.mark.parametrize("size_bytes", [100, 5_000_000])
@pytest.mark.parametrize("condition", ["absent", "swap"])
def test_one_of_eight_writers_wins(ceph: CephGateway, bucket: str, condition: str, size_bytes: int) -> None:
    """Eight threads at a barrier, four times: one put is answered well, and its bytes are there, whole.

    Those that lose a swap are told that the condition failed, or 500: the gateway has no better answer for who looked
    at the old object, and wrote second. So the outcome is not known to them, and `commit` reads.
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

        told = at_once(8, write)
        assert told.count("won") == 1
        assert set(told) <= {"won", "ConditionFailedError PreconditionFailed"} | (
            {"TransientStorageError UnknownError"} if condition == "swap" else set()
        )
        assert store.get(key, limit_bytes=size_bytes).data == bodies[told.index("won")]


def test_one_of_eight_commits_wins(ceph: CephGateway, bucket: str) -> None:
    """All have seen one slot, five rounds: one commit returns, the others know that they lost, 500 or not."""
    store = open_store(f"s3://{bucket}", ceph.storage_options)
    for _ in range(5):
        slot = commit.look(store)
        save_ids = [uuid.uuid4().hex for _ in range(8)]

        def put_manifest(index: int, slot: commit.Slot = slot, save_ids: list[str] = save_ids) -> str:
            body = manifest_body(save_ids[index], slot)
            try:
                commit.commit(store, slot, body, save_id=save_ids[index], deadline=Deadline(60))
            except CommitConflictError:
                return "conflict"
            return "committed"

        told = at_once(8, put_manifest)
        assert sorted(told) == ["committed"] + ["conflict"] * 7
        head = commit.look(store).head
        assert head is not None
        assert head.save_id == save_ids[told.index("committed")]


# ---- bytes that change on their way

# These follow from the connection; Host stays as the client signed it.
HOP_HEADERS = {"connection", "date", "server", "transfer-encoding"}


def forward(ceph: CephGateway, request: HttpRequest, body: bytes) -> HttpAnswer:
    """What the gateway answers to the request, were this its body."""
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
    """The endpoint of a link that damages the first shard; and the statuses of the answers to puts of shards."""
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


def test_a_shard_that_was_damaged_on_its_way_is_sent_again(ceph: CephGateway, bucket: str) -> None:
    """One bit of the first attempt is flipped behind the client: refused by the server for its SHA-256, then stored."""
    url = f"s3://{bucket}/checkpoint"
    with link_that_flips_a_bit(ceph) as (endpoint_url, statuses):
        options = ceph.storage_options | {"endpoint_url": endpoint_url}
        dcp.save({"model": STATE}, storage_writer=RemoteWriter(url, storage_options=options))
    assert statuses == [400, 200]
    assert_same(full(load(url, storage_options=ceph.storage_options)["model"]), full(STATE))


def without_habits(ceph: CephGateway) -> dict[str, Any]:
    """The options of a user who knows the endpoint, and nothing of Ceph."""
    habits = ("etag_quotes", "sign_payload", "checksum_algorithm")
    return {name: value for name, value in ceph.storage_options.items() if name not in habits}


def test_what_ceph_does_not_verify_the_load_does(ceph: CephGateway, bucket: str) -> None:
    """The same with default options, whose CRC64NVME this server ignores: what it stores, no load takes."""
    url = f"s3://{bucket}/checkpoint"
    with link_that_flips_a_bit(ceph) as (endpoint_url, statuses):
        options = without_habits(ceph) | {"endpoint_url": endpoint_url}
        dcp.save({"model": STATE}, storage_writer=RemoteWriter(url, storage_options=options))
    assert statuses == [200]
    with pytest.raises(CorruptCheckpointError, match="shards/"):
        load(url, storage_options=without_habits(ceph))


# ---- what users are told


def test_default_options_save_and_load(ceph: CephGateway, bucket: str) -> None:
    """A plain save needs nothing of Ceph's own."""
    url, options = f"s3://{bucket}/checkpoint", without_habits(ceph)
    dcp.save({"model": STATE}, storage_writer=RemoteWriter(url, storage_options=options))
    assert_same(full(load(url, storage_options=options)["model"]), full(STATE))


def test_quoted_etags_are_refused_and_the_error_names_the_option(ceph: CephGateway, bucket: str) -> None:
    """A commit over another, with default options and without its pauses: nothing is replaced."""
    store = open_store(f"s3://{bucket}", without_habits(ceph))
    first, second = uuid.uuid4().hex, uuid.uuid4().hex
    slot = commit.look(store)
    commit.commit(store, slot, manifest_body(first, slot), save_id=first, deadline=Deadline(60))
    slot = commit.look(store)
    with pytest.raises(StorageError, match="etag_quotes"):
        commit.commit(
            store, slot, manifest_body(second, slot), save_id=second, deadline=Deadline(600), sleep=lambda _: None
        )
    assert commit.look(store) == slot


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        ({"aws_secret_access_key": "not-the-secret"}, "The secret key is not that of the access key."),
        ({"aws_access_key_id": "not-the-key"}, "The store does not know this access key."),
    ],
)
def test_wrong_credentials(ceph: CephGateway, bucket: str, wrong: dict[str, str], advice: str) -> None:
    """A real server checks the signature: read, write and list say which of the two keys is wrong, and show none."""
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


# ---- a job that is killed


@pytest.fixture(scope="module")
def rank_pool() -> Iterator[RankPool]:
    with RankPool(3) as pool:
        yield pool


def overwrite(strategy: str, url: str, seed: int, storage_options: dict[str, Any]) -> Leaves:
    """Train and save, over what is there; the full state that was saved."""
    state = trained(strategy, seed).state()
    dcp.save(state, storage_writer=RemoteWriter(url, storage_options=storage_options, overwrite=True))
    return full(state)


@contextmanager
def link_that_breaks(ceph: CephGateway, then: Callable[[], None]) -> Iterator[tuple[str, list[str]]]:
    """The endpoint of a link that gives on half of the second shard, does `then`, and hangs up; and that path."""
    shards = itertools.count(1)
    cut_off: list[str] = []

    def answer(request: HttpRequest) -> HttpAnswer:
        if len(request.body) != int(request.headers.get("content-length", "0")):
            return HttpAnswer(cut_bytes=0)  # of a rank that was killed while it sent
        if not is_shard_put(request) or next(shards) != 2:
            return forward(ceph, request, request.body)
        cut_off.append(request.path)
        address = urlsplit(ceph.endpoint_url)
        with socket.create_connection((address.hostname or "", address.port or 0), timeout=30) as connection:
            lines = [f"PUT {request.path} HTTP/1.1", *(f"{name}: {value}" for name, value in request.headers.items())]
            connection.sendall("\r\n".join([*lines, "", ""]).encode() + request.body[: len(request.body) // 2])
            then()
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1000):  # until the gateway has dealt with it
                pass
        return HttpAnswer(cut_bytes=0)

    with scripted_server(answer) as link:
        yield link.endpoint_url, cut_off


def test_a_job_that_is_killed_in_mid_save(ceph: CephGateway, bucket: str, rank_pool: RankPool) -> None:
    """SIGKILL to three ranks that overwrite, one shard stored and another half sent: the old checkpoint is whole.

    Then two ranks overwrite it, and one loads that.
    """
    url, options = f"s3://{bucket}/checkpoint", ceph.storage_options
    saved = rank_pool.run(overwrite, "fsdp-3", url, 1, options)[0]
    store = open_store(url, options)
    before = {info.key for info in store.list()}
    pids = [pid for pid in rank_pool.pids if pid is not None]

    def kill_ranks() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        count("ranks killed", len(pids))

    with link_that_breaks(ceph, kill_ranks) as (endpoint_url, cut_off), pytest.raises(RanksFailedError) as caught:
        rank_pool.run(overwrite, "fsdp-3", url, 2, options | {"endpoint_url": endpoint_url})
    signals = {rank: failure.signal for rank, failure in caught.value.failures.items()}
    assert signals == dict.fromkeys(range(3), signal.SIGKILL)
    orphans = {info.key for info in store.list()} - before
    assert orphans, "a shard was stored before the kill"
    assert all(key.startswith("shards/") for key in orphans)
    assert not [key for key in orphans for path in cut_off if path.endswith(key)]
    assert_same(full(load(url, storage_options=options)), saved)

    saved = rank_pool.run(overwrite, "tp-2", url, 3, options, ranks=STRATEGIES["tp-2"].ranks)[0]
    (loaded,) = rank_pool.run(load_each, "plain", [url], options, ranks=STRATEGIES["plain"].ranks)[0]
    assert_same(loaded, saved)


# ---- the server itself

START = """
import signal, time
from dcp_remote.testing.ceph import ceph_gateway

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell is begun without
with ceph_gateway():
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGKILL])
def test_the_gateway_ends_with_its_parent(way: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C and SIGKILL; the kernel tells when the three processes have ended. Ctrl-C leaves no file either."""
    parent = subprocess.Popen(
        [sys.executable, "-c", START],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdout is not None
    try:
        assert parent.stdout.readline() == b"ready\n"
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        assert len(children) == 3
        daemons = [os.pidfd_open(int(pid)) for pid in children]
        parent.send_signal(way)
        parent.wait(timeout=60)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    for daemon in daemons:
        assert select.select([daemon], [], [], 30)[0] == [daemon]
        os.close(daemon)
    assert (list(tmp_path.iterdir()) == []) == (way == signal.SIGINT)


@pytest.mark.parametrize(
    ("setting", "wrong", "told"),
    [
        ("/mon\n", "/no/such-folder\n", r"Ceph's ceph-mon failed\."),
        ("=127.0.0.1", "=192.0.2.1", r"Ceph's radosgw died .*192\.0\.2\.1"),  # nobody's address
    ],
)
def test_a_gateway_that_does_not_start(setting: str, wrong: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that fails, and a daemon that dies and says why: the error names it, and quotes it."""
    monkeypatch.setattr(ceph_module, "_CONFIGURATION", ceph_module._CONFIGURATION.replace(setting, wrong))
    with pytest.raises(InvalidArgumentError, match=told), ceph_gateway():
        raise AssertionError
