"""Processes without a free file descriptor: when requests end, what they say, and that a short shortage passes."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import s3fs

from dcp_remote.common.deadline import Clock, Deadline
from dcp_remote.errors import StorageError, TransientStorageError
from dcp_remote.storage import LocalStore, MemoryStore, ObjectStore, open_store
from dcp_remote.storage.conditional_writes import require_conditional_writes
from dcp_remote.storage.fsspec import open_fsspec_store
from dcp_remote.storage.outages import Outage
from dcp_remote.storage.retrying import SHORTAGE_SECONDS, RetryingStore
from dcp_remote.testing import Fault, FaultyStore, nth
from dcp_remote.testing.servers import S3Server
from tests.support.clocks import SleepClock
from tests.support.descriptors import no_descriptors

# Deadline of a save.
SAVE_SECONDS = 1800.0

_CALLS: dict[str, Callable[[ObjectStore], object]] = {
    "head": lambda store: store.head("key"),
    "get": lambda store: store.get("key", limit_bytes=3),
    "get_into": lambda store: store.get_into("key", 0, memoryview(bytearray(3))),
    "put": lambda store: store.put("key", [b"new"]),
    "list": lambda store: list(store.list("k")),
}


def _retrying(store: ObjectStore, clock: SleepClock) -> RetryingStore:
    outage = Outage(store.url, clock=clock)
    return RetryingStore(store, clock.deadline(SAVE_SECONDS, share=0.5), outage=outage)


@pytest.mark.parametrize("verb", _CALLS)
def test_a_lasting_shortage_ends_a_request_in_seconds(verb: str, caplog: pytest.LogCaptureFixture) -> None:
    """Fail every request in a process that can open no file: a few attempts, a final error, no outage of the store."""
    clock = SleepClock()
    faulty = FaultyStore(MemoryStore(), [nth(1, "request", persistent=True)])
    with no_descriptors(), caplog.at_level(logging.WARNING), pytest.raises(StorageError, match="ulimit -n") as caught:
        _CALLS[verb](_retrying(faulty, clock))
    assert not isinstance(caught.value, TransientStorageError)
    assert caught.value.details["attempts"] == len(faulty.hits) == 10
    assert sum(clock.sleeps) <= SHORTAGE_SECONDS
    assert caplog.messages == []


def test_keys_of_a_delete_are_given_back_with_the_shortage() -> None:
    """Delete two keys in such a process: both are returned as failed, with the limit."""
    faulty = FaultyStore(MemoryStore(), [nth(1, "request", persistent=True)])
    with no_descriptors():
        failed = _retrying(faulty, SleepClock()).delete(["a", "b"])
    assert sorted(failed) == ["a", "b"]
    assert all("ulimit -n" in str(error) and error.details["key"] == key for key, error in failed.items())


def test_a_short_shortage_passes() -> None:
    """Close the files in the third pause: the request succeeds. Then the store alone fails, and has its whole time."""
    clock, memory = SleepClock(), MemoryStore()
    memory.put("key", [b"old"])
    with no_descriptors() as release:

        def sleep(seconds: float) -> None:
            clock.sleep(seconds)
            if len(clock.sleeps) == 3:
                release()

        deadline = Deadline(SAVE_SECONDS, Clock(clock, sleep, lambda low, high: (low + high) / 2))
        faulty = FaultyStore(memory, [Fault(lambda verb, key, number: number <= 20, "request", persistent=True)])
        store = RetryingStore(faulty, deadline)
        assert store.head("key").size_bytes == 3
    assert len(clock.sleeps) == 20
    assert sum(clock.sleeps) > SHORTAGE_SECONDS


@pytest.mark.parametrize("client", ["obstore", "s3fs"])
def test_clients_of_s3_name_the_limit(client: str) -> None:
    """Ask a server that refuses connections, then without a descriptor: the error names the limit, not the endpoint."""
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        endpoint = {"endpoint_url": f"http://127.0.0.1:{refusing.getsockname()[1]}", "region_name": "us-east-1"}
        if client == "obstore":
            store = open_store("s3://bucket/x", {**endpoint, "aws_access_key_id": "a", "aws_secret_access_key": "b"})
        else:
            store = open_fsspec_store(s3fs.S3FileSystem(key="a", secret="b", client_kwargs=endpoint), "bucket/x")
        for call in _CALLS.values():
            with pytest.raises(TransientStorageError):
                call(store)
            with no_descriptors(), pytest.raises(StorageError, match=r"limit of \d+ open files.*ulimit -n"):
                call(_retrying(store, SleepClock()))


def test_a_local_folder_names_the_limit(tmp_path: Path) -> None:
    """Put and read a file in such a process."""
    store = LocalStore(tmp_path)
    store.put("key", [b"old"])
    for verb in set(_CALLS) - {"head"}:  # which opens no file
        with no_descriptors(), pytest.raises(StorageError, match=r"limit of \d+ open files.*ulimit -n"):
            _CALLS[verb](_retrying(store, SleepClock()))


def test_the_probe_of_a_server_ends_in_seconds() -> None:
    """Ask whether a server honours conditions, in a process that can open no file: its puts end like other requests."""
    clock = SleepClock()

    class Unproven(FaultyStore):
        def find_unproven_server(self) -> str:
            return f"http://{uuid.uuid4().hex}"

    store = Unproven(MemoryStore(), [nth(1, "request", persistent=True)])
    with no_descriptors(), pytest.raises(StorageError, match="ulimit -n"):
        require_conditional_writes(store, clock.deadline(SAVE_SECONDS), swaps=True)
    assert sum(clock.sleeps) <= SHORTAGE_SECONDS


_FIRST_REQUEST = """
import sys
from dcp_remote.errors import StorageError
from dcp_remote.storage import open_store
from tests.support.descriptors import no_descriptors

options = dict(endpoint_url=sys.argv[1], aws_access_key_id="a", aws_secret_access_key="b", region_name="us-east-1")
store = open_store("s3://descriptors/first", options)
with no_descriptors():
    try:
        store.put("key", [b"data"])
    except StorageError as error:
        print(error.what)
store.put("key", [b"data"])
print("saved")
"""


def test_a_first_request_without_descriptors_leaves_the_client_usable(s3_server: S3Server) -> None:
    """Send a process's first request without a descriptor, with which obstore would panic; then with descriptors."""
    s3_server.create_bucket("descriptors")
    ended = subprocess.run(  # this very test's program
        [sys.executable, "-c", _FIRST_REQUEST, s3_server.endpoint_url], capture_output=True, text=True, check=True
    )
    assert "ulimit -n" in ended.stdout
    assert ended.stdout.endswith("saved\n")
    assert "panicked" not in ended.stderr
