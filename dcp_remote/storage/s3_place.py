"""Where requests to an S3 bucket go, and as whom: by the rules of botocore itself.

What options leave open comes from the environment and then from the profile. Nothing here sends a request, but looking
for credentials may: botocore asks the instance when all else is empty.
"""

from __future__ import annotations

import functools
import gc
import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from botocore import UNSIGNED
from botocore.config import Config
from botocore.loaders import Loader
from botocore.session import Session

from dcp_remote.storage.cloud_options import S3Options, check_endpoint


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
        InvalidArgumentError: It has a user, a password or a query in it.
    """
    session = Session(profile=options.profile_name)
    session.register_component("data_loader", _models(session.get_config_variable("data_path")))
    if options.aws_access_key_id is not None and options.aws_secret_access_key is not None:
        session.set_credentials(options.aws_access_key_id, options.aws_secret_access_key, options.aws_session_token)
    # An unsigned client needs no credentials to tell where it would send a request.
    with _not_collecting():
        client = _s3_client(session, options, signature=UNSIGNED)
    check_endpoint(client.meta.endpoint_url, named="AWS_ENDPOINT_URL, or `endpoint_url` of the profile,")
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
