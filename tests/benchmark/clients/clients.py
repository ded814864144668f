"""Clients that are compared: each saves a state to S3 and loads it again, at its defaults and at its best settings.

Each is a pair of functions of a URL and a state, called on every rank; what it costs to import it is no part of a
measurement. Peers are imported when they are made: the package does not need them. Over TLS each trusts the server's
certificate by a setting that it documents: `verify` of boto3 and botocore, and `SSL_CERT_FILE`, which the connector's
runtime reads.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_remote.common.units import MiB
from dcp_remote.reader import RemoteReader
from dcp_remote.storage import open_store
from dcp_remote.writer import RemoteWriter
from tests.benchmark.clients.raw import RawShard, get_all, pack, put_all
from tests.benchmark.clients.state import local_tensors
from tests.benchmark.report.plan import BEST, BOTO3, CONNECTOR, OURS, RAW, S3FS

Options = Mapping[str, Any]
Act = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Client:
    """One way."""

    save: Act
    load: Act


def ours(options: Options) -> Client:
    """RemoteWriter and RemoteReader; there is nothing to set."""
    open_store("s3://bench/checkpoint", options)  # imports the clients; makes no request

    def save(url: str, state: dict[str, Any]) -> None:
        dcp.save(state, storage_writer=RemoteWriter(url, storage_options=options))

    def load(url: str, state: dict[str, Any]) -> None:
        dcp.load(state, storage_reader=RemoteReader(url, storage_options=options))

    return Client(save, load)


def raw(options: Options) -> Client:
    """The socket alone; what it saved, only as many ranks load."""
    endpoint_url, ca_file = str(options["endpoint_url"]), options.get("verify")

    def shards(url: str, state: dict[str, Any]) -> list[RawShard]:
        views = [tensor.reshape(-1).view(torch.uint8).numpy().data for tensor in local_tensors(state)]
        return pack(views, f"/{url.removeprefix('s3://')}/rank-{_rank()}")

    def save(url: str, state: dict[str, Any]) -> None:
        put_all(endpoint_url, shards(url, state), ca_file=ca_file)

    def load(url: str, state: dict[str, Any]) -> None:
        get_all(endpoint_url, shards(url, state), ca_file=ca_file)

    return Client(save, load)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def fsspec(options: Options, *, best: bool) -> Client:
    """FsspecWriter and FsspecReader of torch, with s3fs. At its best it writes by eight threads."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    import_module("s3fs")
    client = {"endpoint_url": options.get("endpoint_url"), "verify": options.get("verify")}
    s3fs: dict[str, Any] = {
        "key": options.get("key"),
        "secret": options.get("secret"),
        "client_kwargs": {name: value for name, value in client.items() if value is not None},
    }
    if best:
        s3fs["config_kwargs"] = {"max_pool_connections": 32, "s3": {"payload_signing_enabled": False}}
    threads = 8 if best else 1

    def save(url: str, state: dict[str, Any]) -> None:
        dcp.save(state, storage_writer=FsspecWriter(url, thread_count=threads, **s3fs))

    def load(url: str, state: dict[str, Any]) -> None:
        dcp.load(state, storage_reader=FsspecReader(url, **s3fs))

    return Client(save, load)


def connector(options: Options, *, best: bool) -> Client:
    """AWS's s3torchconnector. At its best it writes by eight threads, and reads by ranges that fit the plan."""
    from s3torchconnector import S3ClientConfig, S3ReaderConstructor
    from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

    os.environ |= {"AWS_ACCESS_KEY_ID": str(options["key"]), "AWS_SECRET_ACCESS_KEY": str(options["secret"])}
    if options.get("verify") is not None:
        os.environ["SSL_CERT_FILE"] = str(options["verify"])
    region = str(options.get("region_name", "us-east-1"))
    settings: dict[str, Any] = {"part_size": 16 * MiB, "throughput_target_gbps": 100.0} if best else {}
    config = S3ClientConfig(force_path_style=True, **settings)

    def save(url: str, state: dict[str, Any]) -> None:
        writer = S3StorageWriter(region, url, s3client_config=config, thread_count=8 if best else 1)
        _point(writer, options)
        dcp.save(state, storage_writer=writer)

    def load(url: str, state: dict[str, Any]) -> None:
        constructor = S3ReaderConstructor.dcp_optimized() if best else None
        reader = S3StorageReader(region, url, s3client_config=config, reader_constructor=constructor)
        _point(reader, options)
        dcp.load(state, storage_reader=reader)

    return Client(save, load)


def _point(storage: Any, options: Options) -> None:
    """To another server than AWS's; the connector's writer and reader have no argument for that."""
    storage.fs._client._endpoint = options.get("endpoint_url")


def torch_save(options: Options, *, best: bool) -> Client:
    """`torch.save` to memory, one object a rank, by boto3; loads only on as many ranks as saved."""
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    transfer = TransferConfig(max_concurrency=16, multipart_chunksize=64 * MiB) if best else TransferConfig()
    checks: dict[str, Any] = {
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    client = boto3.client(
        "s3",
        endpoint_url=options.get("endpoint_url"),
        aws_access_key_id=options.get("key"),
        aws_secret_access_key=options.get("secret"),
        region_name=options.get("region_name", "us-east-1"),
        verify=options.get("verify"),
        config=Config(max_pool_connections=32, s3={"addressing_style": "path"}, **(checks if best else {})),
    )

    def place(url: str) -> tuple[str, str]:
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        return bucket, f"{prefix}/rank-{_rank()}.pt"

    def save(url: str, state: dict[str, Any]) -> None:
        stream = io.BytesIO()
        torch.save(state, stream)
        stream.seek(0)
        client.upload_fileobj(stream, *place(url), Config=transfer)

    def load(url: str, state: dict[str, Any]) -> None:
        stream = io.BytesIO()
        client.download_fileobj(*place(url), stream, Config=transfer)
        stream.seek(0)
        _copy_into(state, torch.load(stream, weights_only=False))

    return Client(save, load)


def _copy_into(state: dict[str, Any], loaded: dict[str, Any]) -> None:
    for key, value in loaded.items():
        if isinstance(value, dict):
            _copy_into(state[key], value)
        else:
            state[key].copy_(value)


# By name; each is made from the options of the server.
CLIENTS: dict[str, Callable[[Options], Client]] = {
    OURS: ours,
    RAW: raw,
    S3FS: lambda options: fsspec(options, best=False),
    S3FS + BEST: lambda options: fsspec(options, best=True),
    CONNECTOR: lambda options: connector(options, best=False),
    CONNECTOR + BEST: lambda options: connector(options, best=True),
    BOTO3: lambda options: torch_save(options, best=False),
    BOTO3 + BEST: lambda options: torch_save(options, best=True),
}
