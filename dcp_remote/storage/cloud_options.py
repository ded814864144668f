"""What users say about a cloud store, turned into what its clients want to hear.

One mapping per store, with the names that boto3 and fsspec's file systems use. What it leaves open comes from the
environment and then from the profile, by the rules of botocore itself for S3 and of obstore for the others. Nothing
here sends a request, but looking for credentials may: botocore asks the instance when all else is empty.
"""

from __future__ import annotations

import difflib
import functools
import gc
import gzip
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote, urlsplit

import msgspec
from botocore import UNSIGNED
from botocore.config import Config
from botocore.loaders import Loader
from botocore.session import Session

from dcp_remote.errors import InvalidArgumentError

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, S3Config

# A TCP connection takes a few round trips; ten seconds are a lost SYN sent again three times.
_CONNECT_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """When a request counts as stalled: the more it carries, the later.

    Attributes:
        floor_seconds: What a request may take that carries nothing.
        slowest_bytes_per_second: A link at half of 1 MB/s is slow, one below it is taken for stalled.
        silence_seconds: How long a download may pause. Uploads have no such limit: the client cannot tell a server
            that does not read from one that does not answer yet.
    """

    floor_seconds: float = 30.0
    slowest_bytes_per_second: int = 500_000
    silence_seconds: float = 30.0

    def request_seconds(self, size_bytes: int) -> float:
        """The limit for a request of this size: `floor_seconds` times a power of two, so that few clients serve all."""
        needed = 1 + size_bytes / self.slowest_bytes_per_second / self.floor_seconds
        return float(self.floor_seconds * 2 ** math.ceil(math.log2(needed)))


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
            return value
    elif isinstance(value, int | float) and wanted is float and 0 < value < math.inf:
        return float(value)
    expected = {str: "a string that is not empty", bool: "True or False", float: "a positive number"}.get(
        wanted, "True, False or the path of a file of certificates"
    )
    raise InvalidArgumentError(f"storage_options[{name!r}] must be {expected}.", type=type(value).__name__)


def secrets_of(options: CloudOptions) -> list[str]:
    """What must never be shown, also as it would stand in a URL."""
    given = [getattr(options, field_.name) for field_ in fields(options) if field_.metadata.get("secret")]
    if isinstance(options, AzureOptions):
        parts = _connection_string(options)
        given += [parts.get("AccountKey"), parts.get("SharedAccessSignature")]
    # A word or a path where a token may stand is none.
    found = [secret for secret in given if secret and secret not in _GOOGLE_WORDS]
    return [spelling for secret in found for spelling in {secret, quote(secret, safe="")}]


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


@dataclass(frozen=True, slots=True)
class S3Place:
    """Where requests to a bucket are sent, and as whom: what botocore makes of options, environment and profile.

    Attributes:
        session: Finds credentials, and renews them.
        endpoint_url: The server; with the bucket in its host name if `virtual_hosted`.
        region_name: What requests are signed for.
        virtual_hosted: Whether the bucket is part of the host name.
        verify: Of certificates; `AWS_CA_BUNDLE` and the profile's `ca_bundle` count, too.
    """

    session: Session
    endpoint_url: str
    region_name: str
    virtual_hosted: bool
    verify: bool | str | None


def resolve_s3(bucket: str, options: S3Options) -> S3Place:
    """Let botocore find endpoint, region and style of address. Sends nothing; takes 0.03 s, and a third of that again.

    Raises:
        botocore.exceptions.BotoCoreError: The profile is unknown, a file cannot be parsed, a region is none.
        ValueError: The endpoint is no URL.
    """
    session = Session(profile=options.profile_name)
    session.register_component("data_loader", _models(session.get_config_variable("data_path")))
    if options.aws_access_key_id is not None and options.aws_secret_access_key is not None:
        session.set_credentials(options.aws_access_key_id, options.aws_secret_access_key, options.aws_session_token)
    # An unsigned client needs no credentials to tell where it would send a request.
    with _not_collecting():
        client = _s3_client(session, options, signature=UNSIGNED)
    url = urlsplit(client.generate_presigned_url("head_bucket", Params={"Bucket": bucket}))
    path = url.path.rstrip("/")
    in_path = path.endswith(f"/{bucket}")
    return S3Place(
        session=session,
        endpoint_url=f"{url.scheme}://{url.netloc}{path.removesuffix(f'/{bucket}') if in_path else path}",
        region_name=client.meta.region_name,
        virtual_hosted=not in_path,
        verify=options.verify if options.verify is not None else session.get_config_variable("ca_bundle"),
    )


@contextmanager
def _not_collecting() -> Iterator[None]:
    """Keep Python from looking for garbage: botocore's models are so many objects that it would look at all of torch.

    That takes 0.14 s, twice what the models do.
    """
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()


class _Json:
    """Reads botocore's files into plain dicts, which are ordered, too: its own way takes three times as long."""

    def exists(self, file_path: str) -> bool:
        """Whether there is one, packed or not."""
        return self._path(file_path) is not None

    def load_file(self, file_path: str) -> Any:
        """What it holds; None if there is none."""
        path = self._path(file_path)
        if path is None:
            return None
        data = path.read_bytes()
        return msgspec.json.decode(gzip.decompress(data) if path.suffix == ".gz" else data)

    def _path(self, file_path: str) -> Path | None:
        return next((path for end in (".json", ".json.gz") if (path := Path(file_path + end)).is_file()), None)


class _Models(Loader):
    """botocore's models, without a look into each of its 400 folders to see whether it knows S3."""

    def list_available_services(self, type_name: str) -> list[str]:  # the type is looked for when it is loaded
        """All that have a folder."""
        folders = [folder for path in self.search_paths if (folder := Path(path)).is_dir()]
        return sorted({service.name for folder in folders for service in folder.iterdir()})


@functools.cache
def _models(data_path: str | None) -> _Models:
    """One for all sessions of a process: what was read is kept."""
    given = [path for path in (data_path or "").split(os.pathsep) if path]
    paths = [str(Path(os.path.expandvars(path)).expanduser()) for path in given]
    return _Models(extra_search_paths=paths, file_loader=_Json())  # type: ignore[arg-type]  # any that has these methods


def presign_s3(place: S3Place, options: S3Options, operation: str, **parameters: str | int) -> str:
    """A URL that carries out an operation, for the one request that explains a failure. A secret for a minute.

    Args:
        place: Where requests go.
        options: For signing.
        operation: As a method of boto3's client is called.
        parameters: As that method takes them.

    Raises:
        botocore.exceptions.BotoCoreError: There are no credentials any more.
    """
    client = _s3_client(place.session, options, signature=UNSIGNED if options.anon else "s3v4")
    url: str = client.generate_presigned_url(operation, Params=parameters, ExpiresIn=60)
    return url


def _s3_client(session: Session, options: S3Options, *, signature: Any) -> Any:
    # `Any`: botocore makes its clients' classes while it runs.
    style: Any = {"addressing_style": options.addressing_style} if options.addressing_style is not None else None
    return session.create_client(
        "s3",
        region_name=options.region_name,
        endpoint_url=options.endpoint_url,
        config=Config(signature_version=signature, s3=style),
    )


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


# What gcsfs understands beside credentials.
_GOOGLE_ANONYMOUS = ("anon",)
_GOOGLE_WORDS = (*_GOOGLE_ANONYMOUS, "google_default")


def google_config(options: GoogleOptions) -> GCSConfig:
    """What obstore is told of a Google Cloud bucket.

    Raises:
        InvalidArgumentError: `token` is nothing that can be understood.
    """
    config: GCSConfig = {"skip_signature": options.anon or options.token in _GOOGLE_ANONYMOUS}
    if options.token is not None and options.token not in _GOOGLE_WORDS:
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
    if options.endpoint_url is not None:
        config["base_url"] = options.endpoint_url
    return config


def _connection_string(options: AzureOptions) -> dict[str, str]:
    text = options.connection_string or os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    return {name: value for name, _, value in (part.partition("=") for part in text.split(";")) if value}


def azure_config(options: AzureOptions) -> AzureConfig:
    """What obstore is told of an Azure container: a single setting wins over the connection string."""
    parts = _connection_string(options)
    account_name = options.account_name or parts.get("AccountName")
    endpoint_url = options.endpoint_url or parts.get("BlobEndpoint")
    if endpoint_url is None and account_name is not None and "EndpointSuffix" in parts:
        protocol = parts.get("DefaultEndpointsProtocol", "https")
        endpoint_url = f"{protocol}://{account_name}.blob.{parts['EndpointSuffix']}"
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
