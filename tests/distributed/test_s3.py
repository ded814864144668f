"""Checkpoints on S3: what is asked of the server, what lies there, and what users are told when it does not work."""

from __future__ import annotations

import http.client
import re
import socket
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_remote import RemoteReader, RemoteWriter, load
from dcp_remote.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitConflictError,
    DcpRemoteError,
    ObjectNotFoundError,
    PermissionDeniedError,
    TransientStorageError,
)
from dcp_remote.format.shard import TABLE_NAME
from dcp_remote.storage import open_store
from dcp_remote.testing.servers import HttpAnswer, HttpRequest, S3Server, ScriptedServer, scripted_server
from tests.support.rank_pool import RankPool
from tests.support.training import STRATEGIES, assert_same, full, load_each, save_trained

Options = dict[str, str]

# These follow from the connection to the server behind, or are set anew for the client in front.
_HOP_HEADERS = {"connection", "content-length", "date", "host", "server", "transfer-encoding"}


@pytest.fixture(autouse=True)
def no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials or region but those of the test, and nobody asks the metadata service of an instance."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


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


def failure(error: CheckpointException) -> BaseException:
    """Return the error that was raised on the only rank."""
    assert list(error.failures) == [0]
    cause, _ = error.failures[0]
    return cause


STATE = {"weight": torch.arange(1000.0).reshape(10, 100), "bias": torch.ones(3, dtype=torch.bfloat16)}


def save(url: str, options: Options | None, state: dict[str, Any] | None = None, **settings: Any) -> None:
    nested = {"model": STATE if state is None else state}
    dcp.save(nested, storage_writer=RemoteWriter(url, storage_options=options, **settings))


# ---- what works


@pytest.mark.torture
@pytest.mark.parametrize(("saver", "loader"), [("fsdp-4", "tp-2"), ("fsdp-tp-2x2", "fsdp-3"), ("ddp-2", "hsdp-2x2")])
def test_one_strategy_loads_what_another_saved(
    saver: str, loader: str, rank_pool: RankPool, s3_server: S3Server, bucket: str
) -> None:
    """As `test_strategies`, through S3: the whole training on the ranks, and `load` here."""
    url, options = f"s3://{bucket}/a/checkpoint", s3_server.storage_options
    expected = rank_pool.run(save_trained, saver, url, 1, options, ranks=STRATEGIES[saver].ranks)[0]
    for states in rank_pool.run(load_each, loader, [url], options, ranks=STRATEGIES[loader].ranks):
        assert_same(states[0], expected)
    assert_same(full(load(url, storage_options=options)), expected)


def test_a_save_of_one_shard_is_three_requests(s3_server: S3Server, proxy: ScriptedServer, bucket: str) -> None:
    """Counted at a proxy: a look, the shard, the manifest under a condition; a load is the manifest and a range.

    The first save of a process sees before its shard whether the server keeps to conditions: nothing is known of it.
    """
    url, options = f"s3://{bucket}/one", behind(proxy, s3_server)
    save(f"s3://{bucket}/first", options)
    probe, again = proxy.requests[1:3]
    assert probe.path == again.path
    assert "/first/dcp-remote-probes/" in probe.path
    assert probe.headers["if-none-match"] == again.headers["if-none-match"] == "*"
    assert [request.method for request in proxy.requests] == ["GET", "PUT", "PUT", "POST", "PUT", "PUT"]
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
    assert sent(proxy.requests, bucket) == ["GET one/manifest.json", "GET one/shards/00000"]
    assert_direct(proxy.requests)


def sharded(factor: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(40.0).reshape(8, 5) * factor
    return {"rows": distribute_tensor(rows, mesh, [Shard(0)], src_data_rank=None)}


def save_and_load(url: str, options: Options) -> None:
    dcp.save(sharded(1), storage_writer=RemoteWriter(url, storage_options=options))
    state = sharded(0)
    dcp.load(state, storage_reader=RemoteReader(url, storage_options=options))
    assert torch.equal(state["rows"].to_local(), sharded(1)["rows"].to_local())


def test_ranks_ask_for_what_they_need_and_nothing_else(
    rank_pool: RankPool, s3_server: S3Server, proxy: ScriptedServer, bucket: str
) -> None:
    """Four ranks: one look, a shard each, one manifest; then a manifest and a range each. No list, head, copy, part.

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
    assert sorted(requests[6:]) == ["GET four/manifest.json"] * 4 + [f"GET {shard}" for shard in shards]
    assert_direct(proxy.requests)


def test_safetensors_opens_every_shard(rank_pool: RankPool, s3_server: S3Server, bucket: str, tmp_path: Path) -> None:
    """Fetched by boto3, opened by that library: every tensor in a shard is part of what was saved; none is missing."""
    url, options = f"s3://{bucket}/opened", s3_server.storage_options
    saved = rank_pool.run(save_trained, "fsdp-3", url, 1, options, ranks=range(3))[0]
    expected = {path.strip("/").replace("/", "."): value for path, value in saved.items()}
    client: Any = boto3.client("s3", **options)  # type: ignore[call-overload]  # by name
    shards = client.list_objects_v2(Bucket=bucket, Prefix="opened/shards/")["Contents"]
    covered: Counter[str] = Counter()
    for number, shard in enumerate(shards):
        client.download_file(bucket, shard["Key"], str(tmp_path / str(number)))
        with safe_open(tmp_path / str(number), framework="pt") as file:
            for label in file.keys():  # noqa: SIM118  # no mapping: it has no iterator
                if label == TABLE_NAME:
                    continue
                tensor = file.get_tensor(label)
                name, _, offsets = label.partition("@")
                part = expected[name]
                for dimension, offset in enumerate(map(int, offsets.split(",")) if offsets else ()):
                    part = part.narrow(dimension, offset, tensor.shape[dimension])
                assert tensor.dtype == part.dtype
                assert torch.equal(tensor, part), label
                covered[name] += tensor.numel()
    assert covered == {name: value.numel() for name, value in expected.items() if isinstance(value, torch.Tensor)}


def test_credentials_of_the_environment(s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No `storage_options` at all."""
    options = s3_server.storage_options
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["aws_access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["aws_secret_access_key"])
    monkeypatch.setenv("AWS_DEFAULT_REGION", options["region_name"])
    save(f"s3://{bucket}/from-the-environment", None)
    template = {"model": {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}}
    dcp.load(template, storage_reader=RemoteReader(f"s3://{bucket}/from-the-environment"))
    assert_same(full(template["model"]), full(STATE))


# ---- a checkpoint that is there, or is not


def test_a_checkpoint_is_replaced_only_if_asked(s3_server: S3Server, proxy: ScriptedServer, bucket: str) -> None:
    """Refused after one look; with `overwrite=True` replaced, under the condition of what was seen."""
    url, options = f"s3://{bucket}/twice", behind(proxy, s3_server)
    save(url, options)
    proxy.requests.clear()
    with pytest.raises(CheckpointException) as caught:
        save(url, options, {"weight": torch.zeros(1)})
    assert isinstance(failure(caught.value), CheckpointExistsError)
    assert sent(proxy.requests, bucket) == ["GET twice/manifest.json"]
    proxy.requests.clear()
    save(url, options, {"weight": torch.ones(2)}, overwrite=True)
    assert "if-match" in proxy.requests[-1].headers
    assert_same(full(load(url, storage_options=options)), {"/model/weight": torch.ones(2)})


def test_a_checkpoint_that_is_not_there(s3_server: S3Server, bucket: str) -> None:
    """The bucket is there: the error says that no checkpoint is."""
    url, options = f"s3://{bucket}/nothing", s3_server.storage_options
    with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint here"):
        load(url, storage_options=options)
    with pytest.raises(CheckpointException, match="no committed checkpoint here"):
        dcp.load({"weight": torch.zeros(1)}, storage_reader=RemoteReader(url, storage_options=options))


class MeetingPlanner(DefaultSavePlanner):
    """Both coordinators meet after each has looked, and before either commits."""

    def __init__(self, coordinators: dist.ProcessGroup) -> None:
        super().__init__()
        self._coordinators = coordinators

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        dist.barrier(self._coordinators)
        return super().create_global_plan(all_plans)


def race(url: str, options: Options) -> str:
    """Ranks 0 and 1 save, and so do ranks 2 and 3, to the same URL."""
    groups = dist.new_group([0, 1]), dist.new_group([2, 3])
    coordinators = dist.new_group([0, 2])
    writer, job = RemoteWriter(url, storage_options=options), dist.get_rank() // 2
    state = {"job": torch.tensor(job), "more": torch.zeros(100)}
    try:
        dcp.save(state, storage_writer=writer, process_group=groups[job], planner=MeetingPlanner(coordinators))
    except CheckpointException as error:
        (cause, _) = error.failures[0]
        assert isinstance(cause, DcpRemoteError)
        return f"{type(cause).__name__}: {cause}"
    return "committed"


def test_of_two_jobs_that_save_one_checkpoint_one_wins(
    rank_pool: RankPool, s3_server: S3Server, proxy: ScriptedServer, bucket: str
) -> None:
    """Both have seen that nothing is there; the ranks of one job return, those of the other raise the conflict."""
    url, options = f"s3://{bucket}/race", behind(proxy, s3_server)
    results = rank_pool.run(race, url, options)
    assert results[0] == results[1]
    assert results[2] == results[3]
    assert sorted(result.partition(":")[0] for result in results[::2]) == [CommitConflictError.__name__, "committed"]
    assert load(url, storage_options=options)["job"] == results[::2].index("committed")


# ---- what users are told


def test_a_bucket_that_is_not_there(s3_server: S3Server) -> None:
    """At save and at load; both say that buckets are not created, and none is."""
    url, options = f"s3://no-such-{uuid.uuid4().hex}/checkpoint", s3_server.storage_options
    with pytest.raises(CheckpointException) as caught:
        save(url, options)
    error = failure(caught.value)
    assert isinstance(error, DcpRemoteError)
    assert "never created implicitly" in str(error)
    with pytest.raises(CheckpointNotFoundError, match="never created implicitly"):
        load(url, storage_options=options)
    with pytest.raises(ObjectNotFoundError, match="never created implicitly"):
        list(open_store(url, options).list())


def test_no_credentials(s3_server: S3Server, bucket: str) -> None:
    """Neither options, environment nor profile give any: the error says where they can come from."""
    options = {"endpoint_url": s3_server.endpoint_url, "region_name": "us-east-1"}
    with pytest.raises(CheckpointException) as caught:
        save(f"s3://{bucket}/refused", options)
    error = failure(caught.value)
    assert isinstance(error, PermissionDeniedError)
    assert "credentials" in str(error)
    with pytest.raises(PermissionDeniedError, match="credentials"):
        load(f"s3://{bucket}/refused", storage_options=options)


def test_an_endpoint_that_does_not_answer(s3_server: S3Server) -> None:
    """A port that is taken, but not listened at: repeated until the deadline, then an error that names the URL."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        options = s3_server.storage_options | {"endpoint_url": f"http://127.0.0.1:{taken.getsockname()[1]}"}
        with pytest.raises(CheckpointException) as caught:
            save("s3://bucket/down", options, timeout_seconds=1.5)
    error = failure(caught.value)
    assert isinstance(error, TransientStorageError)
    attempts = error.details["attempts"]
    assert isinstance(attempts, int)
    assert attempts > 1
    assert "s3://bucket/down" in str(error)
