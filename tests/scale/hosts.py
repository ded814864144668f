"""Modelled hosts: what makes the ranks of one machine look, to the package, like ranks of several hosts."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import wraps
from typing import Any

import dcp_remote.manager.rank_restore as restoring


def model_host(host: int) -> None:
    """Let this process be on a modelled host: its name, its address, and its Unix sockets without a file.

    All addresses of 127.0.0.0/8 are this machine's: ranks that listen at different ones are on different hosts for each
    other. Names of Unix sockets that begin with a null byte are those of a network namespace, and get the host's number
    here; in namespaces of their own, ranks could not reach one TCPStore over the loopback interface.
    """
    name, address = f"host-{host}", f"127.1.{host // 250}.{host % 250 + 1}"

    def scoped(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def use(own: socket.socket, place: Any) -> Any:
            is_abstract = own.family == socket.AF_UNIX and place[:1] in {"\0", b"\0"}
            suffix = f"@{host}" if isinstance(place, str) else b"@%d" % host
            return original(own, place + suffix if is_abstract else place)

        return use

    def named(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def tell(own: socket.socket) -> Any:
            place = original(own)
            return place.removesuffix(b"@%d" % host) if isinstance(place, bytes) else place

        return tell

    socket.socket.getsockname = named(socket.socket.getsockname)  # type: ignore[method-assign]
    for method in ("bind", "connect", "connect_ex"):
        setattr(socket.socket, method, scoped(getattr(socket.socket, method)))
    socket.gethostname = lambda: name
    setattr(restoring, "host_towards", lambda _host: address)  # noqa: B010  # imported there, not defined
