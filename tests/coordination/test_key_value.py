"""Clients of the key-value store: values of any size, on each of torch's stores."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from dcp_remote.coordination import key_value
from dcp_remote.coordination.key_value import Client, HelperClient, address_of
from tests.support.rank_threads import wait_until

MiB = 2**20


def tcp(folder: Path) -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def file(folder: Path) -> dist.Store:
    return dist.FileStore(str(folder / "store"), 1)


def hash_(folder: Path) -> dist.Store:
    return dist.HashStore()


STORES: dict[str, Callable[[Path], dist.Store]] = {"tcp": tcp, "file": file, "hash": hash_}


def test_the_store_answers_between_the_parts_of_a_large_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a value of three parts: without an answer for long, a connection counts as silent, and is replaced."""
    monkeypatch.setattr(key_value, "_PART_BYTES_MAX", 8)
    answered: list[None] = []
    client = Client(dist.HashStore(), lambda: answered.append(None))
    client.put("key", bytes(24))
    assert len(answered) == 2
    assert client.get("key") == bytes(24)


@pytest.mark.parametrize(
    ("kind", "size_bytes"),
    [
        *((kind, size_bytes) for kind in STORES for size_bytes in (0, 1, 4 * MiB, 4 * MiB + 1)),
        ("tcp", 21 * MiB),
    ],
)
def test_values_of_any_size(kind: str, size_bytes: int, tmp_path: Path) -> None:
    """Put a value, read it by another client, delete it by a third; some are more than a TCPStore takes at once."""
    store = dist.PrefixStore("a", STORES[kind](tmp_path))
    clients = [Client(store) for _ in range(3)]
    value = os.urandom(size_bytes)
    clients[0].put("k/1", value)
    clients[0].put("k/2", b"other")
    both = {"k/1": value, "k/2": b"other"}
    assert clients[1].get_many(["k/2", "k/1"]) == [b"other", value]
    assert clients[2].get_present(["k/1", "k/2", "k/3"]) == {key: one for key, one in both.items() if one}
    clients[2].delete(both, {"k/1": len(value)})
    assert not clients[0].present(["k/1", "k/1+1", "k/1+2", "k/2"])
    clients[0].put("k/1", value)
    assert clients[0].has(["k/1"])  # only this answer says that the value has arrived
    clients[2].delete(["k/1", "k/3"])
    assert not clients[0].present(["k/1", "k/1+1", "k/1+2"])


def test_keys_deleted_before_they_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A TCPStore waits for one of several keys; its value is empty, and no error. A slow store is asked again.

    A single key is not waited for: the heartbeat of a rank would stand still meanwhile.
    """
    monkeypatch.setattr(key_value, "_GET_TIMEOUT", timedelta(seconds=0.2))
    store = tcp(tmp_path)
    client, other = Client(store), Client(store)
    other.put("there", b"value")
    multi_get = client._store.multi_get
    with monkeypatch.context() as patched:
        patched.setattr(client, "_store", SimpleNamespace(compare_set=client._store.compare_set))
        assert client.get("gone") == b""
        assert client.get_present(["gone"]) == {}
    assert client.get_many(["there", "gone"]) == [b"", b""]
    assert client.get("there") == b"value"
    waits = []

    def slow_once(keys: list[str]) -> list[bytes]:
        waits.append(keys)
        if len(waits) == 1:
            raise dist.DistStoreError("wait timeout")
        return multi_get(keys)

    monkeypatch.setattr(client, "_store", SimpleNamespace(multi_get=slow_once, check=client._store.check))
    assert client.get_many(["there", "there"]) == [b"value"] * 2
    assert len(waits) == 2


@pytest.mark.parametrize("kind", STORES)
def test_the_first_to_put_wins(kind: str, tmp_path: Path) -> None:
    """Two clients put one key; the first value stays, and is read as any other."""
    store = STORES[kind](tmp_path)
    clients = [Client(store) for _ in range(2)]
    clients[1].put_first("k", b"\x00first")
    clients[0].put_first("k", b"second")
    assert clients[0].get("k") == b"\x00first"


@pytest.mark.parametrize("kind", STORES)
def test_a_series(kind: str, tmp_path: Path) -> None:
    """Two clients append values, one of them of several parts; a third was about to, and has died. All is deleted."""
    store = STORES[kind](tmp_path)
    clients = [Client(store) for _ in range(2)]
    clients[0].append("s", b"first")
    assert clients[0].add("s", 1) == 2
    clients[1].append("s", bytes(4 * MiB + 1))
    assert clients[1].add("s", 0) == 3
    assert clients[1].get_present(["s/1", "s/2", "s/3"]) == {"s/1": b"first", "s/3": bytes(4 * MiB + 1)}
    clients[0].delete_series("s")
    assert not clients[1].present(["s", "s/1", "s/2", "s/3", "s/3+1"])
    assert clients[1].add("s", 0) == 0


@pytest.mark.parametrize("there", [[], [0], [39], list(range(40)), [3, 4, 17, 33]])
def test_which_keys_are_there(there: list[int]) -> None:
    """Ask for forty keys, of which these exist."""
    client = Client(dist.HashStore())
    for number in there:
        client.put(str(number), b"")
    assert client.present([str(number) for number in range(40)]) == {str(number) for number in there}


def test_a_file_store_outlives_the_connections_to_it(tmp_path: Path) -> None:
    """A clone of a FileStore is a store of its own, whose end might delete the file."""
    store = file(tmp_path)
    Client(store).put("k", b"v")
    assert Client(store).get("k") == b"v"
    assert (tmp_path / "store").exists()


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="the sockets of a process cannot be listed")
def test_a_closed_helper_ends_its_connection(tmp_path: Path) -> None:
    """The server has one connection less, though the helper's object lives on."""
    store = tcp(tmp_path)
    address = address_of(store)
    assert address is not None
    before = len(key_value._sockets_to(address))
    helper = HelperClient(lambda: Client(store))
    helper.ask(lambda client: client.put("k", b"v"), lambda: None)
    assert len(key_value._sockets_to(address)) == before + 1
    helper.close()
    wait_until(lambda: len(key_value._sockets_to(address)) == before)


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="the sockets of a process cannot be listed")
def test_a_default_timeout_of_the_program_leaves_connections_alone(tmp_path: Path) -> None:
    """Python makes a socket that it opens non-blocking then, and torch's end of it as well, which is the same."""
    store = tcp(tmp_path)
    address = address_of(store)
    assert address is not None
    before = key_value._sockets_to(address)
    socket.setdefaulttimeout(10)
    try:
        client = Client(store)
    finally:
        socket.setdefaulttimeout(None)
    assert before
    assert len(key_value._sockets_to(address)) == len(before) + 1
    assert all(os.get_blocking(descriptor) for descriptor in key_value._sockets_to(address).values())
    client.put("k", b"v")


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO")
def test_an_idle_connection_is_not_silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel sends packets over it, as it counts them, and no unanswered ten of them end it."""
    monkeypatch.setattr(key_value, "_KEEP_ALIVE_SECONDS", 1)
    store = tcp(tmp_path)
    address = address_of(store)
    assert address is not None
    client = Client(store)
    descriptor = key_value._sockets_to(address)[client._socket_inode or 0]
    with socket.socket(fileno=os.dup(descriptor)) as own:

        def sent() -> int:
            # `tcpi_segs_out` of tcp(7)'s `struct tcp_info`.
            return int(struct.unpack_from("I", own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 140), 136)[0])

        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)  # Linux waits so long after each, if not longer
        before = sent()
        wait_until(lambda: sent() >= before + 3)
        assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) > 10
    assert not client.has(["k"])
