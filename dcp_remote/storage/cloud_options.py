"""What users say about a cloud store, checked and under one name each.

One mapping per store, with the names that boto3 and fsspec's file systems use. What its clients are told is made of it
in `s3_place` and `cloud_configs`.
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

# What gcsfs understands beside credentials.
GOOGLE_ANONYMOUS = ("anon",)
GOOGLE_WORDS = (*GOOGLE_ANONYMOUS, "google_default")

# User info, a query or a fragment: all of them may be or hold a secret.
_NOT_OF_AN_ENDPOINT = re.compile(r"[@?#]")

# A TCP connection takes a few round trips; ten seconds are a lost SYN sent again three times.
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
    """Settings of an S3 bucket, under boto3's names; s3fs's are aliases.

    Attributes:
        endpoint_url: The server, for stores other than Amazon's.
        region_name: The bucket's region.
        profile_name: The section of `~/.aws/config` to use.
        aws_access_key_id: With `aws_secret_access_key`, and `aws_session_token` if temporary.
        aws_secret_access_key: See there.
        aws_session_token: See there.
        anon: Send no credentials at all.
        addressing_style: "path" or "virtual"; botocore chooses by default.
        verify: False accepts any certificate; a path names a file of certificates to trust.
        sign_payload: Sign the body as well (costs a SHA-256 over it, 0.5 CPU seconds per GiB). By it alone servers
            verify a body that ignore the newer checksums, as Ceph 16 does.
        checksum_algorithm: What the server verifies a body by: "CRC64NVME" (default), "SHA256", or "none" for servers
            that refuse both.
        etag_quotes: False sends ETags in conditions without their quotes, as Ceph 16 demands.
        connect_timeout_seconds: How long a connection may take to open.
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
    connect_timeout_seconds: float = _seconds(_CONNECT_TIMEOUT_SECONDS)

    def __post_init__(self) -> None:
        """Refuse half a pair of keys: which other half would be found is anybody's guess."""
        if (self.aws_access_key_id is None) != (self.aws_secret_access_key is None):
            raise InvalidArgumentError(
                "storage_options must give aws_access_key_id and aws_secret_access_key together, or neither."
            )
        if self.aws_session_token is not None and self.aws_access_key_id is None:
            raise InvalidArgumentError("storage_options give aws_session_token without the keys that it belongs to.")


@dataclass(frozen=True, slots=True)
class GoogleOptions:
    """Settings of a Google Cloud bucket; without credentials, obstore finds the application's default ones.

    Attributes:
        token: As gcsfs has it: the path of a credentials file, its JSON text, "anon" or "google_default".
        service_account: Path of a service account's key file.
        service_account_key: The content of such a file.
        application_credentials: Path of an application default credentials file.
        bearer_token: An OAuth token, which nobody renews.
        anon: Send no credentials (reads of public buckets only).
        endpoint_url: Another server that speaks Google's XML API.
        verify: See `S3Options`.
        connect_timeout_seconds: See `S3Options`.
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
    """Settings of an Azure container, under adlfs's names; what is not given obstore takes from `AZURE_*`.

    Attributes:
        account_name: The storage account.
        account_key: Its key.
        sas_token: A shared access signature, with or without the leading `?`.
        connection_string: What the portal shows; `AZURE_STORAGE_CONNECTION_STRING` otherwise.
        tenant_id: With `client_id` and `client_secret`: a service principal.
        client_id: See there.
        client_secret: See there.
        bearer_token: An OAuth token, which nobody renews.
        anon: Send no credentials (reads of public containers only).
        endpoint_url: Another server that speaks Azure's API.
        verify: See `S3Options`.
        connect_timeout_seconds: See `S3Options`.
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

_KINDS: dict[str, type[CloudOptions]] = {"s3": S3Options, "gs": GoogleOptions, "az": AzureOptions}


def parse_options(scheme: str, options: Mapping[str, object]) -> CloudOptions:
    """Check `storage_options` and give them their one name each. A value of None counts as not given.

    s3fs's nested `client_kwargs` are accepted for S3.

    Raises:
        InvalidArgumentError: A name is unknown (the message lists the known ones), a value has the wrong type, or two
            spellings of one option disagree. No message shows a value.
    """
    kind = _KINDS[scheme]
    known = {field_.name: field_ for field_ in fields(kind)}
    names = {alias: name for name, field_ in known.items() for alias in (name, *field_.metadata.get("aliases", ()))}
    values: dict[str, object] = {}
    for given, value in _flattened(scheme, options):
        if given not in names:
            close = difflib.get_close_matches(given, names, n=1)
            raise InvalidArgumentError(
                f"Unknown name in storage_options for {scheme} URLs{f'; did you mean {close[0]!r}?' if close else '.'} "
                f"Known: {', '.join(sorted(known))}.",
                unknown=given,
            )
        name = names[given]
        checked = _checked(given, value, known[name].metadata)
        if checked is None:
            continue
        if values.setdefault(name, checked) != checked:
            raise InvalidArgumentError("storage_options give one setting twice, differently.", name=name, also=given)
    return kind(**values)  # type: ignore[arg-type]  # _checked compared each value with its field's type


def _flattened(scheme: str, options: Mapping[str, object]) -> list[tuple[str, object]]:
    flat: list[tuple[str, object]] = []
    for name, value in options.items():
        if scheme == "s3" and name == "client_kwargs" and isinstance(value, Mapping):
            flat.extend((str(inner), inner_value) for inner, inner_value in value.items())
        else:
            flat.append((str(name), value))
    return flat


def _checked(name: str, value: object, metadata: Mapping[str, Any]) -> str | bool | float | None:
    """The value, if it is of the kind that the option wants. Errors tell its type alone: it may be a secret."""
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
    """Refuse the URL of a server that holds what may be a secret: it would stand in errors, in logs and in reprs.

    Args:
        url: As it was given.
        named: Where it was given.

    Raises:
        InvalidArgumentError: It has user info, a query or a fragment. The message shows its scheme alone.
    """
    if _NOT_OF_AN_ENDPOINT.search(url):
        scheme, mark, _ = url.partition("://")
        raise InvalidArgumentError(
            f"{named} has a user, a password, a query or a fragment in it, and an endpoint is scheme, host and port "
            "alone. Give credentials under their own names (aws_access_key_id and aws_secret_access_key, sas_token), "
            "in storage_options or the environment.",
            endpoint=f"{scheme}://…" if mark and scheme.isalpha() else "…",
        )
    if not url.lower().startswith(("http://", "https://")):
        raise InvalidArgumentError(f"{named} must begin with http:// or https://.", endpoint=url)


def connection_parts(options: AzureOptions) -> dict[str, str]:
    """Of the connection string, by their names there; the environment's if none is given."""
    text = options.connection_string or os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    return {name: value for name, _, value in (part.partition("=") for part in text.split(";")) if value}


def secrets_of(options: CloudOptions) -> list[str]:
    """What must never be shown, also as it would stand in a URL."""
    given = [getattr(options, field_.name) for field_ in fields(options) if field_.metadata.get("secret")]
    if isinstance(options, AzureOptions):
        parts = connection_parts(options)
        given += [parts.get("AccountKey"), parts.get("SharedAccessSignature")]
    # A word or a path where a token may stand is none.
    found = [secret for secret in given if secret and secret not in GOOGLE_WORDS]
    return [spelling for secret in found for spelling in {secret, quote(secret, safe="")}]
