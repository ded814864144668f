"""Time limits of requests, and the HTTP settings of obstore's clients. Sends nothing."""

from __future__ import annotations

import math
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dcp_remote.errors import InvalidArgumentError

if TYPE_CHECKING:
    from obstore.store import ClientConfig


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits after which a request counts as stalled; they grow with its size."""

    floor_seconds: float = 30.0  # of a request without a body
    slowest_bytes_per_second: int = 500_000  # half of 1 MB/s, which is slow
    # Longest pause of a download. Uploads have none: the client cannot tell a server that does not read from one that
    # does not answer yet.
    silence_seconds: float = 30.0

    def request_seconds(self, size_bytes: int) -> float:
        """Return the limit for a request: `floor_seconds` times a power of two, as obstore needs a client per limit."""
        needed = 1 + size_bytes / self.slowest_bytes_per_second / self.floor_seconds
        return float(self.floor_seconds * 2 ** math.ceil(math.log2(needed)))


def make_client_config(
    endpoint_url: str | None,
    *,
    verify: bool | str | None,
    connect_seconds: float,
    request_seconds: float,
    silence_seconds: float | None,
) -> ClientConfig:
    """Return the HTTP settings of one obstore client.

    Raises:
        InvalidArgumentError: The file of certificates cannot be read.
    """
    config: ClientConfig = {
        "allow_http": endpoint_url is not None and urlsplit(endpoint_url).scheme == "http",
        "connect_timeout": timedelta(seconds=connect_seconds),
        "timeout": timedelta(seconds=request_seconds),
    }
    if silence_seconds is not None:
        config["read_timeout"] = timedelta(seconds=silence_seconds)
    if verify is False:
        config["allow_invalid_certificates"] = True
    elif isinstance(verify, str):
        try:
            config["root_certificate"] = Path(verify).read_bytes()
        except OSError as error:
            raise InvalidArgumentError(
                "The file of certificates (storage_options['verify'], AWS_CA_BUNDLE or ca_bundle) cannot be read.",
                path=verify,
            ) from error
    return config


def forbid_other_hosts(endpoint_url: str) -> ClientConfig:
    """Return settings that keep an obstore client from following redirects to hosts other than that of a URL.

    obstore follows redirects of GET, HEAD, DELETE and 303, sends them the session token, and has no setting against it.
    These settings therefore send requests for all other hosts to a proxy on port 0, where nothing can listen. Redirects
    to another port of the same host are followed.
    """
    host = urlsplit(endpoint_url).hostname or ""
    with suppress(OSError):  # the host is a name, or an IPv6 address
        host = socket.inet_ntoa(socket.inet_aton(host))  # obstore also expands 127.1
    return {"proxy_url": "http://127.0.0.1:0", "proxy_excludes": host}
