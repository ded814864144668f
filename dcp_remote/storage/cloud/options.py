"""Options of a cloud store (`storage_options`), checked and under one name each.

The names are those of boto3 and of fsspec's file systems. `endpoint` and `config` turn the options into settings of the
clients.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias
from urllib.parse import quote

from dcp_remote.errors import InvalidArgumentError
from dcp_remote.storage.limits import LIMIT_OPTIONS

# Words that gcsfs accepts as `token`, beside credentials.
GOOGLE_ANONYMOUS = ("anon",)
GOOGLE_WORDS = (*GOOGLE_ANONYMOUS, "google_default")

# User info, a query or a fragment, which may contain a secret.
_MAY_HOLD_SECRET = re.compile(r"[@?#]")

# A TCP connection takes a few round trips; within ten seconds a lost SYN is sent again three times.
_CONNECT_TIMEOUT_SECONDS = 10.0


def _text(*aliases: str, secret: bool = False, choices: tuple[str, ...] = ()) -> Any:
    metadata = {"aliases": aliases, "type": str, "secret": secret, "choices": choices}
    return field(default=None, repr=not secret, metadata=metadata)


def _flag(*, default: bool) -> Any:
    return field(default=default, metadata={"type": bool})


def _seconds(default: float) -> Any:
    return field(default=default, metadata={"type": float})


def _verify() -> Any:
    return field(default=None, metadata={"type": "flag or path"})


@dataclass(frozen=True, slots=True)
class S3Options:
    """Options of an S3 bucket, under boto3's names; s3fs's names are aliases.

    Attributes:
        endpoint_url: URL of the server, for stores other than Amazon's.
        region_name: Region of the bucket.
        profile_name: Section of `~/.aws/config` to use.
        aws_access_key_id: Access key; needs `aws_secret_access_key`.
        aws_secret_access_key: Secret of the access key.
        aws_session_token: Token that belongs to a temporary access key.
        anon: True sends no credentials at all.
        addressing_style: "path", "virtual" or "auto"; botocore chooses by default.
        verify: False accepts any certificate; a path names a file of certificates to trust.
        sign_payload: True signs the body as well (costs a SHA-256 over it, 0.5 CPU seconds per GiB). Servers that
            ignore the newer checksums, as Ceph 16 does, verify a body only by that.
        checksum_algorithm: Checksum by which the server verifies a body: "CRC64NVME" (default), "SHA256", or "none" for
            servers that refuse both.
        etag_quotes: False sends ETags in conditions without their quotes, as Ceph 16 demands.
        direct_reads: False reads all ranges by obstore: slower, over no connection of this package's own.
        connect_timeout_seconds: Time limit to open a connection, in seconds.
    """

    endpoint_url: str | None = _text()
    region_name: str | None = _text("region")
    profile_name: str | None = _text("profile")
    aws_access_key_id: str | None = _text("key", "access_key_id", secret=True)
    aws_secret_access_key: str | None = _text("secret", "secret_access_key", secret=True)
    aws_session_token: str | None = _text("token", "session_token", secret=True)
    anon: bool = _flag(default=False)
    addressing_style: str | None = _text(choices=("path", "virtual", "auto"))
    verify: bool | str | None = _verify()
    sign_payload: bool = _flag(default=False)
    checksum_algorithm: str | None = _text(choices=("CRC64NVME", "SHA256", "none"))
    etag_quotes: bool = _flag(default=True)
    direct_reads: bool = _flag(default=True)
    connect_timeout_seconds: float = _seconds(_CONNECT_TIMEOUT_SECONDS)

    def __post_init__(self) -> None:
        """Refuse half a pair of keys, which might be completed by another key of environment or profile."""
        if (self.aws_access_key_id is None) != (self.aws_secret_access_key is None):
            raise InvalidArgumentError(
                "storage_options must give aws_access_key_id and aws_secret_access_key together, or neither."
            )
        if self.aws_session_token is not None and self.aws_access_key_id is None:
            raise InvalidArgumentError(
                "storage_options give aws_session_token without the keys that it belongs to: give them as well."
            )


@dataclass(frozen=True, slots=True)
class GoogleOptions:
    """Options of a Google Cloud bucket; without credentials, obstore finds the application's default ones.

    Attributes:
        token: gcsfs's option: path of a credentials file, its JSON text, "anon" or "google_default".
        service_account: Path of a service account's key file.
        service_account_key: Content of a service account's key file.
        application_credentials: Path of an application default credentials file.
        bearer_token: OAuth token, which is never renewed.
        anon: True sends no credentials (reads of public buckets only).
        endpoint_url: URL of another server that speaks Google's XML API.
        verify: False accepts any certificate; a path names a file of certificates to trust.
        connect_timeout_seconds: Time limit to open a connection, in seconds.
    """

    token: str | None = _text(secret=True)
    service_account: str | None = _text("service_account_path", "service_account_file")
    service_account_key: str | None = _text(secret=True)
    application_credentials: str | None = _text("google_application_credentials")
    bearer_token: str | None = _text("access_token", secret=True)
    anon: bool = _flag(default=False)
    endpoint_url: str | None = _text()
    verify: bool | str | None = _verify()
    connect_timeout_seconds: float = _seconds(_CONNECT_TIMEOUT_SECONDS)


@dataclass(frozen=True, slots=True)
class AzureOptions:
    """Options of an Azure container, under adlfs's names; obstore takes the others from `AZURE_*`.

    Attributes:
        account_name: Name of the storage account.
        account_key: Key of the storage account.
        sas_token: Shared access signature, with or without the leading `?`.
        connection_string: Connection string as the portal shows it; `AZURE_STORAGE_CONNECTION_STRING` by default.
        tenant_id: Tenant of a service principal; needs `client_id` and `client_secret`.
        client_id: ID of the service principal.
        client_secret: Secret of the service principal.
        bearer_token: OAuth token, which is never renewed.
        anon: True sends no credentials (reads of public containers only).
        endpoint_url: URL of another server that speaks Azure's API.
        verify: False accepts any certificate; a path names a file of certificates to trust.
        connect_timeout_seconds: Time limit to open a connection, in seconds.
    """

    account_name: str | None = _text()
    account_key: str | None = _text(secret=True)
    sas_token: str | None = _text("sas_key", secret=True)
    connection_string: str | None = _text(secret=True)
    tenant_id: str | None = _text()
    client_id: str | None = _text()
    client_secret: str | None = _text(secret=True)
    bearer_token: str | None = _text(secret=True)
    anon: bool = _flag(default=False)
    endpoint_url: str | None = _text()
    verify: bool | str | None = _verify()
    connect_timeout_seconds: float = _seconds(_CONNECT_TIMEOUT_SECONDS)


CloudOptions: TypeAlias = S3Options | GoogleOptions | AzureOptions

_OPTIONS_CLASSES: dict[str, type[CloudOptions]] = {"s3": S3Options, "gs": GoogleOptions, "az": AzureOptions}


def parse_options(scheme: str, options: Mapping[str, object]) -> CloudOptions:
    """Check `storage_options` and return them under one name each. A value of None counts as not given.

    s3fs's nested `client_kwargs` are accepted for S3.

    Raises:
        InvalidArgumentError: A name is unknown (the message lists the known ones), a value has the wrong type, or two
            spellings of one option disagree. No message shows a value.
    """
    options_class = _OPTIONS_CLASSES[scheme]
    known = {field_.name: field_ for field_ in fields(options_class)}
    names = {alias: name for name, field_ in known.items() for alias in (name, *field_.metadata.get("aliases", ()))}
    values: dict[str, object] = {}
    for given, value in _flatten(scheme, options):
        if given not in names:
            close = difflib.get_close_matches(given, [*names, *LIMIT_OPTIONS], n=1)
            hint = f"; the closest is {close[0]!r}" if close else ""
            listed = ", ".join(sorted([*known, *LIMIT_OPTIONS]))
            raise InvalidArgumentError(
                f"Unknown name in storage_options for {scheme} URLs{hint}. Known: {listed}.", unknown=given
            )
        name = names[given]
        checked = _check(given, value, known[name].metadata)
        if checked is None:
            continue
        if values.setdefault(name, checked) != checked:
            raise InvalidArgumentError(
                "storage_options give one setting twice, with different values: remove one of them.",
                name=name,
                also=given,
            )
    return options_class(**values)  # type: ignore[arg-type]  # _check compared each value with its field's type


def _flatten(scheme: str, options: Mapping[str, object]) -> list[tuple[str, object]]:
    flat: list[tuple[str, object]] = []
    for name, value in options.items():
        if scheme == "s3" and name == "client_kwargs" and isinstance(value, Mapping):
            flat.extend((str(inner), inner_value) for inner, inner_value in value.items())
        else:
            flat.append((str(name), value))
    return flat


def _check(name: str, value: object, metadata: Mapping[str, Any]) -> str | bool | float | None:
    """Return the value if it has the type of the option; an error shows only its type, since it may be a secret."""
    wanted = metadata["type"]
    if value is None:
        return None
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, bool):
        if wanted in (bool, "flag or path"):
            return value
    elif isinstance(value, str):
        if metadata.get("choices") and value not in metadata["choices"]:
            raise InvalidArgumentError(f"storage_options[{name!r}] must be one of {', '.join(metadata['choices'])}.")
        if wanted in (str, "flag or path") and value:
            if name == "endpoint_url":
                check_endpoint(value, named="storage_options['endpoint_url']")
            return value
    elif isinstance(value, int | float) and wanted is float and 0 < value < math.inf:
        return float(value)
    expected = {str: "a string that is not empty", bool: "True or False", float: "a positive number"}.get(
        wanted, "True, False or the path of a file of certificates"
    )
    raise InvalidArgumentError(f"storage_options[{name!r}] must be {expected}.", type=type(value).__name__)


def check_endpoint(url: str, *, named: str) -> None:
    """Refuse an endpoint that may contain a secret, which errors, logs and reprs would show, or that is not http(s).

    Args:
        url: URL of the endpoint.
        named: Name of the option or variable that gave the URL, for the message.

    Raises:
        InvalidArgumentError: The URL has user info, a query or a fragment, and the message shows only its scheme; or
            the scheme is not http or https.
    """
    if _MAY_HOLD_SECRET.search(url):
        scheme, mark, _ = url.partition("://")
        raise InvalidArgumentError(
            f"{named} contains a user, a password, a query or a fragment; an endpoint has only scheme, host and port. "
            "Give credentials under their own names (aws_access_key_id and aws_secret_access_key, sas_token), "
            "in storage_options or the environment.",
            endpoint=f"{scheme}://…" if mark and scheme.isalpha() else "…",
        )
    if not url.lower().startswith(("http://", "https://")):
        hint = "" if "://" in url else f": write https://{url}, or http://{url} for a server without TLS"
        raise InvalidArgumentError(f"{named} must begin with http:// or https://{hint}.", endpoint=url)


def parse_connection_string(options: AzureOptions) -> dict[str, str]:
    """Return the settings of the connection string, or of the environment's if none is given, by their names there."""
    text = options.connection_string or os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    return {name: value for name, _, value in (part.partition("=") for part in text.split(";")) if value}


def collect_secrets(options: CloudOptions) -> list[str]:
    """Return all secrets of the options, each also as encoded in a URL."""
    given = [getattr(options, field_.name) for field_ in fields(options) if field_.metadata.get("secret")]
    if isinstance(options, AzureOptions):
        parts = parse_connection_string(options)
        given += [parts.get("AccountKey"), parts.get("SharedAccessSignature")]
    # `token` may also be a word, which is no secret.
    found = [secret for secret in given if secret and secret not in GOOGLE_WORDS]
    return [spelling for secret in found for spelling in {secret, quote(secret, safe="")}]
