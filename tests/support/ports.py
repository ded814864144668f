"""Ports of the loopback interface for servers that start later, in another process."""

from __future__ import annotations

import socket


def reserved_port() -> socket.socket:
    """Bind a port without listening: until this socket is closed, only a server that asks for this number gets it."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved
