"""Fixtures of several files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import boto3
import pytest

from dcp_remote.testing.servers import S3Server


@pytest.fixture(scope="module")
def raw_s3(s3_server: S3Server) -> Any:
    """Client of boto3 for the server of moto."""
    return boto3.client("s3", **s3_server.storage_options)  # type: ignore[call-overload]  # its arguments by name


@pytest.fixture
def empty_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Remove all configuration of AWS; return the path where `config` would be, beside `credentials`."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "config"
