"""Tests of the servers of the test kit: that they end, and that an interrupted put leaves nothing."""

from __future__ import annotations

import http.client
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from dcp_remote.errors import InvalidArgumentError, StorageError
from dcp_remote.testing import servers
from dcp_remote.testing.servers import S3Server, moto_server

DIE = """
import os, signal, sys
from dcp_remote.testing.servers import moto_server
with moto_server() as server:
    print(server.pid, flush=True)
    sys.stdin.read(1)  # until the test watches the server
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="waits for a process that is not a child by pidfd_open(2)")
def test_moto_ends_with_its_parent() -> None:
    """Kill the parent inside the block, and wait by pidfd until the server has ended."""
    parent = subprocess.Popen([sys.executable, "-c", DIE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    server = os.pidfd_open(int(parent.stdout.readline()))
    try:
        parent.communicate(b"x")
        assert parent.returncode == -signal.SIGKILL
        assert select.select([server], [], [], 30)[0] == [server]
    finally:
        os.close(server)


def test_moto_ends_with_its_block() -> None:
    """Raise inside the block: the port is closed afterwards."""
    with pytest.raises(KeyError), moto_server() as server:
        raise KeyError
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", urlsplit(server.endpoint_url).port or 0), timeout=5)


def test_moto_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the child fail at once: the error quotes its output."""
    monkeypatch.setattr(servers, "_CHILD", "raise SystemExit('no moto here')")
    with pytest.raises(InvalidArgumentError, match="no moto here"), moto_server(log_path=tmp_path / "log"):
        raise AssertionError


def test_an_interrupted_put_leaves_nothing(s3_server: S3Server) -> None:
    """Send half a body and close: after the server has hung up, there is no object."""
    s3_server.create_bucket("cut-off")
    address = urlsplit(s3_server.endpoint_url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=30) as connection:
        connection.sendall(b"PUT /cut-off/key HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n" + b"x" * 50)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1000):
            pass
    reader = http.client.HTTPConnection(address.netloc, timeout=30)
    reader.request("GET", "/cut-off/key")
    assert reader.getresponse().status == http.HTTPStatus.NOT_FOUND
    reader.close()


def test_bad_bucket_names_are_refused(s3_server: S3Server) -> None:
    """Create a bucket with an invalid name: the error quotes the server."""
    with pytest.raises(StorageError, match="InvalidBucketName"):
        s3_server.create_bucket("x")
