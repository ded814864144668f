"""Both clients of S3, obstore and s3fs: what they send, what they accept, and what they make of an error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest

from dcp_remote.errors import CorruptCheckpointError, DcpRemoteError, StorageError, TransientStorageError
from dcp_remote.storage.base import ObjectStore, Version
from dcp_remote.storage.request_context import limit_requests
from dcp_remote.testing.servers import S3Server
from tests.support.clouds import OBJECT_HEADERS, VERBS, answer_range, open_s3, open_s3fs
from tests.support.scripted_server import HttpAnswer, HttpRequest, ScriptedServer, scripted_server

DATA = b"0123456789"


@dataclass
class Client:
    """Store of one client, on a server that answers as a test says."""

    store: ObjectStore
    server: ScriptedServer
    answer: Callable[[HttpRequest], HttpAnswer]


@pytest.fixture(scope="module", params=[open_s3, open_s3fs], ids=["obstore", "s3fs"])
def shared_client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """Open one client for all tests, since botocore needs a fifth of a second for one."""

    def answer(sent: HttpRequest) -> HttpAnswer:
        return shared.answer(sent)

    with scripted_server(answer) as server:
        shared = Client(request.param(server.endpoint_url), server, lambda _: HttpAnswer(404))
        yield shared


@pytest.fixture
def client(shared_client: Client) -> Client:
    """Return the client without the requests of other tests."""
    shared_client.server.requests.clear()
    return shared_client


def test_a_put_is_one_request(client: Client) -> None:
    """Record the requests of puts with all conditions and kinds of bodies: one PUT each, with its checksum."""
    big = bytes(range(256)) * 10_000
    client.answer = lambda _: HttpAnswer(headers=OBJECT_HEADERS)
    assert client.store.put("any", [big, memoryview(big)[1:], b"end"]) == Version(etag='"abc"')
    client.store.put("absent", [b"12", b"", memoryview(bytearray(b"34"))], condition="absent")
    client.store.put("swap", [b"12"], condition=Version(etag='"old"', generation="v1"))
    client.store.put("empty", [], condition="absent")
    requests = client.server.requests
    any_, absent, swap, empty = requests
    assert [request.method for request in requests] == ["PUT"] * 4
    assert any_.path.partition("?")[0] == "/bucket/run/any"
    assert any_.body == big + big[1:] + b"end"
    assert not {"if-match", "if-none-match"} & set(any_.headers)
    assert (absent.body, absent.headers["if-none-match"]) == (b"1234", "*")
    assert (swap.headers["if-match"], empty.body) == ('"old"', b"")
    for request in requests:
        assert request.headers["content-length"] == str(len(request.body))
    (checksum,) = (value for name, value in empty.headers.items() if name.startswith("x-amz-checksum-crc"))
    assert checksum in ("AAAAAA==", "AAAAAAAAAAA=")  # the CRC of nothing is 0


def test_reads_are_one_request(client: Client) -> None:
    """Record the requests of head, get and get_into: one each; get_into requests exactly its range."""
    client.answer = lambda request: answer_range(request, DATA)
    info = client.store.head("key")
    assert info.version == Version(etag='"abc"')
    assert info.modified_seconds == datetime(2024, 1, 1, tzinfo=UTC).timestamp()
    assert client.store.get("key", limit_bytes=10).data == DATA
    buffer = bytearray(4)
    client.store.get_into("key", 2, memoryview(buffer))
    assert buffer == b"2345"
    assert [request.method for request in client.server.requests] == ["HEAD", "GET", "GET"]
    assert client.server.requests[2].headers["range"] == "bytes=2-5"


def test_a_large_object_is_refused_before_its_body(client: Client) -> None:
    """Announce a long body that never comes: refused by its length."""
    headers = {**OBJECT_HEADERS, "Content-Length": "1000000000"}
    client.answer = lambda _: HttpAnswer(200, b"", headers, cut_bytes=0)
    with pytest.raises(CorruptCheckpointError, match="size_bytes=1000000000"):
        client.store.get("key", limit_bytes=100)
    assert len(client.server.requests) == 1


# Body and range of an answer to the first four bytes, and what is raised.
WRONG_RANGES: dict[str, tuple[bytes, str, type[DcpRemoteError]]] = {
    "shorter": (b"01", "bytes 0-1/2", CorruptCheckpointError),
    "longer": (b"012345678", "bytes 0-8/9", StorageError),
    "shifted": (b"0123", "bytes 4-7/8", StorageError),
}


@pytest.mark.parametrize("name", WRONG_RANGES)
def test_wrong_answers_to_a_range(client: Client, name: str) -> None:
    """Answer a read of four bytes with another range: refused."""
    body, content_range, kind = WRONG_RANGES[name]
    client.answer = lambda _: HttpAnswer(206, body, {**OBJECT_HEADERS, "Content-Range": content_range})
    with pytest.raises(kind):
        VERBS["get_into"](client.store)


@pytest.mark.parametrize("verb", ["get", "get_into"])
def test_a_cut_body_is_transient(client: Client, verb: str) -> None:
    """Send half of the body and close the connection."""
    headers = {**OBJECT_HEADERS, "Content-Range": "bytes 0-3/4"}
    client.answer = lambda _: HttpAnswer(206 if verb == "get_into" else 200, b"0123", headers, cut_bytes=2)
    with pytest.raises(TransientStorageError):
        VERBS[verb](client.store)


def test_a_body_that_stalls_ends_at_the_deadline() -> None:
    """Send half of each body to s3fs, and no more: the reads end at the deadline, long before its own limit."""
    stalled = {**OBJECT_HEADERS, "Content-Length": "4", "Content-Range": "bytes 0-3/4"}
    with scripted_server(lambda _: HttpAnswer(206, b"01", stalled)) as server, limit_requests(lambda: 0.1):
        for verb in ("get", "get_into"):
            with pytest.raises(TransientStorageError):
                VERBS[verb](open_s3fs(server.endpoint_url))


# Opens a store on the bucket "run" with a client, as above.
OPEN = """
import os, pickle, sys, warnings
from s3fs import S3FileSystem
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.storage import open_fsspec_store, open_store
endpoint_url, client = sys.argv[1:]
filesystem = S3FileSystem(key="testing", secret="testing", endpoint_url=endpoint_url)
options = dict(endpoint_url=endpoint_url, key="testing", secret="testing", region="us-east-1")
def open_():
    if client == "s3fs":
        return open_fsspec_store(filesystem, "both-clients")
    return open_store("s3://both-clients", options)
"""

PICKLE = """
store = open_()
before = pickle.dumps(store)
store.put("key", [b"content"])
assert pickle.dumps(store) == before
sys.stdout.buffer.write(before)
"""

FORK = """
warnings.simplefilter("ignore")  # that a process with threads forks, which is the point
def in_child(store):
    pid = os.fork()
    if pid == 0:
        try:
            store.put("key", [b"x"])
            os._exit(1)
        except InvalidArgumentError as error:
            os._exit(2 if "spawn" in str(error) else 3)
        finally:
            os._exit(4)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
store = open_()
print(in_child(store), end=" ")
store.put("key", [b"x"])
print(in_child(store), in_child(open_()))
"""


def run_python(code: str, *arguments: str, given: bytes = b"") -> bytes:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, input=given, capture_output=True, timeout=60, check=True).stdout


@pytest.mark.parametrize("name", ["obstore", "s3fs"])
def test_pickles_carry_no_client(s3_server: S3Server, name: str) -> None:
    """Pickle a store before and after its first request, and use it in another process."""
    s3_server.create_bucket("both-clients")
    data = run_python(OPEN + PICKLE, s3_server.endpoint_url, name)
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).get('key', limit_bytes=9).data.decode())"
    assert run_python(code, given=data).strip() == b"content"


# obstore's runtime is one for the process, and so is refused in a child also by a new store.
@pytest.mark.parametrize(("name", "ends"), [("obstore", b"1 2 2"), ("s3fs", b"1 2 1")])
def test_forks_after_the_first_request_are_refused(s3_server: S3Server, name: str, ends: bytes) -> None:
    """Fork before the first request (works), and after it, with the old store and a new one."""
    s3_server.create_bucket("both-clients")
    assert run_python(OPEN + FORK, s3_server.endpoint_url, name).strip() == ends
