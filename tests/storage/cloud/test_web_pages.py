"""An endpoint that answers every request with 200 and a web page, as the port of MinIO's console does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch.distributed.checkpoint as dcp

from dcp_remote import CheckpointManager, RemoteWriter, latest, load, plain_errors
from dcp_remote.cli import main
from dcp_remote.errors import CorruptCheckpointError, StorageError
from dcp_remote.storage.cloud.errors import is_web_page
from dcp_remote.storage.conditional_writes import PROBES_PREFIX
from tests.support.clouds import OBJECT_HEADERS
from tests.support.scripted_server import HttpAnswer, ScriptedServer, scripted_server

URL = "s3://bucket/run"
KEYS = {"key": "testing", "secret": "a-secret-key", "region": "us-east-1"}
PAGE = b'<!doctype html><html lang="en"><head><title>MinIO Console</title></head></html>'


@pytest.fixture
def console() -> Iterator[ScriptedServer]:
    with scripted_server(lambda request: HttpAnswer(200, PAGE, OBJECT_HEADERS)) as server:
        yield server


def dcp_save(options: Mapping[str, object]) -> None:
    with plain_errors():
        dcp.save({"a": 1}, storage_writer=RemoteWriter(URL, storage_options=options))


CALLS: Mapping[str, Callable[[Mapping[str, object]], object]] = {
    "latest": lambda options: latest(URL, storage_options=options),
    "load": lambda options: load(URL, storage_options=options),
    "load of a step": lambda options: load(URL, step=3, storage_options=options),
    "restore": lambda options: CheckpointManager(URL, storage_options=options).restore({"a": 1}),
    "save": lambda options: CheckpointManager(URL, storage_options=options).save(1, {"a": 1}, wait=True),
    "dcp.save": dcp_save,
}


@pytest.mark.parametrize("call", CALLS)
def test_a_web_page_is_no_checkpoint(call: str, console: ScriptedServer) -> None:
    """Every way to ask names the endpoint, and advises neither to delete nor to recover anything.

    `dcp.save` has sent a probe, and nothing else.
    """
    with pytest.raises(StorageError, match="The endpoint answers with a web page") as caught:
        CALLS[call]({"endpoint_url": console.endpoint_url, **KEYS})
    text = str(caught.value)
    assert console.endpoint_url in text
    assert "MinIO's console has a port of its own" in text
    assert "delete" not in text
    assert "recover" not in text
    changes = [request for request in console.requests if request.method in ("PUT", "DELETE")]
    assert [request for request in changes if f"/{PROBES_PREFIX}" not in request.path] == []
    assert not changes or call == "dcp.save"


@pytest.mark.parametrize("command", ["ls", "recover"])
def test_commands(command: str, console: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and the exit code of a store that failed."""
    keys = [word for key, value in KEYS.items() for word in ("--option", f"{key}={value}")]
    assert main([command, URL, "--endpoint-url", console.endpoint_url, *keys]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dcp-remote: The endpoint answers with a web page")
    assert "recover" not in line


def test_what_begins_as_a_web_page() -> None:
    """In any case, after white space or a byte order mark; XML and JSON are none."""
    for page in (PAGE, b"<HTML>", b"\xef\xbb\xbf\r\n\t <!DOCTYPE HTML PUBLIC>"):
        assert is_web_page(page)
    for other in (b"", b"{}", b'<?xml version="1.0"?><Error/>', b"x<html>", b" " * 2_000 + b"<html>"):
        assert not is_web_page(other)


def test_damage_is_still_damage() -> None:
    """An object that is neither a document nor a page is reported as damaged, as before."""
    with scripted_server(lambda request: HttpAnswer(200, b"<p>no</p>", OBJECT_HEADERS)) as server:
        with pytest.raises(CorruptCheckpointError, match="recover"):
            latest(URL, storage_options={"endpoint_url": server.endpoint_url, **KEYS})
        with pytest.raises(Exception, match="damaged") as caught:
            load(URL, storage_options={"endpoint_url": server.endpoint_url, **KEYS})
        assert not isinstance(caught.value, StorageError)
