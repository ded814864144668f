"""A checkpoint that s3torchconnector wrote to a bucket, imported into a run in the same bucket."""

from __future__ import annotations

import importlib.util
import uuid
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_remote import import_checkpoint, load
from dcp_remote.testing.servers import S3Server

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("s3torchconnector") is None, reason="pip install 'dcp-remote[bench]'"
)


@pytest.mark.parametrize("has_prefixes", [False, True])
def test_a_checkpoint_of_s3torchconnector(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, *, has_prefixes: bool
) -> None:
    """Also with files in subfolders, as its prefix strategies place them."""
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import HexPrefixStrategy, S3StorageWriter

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    bucket = f"s3torchconnector-{uuid.uuid4().hex[:12]}"
    s3_server.create_bucket(bucket)
    url = f"s3://{bucket}/theirs"
    options: dict[str, Any] = {"prefix_strategy": HexPrefixStrategy(epoch_num=3)} if has_prefixes else {}
    writer = S3StorageWriter(
        region="us-east-1",
        path=url,
        s3client_config=S3ClientConfig(force_path_style=True),
        **options,
    )
    writer.fs._client._endpoint = s3_server.endpoint_url  # the writer has no argument for it
    torch.manual_seed(0)
    state = {"model": {"w": torch.randn(3000, 4000), "b": torch.ones(3).bfloat16()}, "optim": {"lr": 0.1}, "epoch": 3}
    dcp.save(state, storage_writer=writer, no_dist=True)
    stores: dict[str, Any] = {
        "source_options": s3_server.storage_options,
        "storage_options": s3_server.storage_options,
    }
    import_checkpoint(url, f"s3://{bucket}/run", step=5, progress=False, **stores)
    loaded = load(f"s3://{bucket}/run", storage_options=s3_server.storage_options)
    assert torch.equal(loaded["model"]["w"], state["model"]["w"])  # type: ignore[index]  # a dict of dicts
    assert torch.equal(loaded["model"]["b"], torch.ones(3).bfloat16())
    assert (loaded["optim"], loaded["epoch"]) == ({"lr": 0.1}, 3)
