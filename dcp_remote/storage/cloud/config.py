"""Settings of obstore, made from the options of a bucket; and the timeouts of its requests. Sends nothing."""

from __future__ import annotations

import math
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dcp_remote.errors import InvalidArgumentError
from dcp_remote.storage.cloud.endpoint import S3Endpoint
from dcp_remote.storage.cloud.options import (
    GOOGLE_ANONYMOUS,
    GOOGLE_WORDS,
    AzureOptions,
    CloudOptions,
    GoogleOptions,
    S3Options,
    check_endpoint,
    parse_connection_string,
)

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, S3Config


def make_client_config(
    options: CloudOptions,
    *,
    endpoint_url: str | None,
    verify: bool | str | None,
    timeouts: Timeouts,
    download: bool,
    request_seconds: float,
) -> ClientConfig:
    """Return the HTTP settings of one obstore client, for requests that may take `request_seconds` each.

    Raises:
        InvalidArgumentError: The file of certificates cannot be read.
    """
    config: ClientConfig = {
        "allow_http": endpoint_url is not None and urlsplit(endpoint_url).scheme == "http",
        "connect_timeout": timedelta(seconds=options.connect_timeout_seconds),
        "timeout": timedelta(seconds=request_seconds),
    }
    if download:
        # Not for uploads: the client counts the whole time of sending a body as silence.
        config["read_timeout"] = timedelta(seconds=timeouts.silence_seconds)
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


def make_s3_config(options: S3Options, endpoint: S3Endpoint, *, delete_singly: bool) -> S3Config:
    """Return obstore's settings of an S3 bucket, including every setting that it would read from the environment."""
    config: S3Config = {
        "endpoint": endpoint.endpoint_url,
        "aws_endpoint_url_s3": endpoint.endpoint_url,
        "region": endpoint.region_name,
        "virtual_hosted_style_request": endpoint.virtual_hosted,
        "skip_signature": options.anon,
        "unsigned_payload": not options.sign_payload,
        "disable_bulk_delete": delete_singly,
    }
    if options.checksum_algorithm != "none":
        config["checksum_algorithm"] = options.checksum_algorithm or "CRC64NVME"
    return config


def make_google_config(options: GoogleOptions) -> GCSConfig:
    """Return obstore's settings of a Google Cloud bucket.

    Raises:
        InvalidArgumentError: `token` is neither a file, JSON text nor a known word; or the endpoint in the environment
            contains a user, a password or a query.
    """
    if options.anon or options.token in GOOGLE_ANONYMOUS:
        # Without the empty token, obstore would ask the instance for credentials to send a PUT or DELETE.
        config: GCSConfig = {"skip_signature": True, "bearer_token": ""}
    else:
        config = {"skip_signature": False}
    if options.token is not None and options.token not in GOOGLE_WORDS:
        if options.token.lstrip().startswith("{"):
            config["service_account_key"] = options.token
        elif Path(options.token).is_file():
            config["application_credentials"] = options.token
        else:
            raise InvalidArgumentError(
                "storage_options['token'] must be the path of a credentials file that exists, its JSON text, 'anon' or "
                "'google_default'; an OAuth token goes into 'bearer_token'."
            )
    if options.service_account is not None:
        config["service_account"] = options.service_account
    if options.service_account_key is not None:
        config["service_account_key"] = options.service_account_key
    if options.application_credentials is not None:
        config["application_credentials"] = options.application_credentials
    if options.bearer_token is not None:
        config["bearer_token"] = options.bearer_token
    endpoint_url = options.endpoint_url or _endpoint_of_environment("GOOGLE_BASE_URL")
    if endpoint_url is not None:
        config["base_url"] = endpoint_url
    return config


def _endpoint_of_environment(*names: str) -> str | None:
    """Return the endpoint in the environment, which obstore would read by itself without a check; None if unset."""
    found = next(((name, os.environ[name]) for name in names if os.environ.get(name)), None)
    if found is None:
        return None
    check_endpoint(found[1], named=found[0])
    return found[1]


def make_azure_config(options: AzureOptions) -> AzureConfig:
    """Return obstore's settings of an Azure container; a single option overrides the connection string.

    Raises:
        InvalidArgumentError: The endpoint in the connection string or the environment contains a user, a password or a
            query.
    """
    parts = parse_connection_string(options)
    account_name = options.account_name or parts.get("AccountName")
    endpoint_url = options.endpoint_url or parts.get("BlobEndpoint")
    if endpoint_url is None and account_name is not None and "EndpointSuffix" in parts:
        protocol = parts.get("DefaultEndpointsProtocol", "https")
        endpoint_url = f"{protocol}://{account_name}.blob.{parts['EndpointSuffix']}"
    if endpoint_url is not None:
        check_endpoint(endpoint_url, named="The endpoint of the connection string")
    else:
        endpoint_url = _endpoint_of_environment("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    sas_token = options.sas_token or parts.get("SharedAccessSignature")
    given: dict[str, str | None] = {
        "account_name": account_name,
        "account_key": options.account_key or parts.get("AccountKey"),
        "sas_key": sas_token.removeprefix("?") if sas_token is not None else None,
        "tenant_id": options.tenant_id,
        "client_id": options.client_id,
        "client_secret": options.client_secret,
        "token": options.bearer_token,
        "endpoint": endpoint_url,
    }
    config: AzureConfig = {"skip_signature": options.anon}
    config.update({name: value for name, value in given.items() if value is not None})  # type: ignore[typeddict-item]  # the names above are AzureConfig's
    return config


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits after which a request counts as stalled; they grow with its size.

    Attributes:
        floor_seconds: Time limit of a request without a body, in seconds.
        slowest_bytes_per_second: Rate below which a request counts as stalled, in bytes per second; half of 1 MB/s is
            slow.
        silence_seconds: Longest pause of a download, in seconds. Uploads have no such limit, because the client cannot
            tell a server that does not read from a server that does not answer yet.
    """

    floor_seconds: float = 30.0
    slowest_bytes_per_second: int = 500_000
    silence_seconds: float = 30.0

    def request_seconds(self, size_bytes: int) -> float:
        """Return the limit for a request of a size.

        A power of two times `floor_seconds`, because obstore needs a client per limit.
        """
        needed = 1 + size_bytes / self.slowest_bytes_per_second / self.floor_seconds
        return float(self.floor_seconds * 2 ** math.ceil(math.log2(needed)))
