"""What obstore is told of a bucket: options, turned into its settings. No request is sent here.

What options leave open comes for S3 of botocore (`s3_place`), for the others from the environment, by obstore's rules.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dcp_remote.errors import InvalidArgumentError
from dcp_remote.storage.cloud_options import (
    GOOGLE_ANONYMOUS,
    GOOGLE_WORDS,
    AzureOptions,
    CloudOptions,
    GoogleOptions,
    S3Options,
    check_endpoint,
    connection_parts,
)
from dcp_remote.storage.s3_place import S3Place
from dcp_remote.storage.timeouts import Timeouts

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, S3Config


def client_config(
    options: CloudOptions,
    *,
    endpoint_url: str | None,
    verify: bool | str | None,
    timeouts: Timeouts,
    download: bool,
    request_seconds: float,
) -> ClientConfig:
    """The HTTP settings of one obstore client, for requests that may take `request_seconds` each.

    Raises:
        InvalidArgumentError: The file of certificates cannot be read.
    """
    config: ClientConfig = {
        "allow_http": endpoint_url is not None and urlsplit(endpoint_url).scheme == "http",
        "connect_timeout": timedelta(seconds=options.connect_timeout_seconds),
        "timeout": timedelta(seconds=request_seconds),
    }
    if download:
        # Never for uploads: the client counts the whole time of sending a body as silence.
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


def one_host(endpoint_url: str) -> ClientConfig:
    """Settings that keep an obstore client from following redirects to hosts other than that of a URL.

    obstore follows redirects of GET, HEAD, DELETE and 303, with the session token, and has no setting against it. So
    all other hosts get a proxy at which nobody can listen. Redirects to another port of the same host are followed.
    """
    host = urlsplit(endpoint_url).hostname or ""
    with suppress(OSError):  # a name, or IPv6
        host = socket.inet_ntoa(socket.inet_aton(host))  # obstore spells 127.1 so, too
    return {"proxy_url": "http://127.0.0.1:0", "proxy_excludes": host}


def s3_config(options: S3Options, place: S3Place, *, delete_singly: bool) -> S3Config:
    """What obstore is told of a bucket. Every setting that it would read from the environment itself is given."""
    config: S3Config = {
        "endpoint": place.endpoint_url,
        "aws_endpoint_url_s3": place.endpoint_url,
        "region": place.region_name,
        "virtual_hosted_style_request": place.virtual_hosted,
        "skip_signature": options.anon,
        "unsigned_payload": not options.sign_payload,
        "disable_bulk_delete": delete_singly,
    }
    if options.checksum_algorithm != "none":
        config["checksum_algorithm"] = options.checksum_algorithm or "CRC64NVME"
    return config


def google_config(options: GoogleOptions) -> GCSConfig:
    """What obstore is told of a Google Cloud bucket.

    Raises:
        InvalidArgumentError: `token` is nothing that can be understood; or the endpoint in the environment has a user,
            a password or a query in it.
    """
    if options.anon or options.token in GOOGLE_ANONYMOUS:
        # Reads go without any credentials. For a put or a delete obstore would ask the instance for some all the same.
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
    """The server that obstore would take from the environment by itself, unseen: whoever asks must know it."""
    found = next(((name, os.environ[name]) for name in names if os.environ.get(name)), None)
    if found is None:
        return None
    check_endpoint(found[1], named=found[0])
    return found[1]


def azure_config(options: AzureOptions) -> AzureConfig:
    """What obstore is told of an Azure container: a single setting wins over the connection string.

    Raises:
        InvalidArgumentError: The endpoint in the connection string or the environment has a user, a password or a
            query in it.
    """
    parts = connection_parts(options)
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
