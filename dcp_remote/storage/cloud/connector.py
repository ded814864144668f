"""TCP connections to hosts with several addresses, some of which may not answer (RFC 8305, "Happy Eyeballs")."""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

# One result of `socket.getaddrinfo`: family, type, protocol, canonical name, address.
AddressInfo: TypeAlias = tuple[Any, Any, int, str, Any]

# RFC 8305, section 5, recommends this delay between two attempts.
_NEXT_ADDRESS_SECONDS = 0.25


def _begin(info: AddressInfo) -> socket.socket:
    """Begin to connect to an address, without waiting; return the socket."""
    family, kind, protocol, _, address = info
    sock = socket.socket(family, kind, protocol)
    sock.settimeout(0)
    code = sock.connect_ex(address)
    if code not in (0, errno.EINPROGRESS):
        sock.close()
        raise OSError(code, os.strerror(code))
    return sock


class Connector:
    """Connects to hosts, and remembers per host which address family answered last. Safe to use from many threads.

    Args:
        resolve: Function with the signature of `socket.getaddrinfo`.
        begin: Function that begins to connect to one address and returns the socket, which is writable once connected.
        next_address_seconds: Time to wait for an address before the next one is tried in parallel.
    """

    def __init__(
        self,
        *,
        resolve: Callable[..., Sequence[AddressInfo]] = socket.getaddrinfo,
        begin: Callable[[AddressInfo], socket.socket] = _begin,
        next_address_seconds: float = _NEXT_ADDRESS_SECONDS,
    ) -> None:
        """Store the arguments; no connection is opened."""
        self._resolve = resolve
        self._begin = begin
        self._next_address_seconds = next_address_seconds
        self._families: dict[str, int] = {}

    def connect(self, host: str, port: int, *, seconds: float) -> socket.socket:
        """Connect to the address that answers first; after a refusal the next address is tried at once.

        Args:
            host: Host name or address.
            port: Port number.
            seconds: Time limit for all addresses together, without resolving the name.

        Returns:
            A connected socket that does not block.

        Raises:
            TimeoutError: No address answered in time.
            OSError: The name is unknown, or no address can be reached; then the error of the last address.
        """
        found = self._resolve(host, port, type=socket.SOCK_STREAM)
        waiting = deque(_interleave_families(found, first=self._families.get(host)))
        deadline = time.monotonic() + seconds
        poll = select.poll()
        under_way: dict[int, socket.socket] = {}
        error = OSError("The host has no address.")
        try:
            while waiting or under_way:
                if waiting:
                    try:
                        sock = self._begin(waiting.popleft())
                    except OSError as failure:
                        error = failure
                        continue
                    under_way[sock.fileno()] = sock
                    poll.register(sock, select.POLLOUT)
                left_seconds = deadline - time.monotonic()
                if left_seconds <= 0:
                    raise TimeoutError("The connection took too long to open.")
                wait_seconds = min(left_seconds, self._next_address_seconds) if waiting else left_seconds
                for descriptor, _ in poll.poll(math.ceil(wait_seconds * 1000)):
                    poll.unregister(descriptor)
                    sock = under_way.pop(descriptor)
                    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if not code:
                        self._families[host] = sock.family
                        return sock
                    sock.close()
                    error = OSError(code, os.strerror(code))
            raise error
        finally:
            for sock in under_way.values():
                sock.close()


def _interleave_families(found: Sequence[AddressInfo], *, first: int | None) -> list[AddressInfo]:
    """Order addresses with their families in turn (RFC 8305, section 4), beginning with family `first` if it occurs."""
    families: dict[int, list[AddressInfo]] = {}
    for info in found:
        families.setdefault(info[0], []).append(info)
    columns = [families[family] for family in sorted(families, key=lambda family: family != first)]
    return [info for row in zip_longest(*columns) for info in row if info is not None]
