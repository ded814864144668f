"""Checkpoints on S3: what is asked of the server."""

from __future__ import annotations

import http.client
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_remote import RemoteReader, RemoteWriter, load
from dcp_remote.testing.servers import S3Server
from tests.distributed.managed import sharded
from tests.support.rank_pool import RankPool
from tests.support.scripted_server import HttpAnswer, HttpRequest, ScriptedServer, scripted_server
from tests.support.training import assert_same, full

Options = dict[str, str]

# These follow from the connection to the server behind, or are set anew for the client in front.
_HOP_HEADERS = {"connection", "content-length", "date", "host", "server", "transfer-encoding"}


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    """An empty bucket."""
    name = f"test-{uuid.uuid4().hex}"
    s3_server.create_bucket(name)
    return name


def forward(server: S3Server) -> Callable[[HttpRequest], HttpAnswer]:
    """Answers as the server behind does; one write at a time, because moto looks and then writes in two steps."""
    writing = threading.Lock()

    def answer(request: HttpRequest) -> HttpAnswer:
        connection = http.client.HTTPConnection(urlsplit(server.endpoint_url).netloc, timeout=30)
        headers = {name: value for name, value in request.headers.items() if name not in _HOP_HEADERS}
        with writing:
            connection.request(request.method, request.path, body=request.body, headers=headers)
            response = connection.getresponse()
            body = response.read()
        connection.close()
        kept = {name: value for name, value in response.getheaders() if name.lower() not in _HOP_HEADERS}
        return HttpAnswer(response.status, body, kept)

    return answer


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[ScriptedServer]:
    """The server, seen through something that remembers every request."""
    with scripted_server(forward(s3_server)) as server:
        yield server


def behind(proxy: ScriptedServer, s3_server: S3Server) -> Options:
    return s3_server.storage_options | {"endpoint_url": proxy.endpoint_url}


def sent(requests: list[HttpRequest], bucket: str) -> list[str]:
    """Methods and paths, without what is random in the names of shards."""
    return [
        re.sub(r"shards/.*?/rank-(\d+)-.*", r"shards/\1", f"{r.method} {r.path}").replace(f"/{bucket}/", "")
        for r in requests
    ]


def assert_direct(requests: list[HttpRequest]) -> None:
    """All ranges were asked for by signed URLs: none was left to obstore."""
    assert all("X-Amz-Signature" in request.path for request in requests if "range" in request.headers)


STATE = {"weight": torch.arange(1000.0).reshape(10, 100), "bias": torch.ones(3, dtype=torch.bfloat16)}


def save(url: str, options: Options) -> None:
    dcp.save({"model": STATE}, storage_writer=RemoteWriter(url, storage_options=options))


def test_a_save_of_one_shard_is_three_requests(s3_server: S3Server, proxy: ScriptedServer, bucket: str) -> None:
    """Counted at a proxy: a look, the shard, the manifest under a condition; a load is the manifest and a range.

    The first save of a process sees before its shard whether the server keeps to conditions: nothing is known of it.
    """
    url, options = f"s3://{bucket}/one", behind(proxy, s3_server)
    save(f"s3://{bucket}/first", options)
    probe, again, shard, manifest = (request for request in proxy.requests if request.method == "PUT")
    assert probe.path == again.path
    assert "/first/dcp-remote-probes/" in probe.path
    assert probe.headers["if-none-match"] == again.headers["if-none-match"] == "*"
    assert sent([shard, manifest], bucket) == ["PUT first/shards/00000", "PUT first/manifest.json"]
    assert sorted(request.method for request in proxy.requests) == ["GET", "POST", "PUT", "PUT", "PUT", "PUT"]
    proxy.requests.clear()
    save(url, options)
    look, shard, manifest = proxy.requests
    assert sent([look, shard, manifest], bucket) == [
        "GET one/manifest.json",
        "PUT one/shards/00000",
        "PUT one/manifest.json",
    ]
    assert manifest.headers["if-none-match"] == "*"
    for request in (shard, manifest):
        assert "x-amz-checksum-crc64nvme" in request.headers
        assert "x-amz-copy-source" not in request.headers
    proxy.requests.clear()
    assert_same(full(load(url, storage_options=options)["model"]), full(STATE))
    # The first load of a process also asks for a catalog, unless the manifest comes before.
    loaded = [one for one in sent(proxy.requests, bucket) if one != "GET one/catalog.json"]
    assert loaded == ["GET one/manifest.json", "GET one/shards/00000"]
    assert len(proxy.requests) <= 3
    assert_direct(proxy.requests)


def rows(factor: int) -> dict[str, Any]:
    return {"rows": sharded(torch.arange(40.0).reshape(8, 5) * factor)}


def save_and_load(url: str, options: Options) -> None:
    dcp.save(rows(1), storage_writer=RemoteWriter(url, storage_options=options))
    state = rows(0)
    dcp.load(state, storage_reader=RemoteReader(url, storage_options=options))
    assert torch.equal(state["rows"].to_local(), rows(1)["rows"].to_local())


def test_ranks_ask_for_what_they_need_and_nothing_else(
    rank_pool: RankPool, s3_server: S3Server, proxy: ScriptedServer, bucket: str
) -> None:
    """Four ranks: one look, a shard each, one manifest; then a manifest and a range each. No list, head, copy, part.

    The first load of a process also asks for a catalog, unless the manifest comes before.

    And once, by the coordinator alone, the three requests that see whether the server keeps to conditions.
    """
    rank_pool.run(save_and_load, f"s3://{bucket}/four", behind(proxy, s3_server))
    asked = [request for request in proxy.requests if "dcp-remote-probes" in request.path or request.method == "POST"]
    assert [request.method for request in asked] == ["PUT", "PUT", "POST"]
    requests = sent([request for request in proxy.requests if request not in asked], bucket)
    shards = [f"four/shards/0000{rank}" for rank in range(4)]
    assert requests[0] == "GET four/manifest.json"
    assert sorted(requests[1:5]) == [f"PUT {shard}" for shard in shards]
    assert requests[5] == "PUT four/manifest.json"
    loaded = sorted(one for one in requests[6:] if one != "GET four/catalog.json")
    assert loaded == ["GET four/manifest.json"] * 4 + [f"GET {shard}" for shard in shards]
    assert len(requests) - 6 <= 3 * 4
    assert_direct(proxy.requests)


# ---- a checkpoint that is there, or is not


# ---- what users are told
