"""The benchmark's server: by hand, by our own store, and by the clients of others; that it counts, fails and ends."""

from __future__ import annotations

import base64
import hashlib
import http.client
import itertools
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit
from xml.etree import ElementTree as ET

import boto3
import pytest
import s3fs
from botocore.config import Config
from botocore.exceptions import ClientError

from dcp_remote.common.units import MiB
from dcp_remote.errors import ConditionFailedError, InvalidArgumentError, StorageError
from dcp_remote.storage import ObjectStore, open_store
from dcp_remote.storage.url import parse_url
from dcp_remote.testing.store_suite import StoreSuite
from tests.benchmark.server.server import BenchServer, bench_server
from tests.benchmark.server.shape import Shape
from tests.benchmark.server.space import Space

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the server needs Linux's sendfile and shared memory")

# What verify=True computes by, in Python: the library itself is in no test environment.
AWSCRT = """
def _table(polynomial):
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (polynomial if value & 1 else 0)
        table.append(value)
    return table

def _crc(table, ones, data):
    crc = ones
    for byte in bytes(data):
        crc = crc >> 8 ^ table[(crc ^ byte) & 255]
    return crc ^ ones

_CRC32C, _CRC64NVME = _table(0x82F63B78), _table(0x9A6C9329AC4BC9B5)

def crc32c(data):
    return _crc(_CRC32C, 2**32 - 1, data)

def crc64nvme(data):
    return _crc(_CRC64NVME, 2**64 - 1, data)
"""

DIE = """
import os, signal, sys
from tests.benchmark.server.server import bench_server
with bench_server(size_bytes=1 << 20, tls=True) as server:
    print(server.pid, server.ca_file, flush=True)
    sys.stdin.read(1)  # until the test watches the server
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Answer:
    """A status, headers and a body."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    @property
    def code(self) -> str:
        return ET.fromstring(self.body).findtext("{*}Code", "")


class Raw:
    """A client that knows nothing of S3, on one connection."""

    def __init__(self, server: BenchServer) -> None:
        self.connection = server.connection()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def __call__(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.connection.request(method, path, body, named)
        return Answer(self.connection.getresponse())


@pytest.fixture(scope="module")
def running() -> Iterator[BenchServer]:
    with bench_server(size_bytes=96 * MiB, buckets=("bench", "suite")) as server:
        yield server


@pytest.fixture
def server(running: BenchServer) -> Iterator[BenchServer]:
    """As new: without faults, counts, objects."""
    running.shape(Shape())
    running.clear()
    running.reset()
    yield running
    running.shape(Shape())


@pytest.fixture
def raw(server: BenchServer) -> Iterator[Raw]:
    with Raw(server) as raw:
        yield raw


# botocore sends again what was refused for its checksum.
ONCE = Config(retries={"total_max_attempts": 1})


def client_of(server: BenchServer, **options: object) -> Any:
    return boto3.client(  # type: ignore[call-overload]  # its arguments by name
        "s3",
        endpoint_url=server.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id="benchmark",
        aws_secret_access_key="benchmark",
        **options,
    )


@pytest.fixture(scope="module")
def running_boto(running: BenchServer) -> Iterator[Any]:
    with closing(client_of(running)) as client:
        yield client


@pytest.fixture
def boto(server: BenchServer, running_boto: Any) -> Any:
    """boto3's client of the server, as it is by default."""
    return running_boto


def address_of(server: BenchServer) -> tuple[str, int]:
    parts = urlsplit(server.endpoint_url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


@pytest.fixture(scope="module")
def opened(running: BenchServer) -> ObjectStore:
    """One for the whole suite, each test of which gets a child: to open it takes a quarter of a second."""
    return open_store("s3://suite", storage_options=running.storage_options)


class TestOurStore(StoreSuite):
    """The contract, and boto3 to look past the store."""

    @pytest.fixture
    def store(self, opened: ObjectStore) -> ObjectStore:
        return opened.child(uuid.uuid4().hex)

    @pytest.fixture(autouse=True)
    def _look_past(self, running_boto: Any) -> None:
        self.client = running_boto

    def raw_write(self, store: ObjectStore, key: str, data: bytes) -> None:
        place = parse_url(store.url)
        self.client.put_object(Bucket=place.bucket, Key=f"{place.prefix}/{key}", Body=data)

    def raw_read(self, store: ObjectStore, key: str) -> bytes:
        place = parse_url(store.url)
        return bytes(self.client.get_object(Bucket=place.bucket, Key=f"{place.prefix}/{key}")["Body"].read())


def test_a_body_that_waits_for_a_word(server: BenchServer) -> None:
    """`100-continue` comes before the body is sent; where it is refused, the answer comes instead, and the end."""
    head = b"PUT /%s/k HTTP/1.1\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(address_of(server), timeout=30) as connection:
        connection.sendall(head % b"bench")
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"12345")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        connection.sendall(head % b"nowhere")
        answer = b"".join(iter(lambda: connection.recv(1000), b""))
        assert answer.startswith(b"HTTP/1.1 404 ")
        assert b"\r\nConnection: close\r\n" in answer


def chunks(data: bytes, size_bytes: int, *, extension: bytes = b"", trailers: bytes = b"") -> bytes:
    parts = [data[start : start + size_bytes] for start in range(0, len(data), size_bytes)]
    framed = b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts)
    return b"%s0%s\r\n%s\r\n" % (framed, extension, trailers)


@pytest.mark.parametrize("outer_bytes", [0, 7], ids="outer_{}".format)
@pytest.mark.parametrize("inner_bytes", [10, 20_000], ids="inner_{}".format)
def test_chunked_bodies(raw: Raw, server: BenchServer, inner_bytes: int, outer_bytes: int) -> None:
    """Amazon's chunks with a trailer, by themselves or inside HTTP's, whose borders cut lines anywhere."""
    data = random.Random(3).randbytes(50_001)
    checksum = base64.b64encode(zlib.crc32(data).to_bytes(4, "big"))
    wire = chunks(
        data,
        inner_bytes,
        extension=b";chunk-signature=12ab",
        trailers=b"x-amz-checksum-crc32:%s\r\n" % checksum,
    )
    headers = {"Content-Encoding": "aws-chunked", "X-Amz-Decoded-Content-Length": str(len(data))}
    if outer_bytes:
        wire = chunks(wire, outer_bytes)
        headers["Transfer-Encoding"] = "chunked"
    put = raw("PUT", "/bench/k", wire, **headers)
    assert (put.status, put.headers["x-amz-checksum-crc32"]) == (200, checksum.decode())
    got = raw("GET", "/bench/k", x_amz_checksum_mode="ENABLED")
    assert (got.body, got.headers["x-amz-checksum-crc32"]) == (data, checksum.decode())
    assert "Content-Encoding" not in got.headers
    assert server.counts().body_bytes_in == len(wire)


def test_a_body_without_a_length_is_refused(raw: Raw) -> None:
    refused = raw("PUT", "/bench/k", chunks(b"12345", 2), Transfer_Encoding="chunked")
    assert (refused.status, refused.code) == (411, "MissingContentLength")
    assert raw("GET", "/bench/k").status == 404


def test_uploads_in_parts(boto: Any, server: BenchServer) -> None:
    """Parts that are replaced, left out or read; what is no upload; an abort. At the end nothing is taken up."""

    def put(upload: str, number: int, body: bytes) -> dict[str, object]:
        answer = boto.upload_part(Bucket="bench", Key="k", UploadId=upload, PartNumber=number, Body=body)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    def complete(upload: str, *parts: dict[str, object], **conditions: str) -> Any:
        return boto.complete_multipart_upload(
            Bucket="bench", Key="k", UploadId=upload, MultipartUpload={"Parts": list(parts)}, **conditions
        )

    upload = boto.create_multipart_upload(Bucket="bench", Key="k")["UploadId"]
    old = put(upload, 1, b"0" * 6 * MiB)
    first, left_out, last = put(upload, 1, b"1" * 5 * MiB), put(upload, 2, b"2"), put(upload, 3, b"3")
    for wrong, code in (
        ((old, last), "InvalidPart"),
        ((last, first), "InvalidPartOrder"),
        ((left_out, last), "EntityTooSmall"),
    ):
        with pytest.raises(ClientError, match=code):
            complete(upload, *wrong)
    boto.put_object(Bucket="bench", Key="k", Body=b"there")
    with pytest.raises(ClientError, match="PreconditionFailed"):
        complete(upload, first, last, IfNoneMatch="*")
    complete(upload, first, last)
    assert boto.get_object(Bucket="bench", Key="k")["Body"].read() == b"1" * 5 * MiB + b"3"
    part = boto.get_object(Bucket="bench", Key="k", PartNumber=2)
    assert (part["Body"].read(), part["PartsCount"]) == (b"3", 2)
    with pytest.raises(ClientError, match="NoSuchUpload"):
        complete(upload, first, last)
    aborted = boto.create_multipart_upload(Bucket="bench", Key="k")["UploadId"]
    put(aborted, 1, b"x")
    boto.abort_multipart_upload(Bucket="bench", Key="k", UploadId=aborted)
    with pytest.raises(ClientError, match="NoSuchUpload"):
        put(aborted, 1, b"x")
    boto.delete_object(Bucket="bench", Key="k")
    with Raw(server) as raw:  # all of the room is there again
        assert raw("PUT", "/bench/all", bytes(96 * MiB)).status == 200


def test_s3fs(server: BenchServer) -> None:
    """Do as torch's FsspecWriter: write by parts, move, read ranges, list, remove."""
    options = server.storage_options
    files = s3fs.S3FileSystem(
        key=options["key"],
        secret=options["secret"],
        endpoint_url=options["endpoint_url"],
        client_kwargs={"region_name": options["region_name"]},
        skip_instance_cache=True,
    )
    data = random.Random(9).randbytes(11 * MiB)
    with files.open("bench/folder/a", "wb", block_size=5 * MiB) as stream:
        stream.write(data)
    files.mv("bench/folder/a", "bench/folder/b")
    assert files.ls("bench/folder") == ["bench/folder/b"]
    assert files.exists("bench/folder/b")
    assert not files.exists("bench/folder/a")
    with files.open("bench/folder/b", "rb") as stream:
        stream.seek(6 * MiB)
        assert stream.read(1000) == data[6 * MiB : 6 * MiB + 1000]
    assert files.cat("bench/folder/b") == data
    files.rm("bench/folder", recursive=True)
    assert files.find("bench") == []


def test_s3torchconnector(server: BenchServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS's own runtime: parts with checksums in trailers, ranges, pages. Not in every environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "benchmark")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "benchmark")
    s3torchconnector = pytest.importorskip("s3torchconnector")
    client = s3torchconnector._s3client.S3Client(
        region="us-east-1",
        endpoint=server.endpoint_url,
        s3client_config=s3torchconnector.S3ClientConfig(force_path_style=True),
    )
    data = random.Random(9).randbytes(20 * MiB)
    with client.put_object("bench", "folder/a") as writer:
        writer.write(data)
    assert client.get_object("bench", "folder/a").read() == data
    assert [info.key for page in client.list_objects("bench", "folder/") for info in page.object_info] == ["folder/a"]


def test_counts_are_exact(server: BenchServer) -> None:
    """Answers are counted once they are read; what is asked of the server itself is not."""
    with Raw(server) as raw:
        answers = [
            raw("PUT", "/bench/k", b"x" * 100_000),
            raw("PUT", "/nowhere/k", b"x" * 10),
            raw("GET", "/bench/k", Range="bytes=1-50000"),
            raw("HEAD", "/bench/k"),
            raw("GET", "/bench/k?acl"),
            raw("GET", "/bench/m"),
        ]
    assert [answer.status for answer in answers] == [200, 404, 206, 200, 501, 404]
    counts = server.counts()
    assert counts.requests == 6
    assert (counts.body_bytes_in, counts.body_bytes_out) == (100_010, sum(len(answer.body) for answer in answers))
    assert counts.operations == {"PutObject": 2, "GetObject": 2, "HeadObject": 1, "NotImplemented": 1}
    assert counts.server_cpu_seconds > 0
    server.reset()
    assert server.counts().requests == 0


def test_bytes_that_were_not_sent_are_not_counted(server: BenchServer) -> None:
    """A client that asks for 64 MiB, far more than sockets hold, and goes."""
    with Raw(server) as raw:
        raw("PUT", "/bench/k", bytes(64 * MiB))
    with socket.create_connection(address_of(server), timeout=30) as connection:
        connection.sendall(b"GET /bench/k HTTP/1.1\r\n\r\n")
        connection.recv(1000)
    assert eventually(lambda: server.counts().body_bytes_out < 60 * MiB)


def eventually(holds: Any) -> bool:
    deadline = time.monotonic() + 20
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_put_that_is_cut_off_leaves_nothing(server: BenchServer) -> None:
    """Half of a body, and the end; the room is there again."""
    with socket.create_connection(address_of(server), timeout=30) as connection:
        connection.sendall(b"PUT /bench/k HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (80 * MiB))
        connection.sendall(bytes(MiB))
    assert eventually(lambda: server.counts().requests == 1)
    assert server.counts().body_bytes_in >= MiB
    with Raw(server) as raw:
        assert raw("GET", "/bench/k").status == 404
        assert raw("PUT", "/bench/l", bytes(80 * MiB)).status == 200


def test_no_room(raw: Raw, server: BenchServer, tmp_path: Path) -> None:
    """Told at once: by an answer that no client tries again, or before the server starts."""
    # Connections of earlier tests, whose ends the server has yet to see, may hold room for a moment.
    assert eventually(lambda: raw("PUT", "/bench/k", bytes(60 * MiB)).status == 200)
    refused = raw("PUT", "/bench/l", bytes(60 * MiB))
    assert (refused.status, refused.code) == (400, "InsufficientStorage")
    assert eventually(lambda: raw("PUT", "/bench/l", bytes(30 * MiB)).status == 200)
    with pytest.raises(InvalidArgumentError, match="no room"), bench_server(size_bytes=1 << 60):
        raise AssertionError
    with pytest.raises(InvalidArgumentError, match="no room"), bench_server(folder=tmp_path / "missing"):
        raise AssertionError


def test_what_is_on_the_way_is_not_overwritten(server: BenchServer) -> None:
    """A client asks for 64 MiB and reads late: in the meantime its object is deleted, and all room written over.

    The socket's buffers hold pages of the file itself; some of the answer is sent, the rest waits for the client.
    """
    with Raw(server) as raw, socket.create_connection(address_of(server), timeout=30) as connection:
        raw("PUT", "/bench/k", b"a" * MiB)
        connection.sendall(b"GET /bench/k HTTP/1.1\r\n\r\n")
        answer = connection.recv(100)
        # All of it fits into buffers: the server has sent it.
        assert eventually(lambda: server.counts().body_bytes_out == MiB)
        time.sleep(0.1)
        raw("DELETE", "/bench/k")
        assert raw("PUT", "/bench/l", b"b" * 95 * MiB).status == 200
        assert raw("PUT", "/bench/m", b"b" * MiB).status == 200  # where the first one was
        while len(answer.partition(b"\r\n\r\n")[2]) < MiB:
            answer += connection.recv(MiB)
        assert answer.partition(b"\r\n\r\n")[2] == b"a" * MiB
        assert raw("GET", "/bench/m").body == b"b" * MiB


def test_room_is_found_again(tmp_path: Path) -> None:
    """Extents taken and dropped in any order, some of them still on the way: none overlap, and all comes back."""
    space = Space(tmp_path, 64 * 4096)
    rng = random.Random(1)
    for _ in range(50):
        taken = [space.take(rng.randrange(1, 5 * 4096)) for _ in range(12)]
        ordered = sorted(taken, key=lambda extent: extent.start)
        assert all(one.stop <= other.start for one, other in itertools.pairwise(ordered))
        on_the_way = rng.sample(taken, 4)
        for extent in on_the_way:
            space.sending(extent)
        rng.shuffle(taken)
        for extent in taken:
            space.drop(extent)
        whole = space.take(64 * 4096)
        for extent in on_the_way:
            space.arrived(extent)
        space.drop(whole)
        assert space._free == [(0, 64 * 4096)]
    space.file.close()


def test_shapes(server: BenchServer) -> None:
    """Refusals are followed by an answer, and fewer bytes and later answers take their time."""
    server.shape(Shape(slow_down_share=0.3))
    with Raw(server) as raw:
        statuses = [raw("PUT", f"/bench/{number // 2}", b"x" * 10).status for number in range(200)]
        assert 20 < statuses.count(503) < 80
        assert all(pair != (503, 503) for pair in zip(statuses[::2], statuses[1::2], strict=True))
        for shape in (Shape(latency_ms=200), Shape(bandwidth_bytes_per_second=4_000_000)):
            server.shape(shape)
            # Of a megabyte at 4 MB/s a quarter of a second, less what the bucket holds.
            for method, body in (("PUT", bytes(1_000_000)), ("GET", b"")):
                began = time.monotonic()
                assert raw(method, "/bench/k", body).status == 200
                assert time.monotonic() - began >= 0.2


@pytest.fixture(scope="module")
def verifying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BenchServer]:
    """With checksums that are computed in Python."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "awscrt").mkdir()
    (folder / "awscrt" / "__init__.py").touch()
    (folder / "awscrt" / "checksums.py").write_text(AWSCRT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        with bench_server(size_bytes=32 * MiB, verify=True) as server:
            yield server


# Of b"123456789", as the catalogue of CRCs has them.
CHECKSUMS = {
    "crc32": "cbf43926",
    "crc32c": "e3069283",
    "crc64nvme": "ae8b14860a799888",
    "sha1": hashlib.sha1(b"123456789").hexdigest(),
    "sha256": hashlib.sha256(b"123456789").hexdigest(),
}


@pytest.mark.parametrize("name", CHECKSUMS)
def test_checksums_are_verified(verifying: BenchServer, name: str) -> None:
    """Right and wrong, in the head and in the trailer: what is wrong is refused, and changes nothing."""
    right = base64.b64encode(bytes.fromhex(CHECKSUMS[name])).decode()
    wrong = base64.b64encode(bytes(len(bytes.fromhex(CHECKSUMS[name])))).decode()
    header = f"x-amz-checksum-{name}"
    with Raw(verifying) as raw:
        for value, status in ((wrong, 400), (right, 200)):
            put = raw("PUT", f"/bench/{name}", b"123456789", **{header: value})
            assert put.status == status
            assert put.status == 200 or put.code == "BadDigest"
            assert raw("GET", f"/bench/{name}").status == {400: 404, 200: 200}[status]
        for value, status in ((wrong, 400), (right, 200)):
            wire = chunks(b"123456789", 4, trailers=f"{header}:{value}\r\n".encode())
            trailing = {"Content-Encoding": "aws-chunked", "X-Amz-Decoded-Content-Length": "9", "X-Amz-Trailer": header}
            assert raw("PUT", f"/bench/{name}-trailer", wire, **trailing).status == status
        assert raw("GET", f"/bench/{name}-trailer").body == b"123456789"


def test_clients_compute_the_checksums_that_are_verified(verifying: BenchServer) -> None:
    """Our store sends CRC64NVME, boto3 CRC32 in a trailer; a wrong one is refused for each part, too."""
    store = open_store("s3://bench", storage_options=verifying.storage_options)
    store.put("ours", [b"abc", b"def"])
    assert store.get("ours", limit_bytes=10).data == b"abcdef"
    with closing(client_of(verifying, config=ONCE)) as client:
        client.put_object(Bucket="bench", Key="boto3", Body=b"abcdef")
        upload = client.create_multipart_upload(Bucket="bench", Key="k")["UploadId"]
        with pytest.raises(ClientError, match="BadDigest"):
            client.upload_part(
                Bucket="bench", Key="k", UploadId=upload, PartNumber=1, Body=b"abc", ChecksumCRC32="AAAAAA=="
            )


def test_tls(tmp_path: Path) -> None:
    """Our store, boto3 and http.client trust the file that the server gives; without it nobody does."""
    data = random.Random(8).randbytes(3 * MiB)
    with bench_server(size_bytes=16 * MiB, tls=True) as server:
        assert server.ca_file is not None
        folder = server.ca_file.parent
        store = open_store("s3://bench", storage_options=server.storage_options)
        store.put("k", [data], condition="absent")
        with pytest.raises(ConditionFailedError):
            store.put("k", [data], condition="absent")
        buffer = bytearray(2 * MiB)
        store.get_into("k", MiB, memoryview(buffer))
        assert buffer == data[MiB:]
        with closing(client_of(server, verify=str(server.ca_file), config=ONCE)) as client:
            assert client.get_object(Bucket="bench", Key="k")["Body"].read() == data
        assert 5 * MiB <= server.counts().body_bytes_out < 5 * MiB + 1_000  # and an error
        distrusting = open_store("s3://bench", storage_options={**server.storage_options, "verify": None})
        with pytest.raises(StorageError, match="certificate"):
            distrusting.head("k")
    assert not folder.exists()


def test_it_ends_with_its_parent() -> None:
    """A parent that kills itself inside the block; the kernel tells when the server has ended, and nothing is left."""
    parent = subprocess.Popen([sys.executable, "-c", DIE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid, ca_file = parent.stdout.readline().decode().split()
    server = os.pidfd_open(int(pid))
    try:
        parent.communicate(b"x")
        assert parent.returncode == -signal.SIGKILL
        assert select.select([server], [], [], 30)[0] == [server]
        assert not Path(ca_file).parent.exists()
    finally:
        os.close(server)


def test_it_ends_with_its_block(tmp_path: Path) -> None:
    """Also where the block raises; its file had no name in the meantime."""
    with pytest.raises(KeyError) as caught, bench_server(size_bytes=MiB, folder=tmp_path) as server:
        raise KeyError(*tmp_path.iterdir())
    assert caught.value.args == ()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address_of(server), timeout=5)


def test_it_needs_the_standard_library_alone() -> None:
    """Imported into a fresh interpreter: no torch, and no client of any store."""
    code = (
        "import sys, tests.benchmark.server.server;"
        "print({'torch', 'numpy', 'boto3', 'botocore', 'obstore', 'awscrt'} & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert shown == "set()"
