"""Options and endpoint of an S3 bucket: server, region, addressing style and session, by the rules of botocore itself.

What the options leave open comes from the environment and then from the profile. Nothing here sends a request, except
that looking for credentials may: botocore asks the instance when all else is empty.
"""

from __future__ import annotations

import functools
import gc
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ProfileNotFound
from botocore.loaders import create_loader
from botocore.session import Session

from dcp_remote.errors import InvalidArgumentError
from dcp_remote.storage.options import CloudOptions, check_endpoint, find_environment_endpoint, option

# Shared by all sessions of the process, since a loader keeps the models that it has read.
_get_models = functools.cache(create_loader)


# Validity of a signed URL, which is used at once. S3 takes requests of a clock that is 15 minutes slow, and counts from
# the time of that clock.
SIGNED_FOR = timedelta(minutes=20)


@dataclass(frozen=True, slots=True)
class S3Options(CloudOptions):
    """Options of an S3 bucket, under boto3's names; s3fs's names are aliases."""

    region_name: str | None = option(None, "region")
    profile_name: str | None = option(None, "profile")  # section of `~/.aws/config`
    aws_access_key_id: str | None = option(None, "key", "access_key_id", secret=True)
    aws_secret_access_key: str | None = option(None, "secret", "secret_access_key", secret=True)
    aws_session_token: str | None = option(None, "token", "session_token", secret=True)  # of a temporary access key
    addressing_style: str | None = option(choices=("path", "virtual", "auto"))  # botocore chooses by default
    # True signs the body as well: a SHA-256 over it, 0.5 CPU seconds per GiB. Servers that ignore the newer checksums,
    # as Ceph 16 does, verify a body only by that.
    sign_payload: bool = option(default=False)
    # By which the server verifies a body, CRC64NVME by default; "none" for servers that refuse both.
    checksum_algorithm: str | None = option(choices=("CRC64NVME", "SHA256", "none"))
    etag_quotes: bool = option(default=True)  # False sends ETags in conditions without their quotes, for Ceph 16
    direct_reads: bool = option(default=True)  # False reads all ranges by obstore, which costs more CPU

    def __post_init__(self) -> None:
        """Refuse a part of the keys, which another key of environment or profile might complete."""
        if (self.aws_access_key_id is None) != (self.aws_secret_access_key is None) or (
            self.aws_session_token is not None and self.aws_access_key_id is None
        ):
            raise InvalidArgumentError(
                "storage_options must give aws_access_key_id and aws_secret_access_key together, or neither; and no "
                "aws_session_token without them."
            )


@dataclass(frozen=True, slots=True)
class S3Endpoint:
    """Endpoint of a bucket, as botocore resolves options, environment and profile."""

    session: Session  # finds and renews credentials
    endpoint_url: str  # with the bucket in its host name if `virtual_hosted`
    region_name: str  # that requests are signed for
    virtual_hosted: bool
    verify: bool | str | None  # with `AWS_CA_BUNDLE` and the profile's `ca_bundle`; None means the system's
    has_proxy: bool  # named by the environment for this URL


def resolve_s3(bucket: str, options: S3Options) -> S3Endpoint:
    """Let botocore resolve endpoint, region and addressing style. Sends nothing.

    Takes 0.1 s of CPU the first time, and 0.02 s from then on.

    Raises:
        botocore.exceptions.BotoCoreError: A file cannot be parsed, or a region is invalid.
        ValueError: The endpoint of a profile is not a URL.
        InvalidArgumentError: The profile is unknown, or the endpoint is no URL or contains a user, a password or a
            query; the message names the option or the environment variable.
    """
    session = Session(profile=options.profile_name)
    try:
        session.register_component("data_loader", _get_models(session.get_config_variable("data_path")))
    except ProfileNotFound as error:
        raise _make_profile_error(session, options) from error
    if options.endpoint_url is None and not session.get_config_variable("ignore_configured_endpoint_urls"):
        find_environment_endpoint("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")  # in botocore's order
    if options.aws_access_key_id is not None and options.aws_secret_access_key is not None:
        session.set_credentials(options.aws_access_key_id, options.aws_secret_access_key, options.aws_session_token)
    # An unsigned client needs no credentials to build the URL of a request.
    was_enabled = gc.isenabled()
    gc.disable()  # botocore's models are so many objects that the collector would visit torch's, for 0.2 s
    try:
        client = create_client(session, options, is_signed=False)
    finally:
        if was_enabled:
            gc.enable()
    check_endpoint(client.meta.endpoint_url, named="AWS_ENDPOINT_URL, or `endpoint_url` of the profile,")
    url = urlsplit(client.generate_presigned_url("head_bucket", Params={"Bucket": bucket}))
    path = url.path.rstrip("/")
    in_path = path.endswith(f"/{bucket}")
    proxies = getproxies()
    return S3Endpoint(
        session=session,
        endpoint_url=f"{url.scheme}://{url.netloc}{path.removesuffix(f'/{bucket}') if in_path else path}",
        region_name=client.meta.region_name,
        virtual_hosted=not in_path,
        verify=options.verify if options.verify is not None else session.get_config_variable("ca_bundle"),
        has_proxy=bool(proxies.get(url.scheme) or proxies.get("all")) and not proxy_bypass(url.netloc),
    )


def _make_profile_error(session: Session, options: S3Options) -> InvalidArgumentError:
    # In botocore's order.
    names = [name for name in ("AWS_DEFAULT_PROFILE", "AWS_PROFILE") if os.environ.get(name)]
    named = "storage_options['profile_name']" if options.profile_name is not None or not names else names[0]
    return InvalidArgumentError(
        f"{named} is not a profile of the AWS configuration (`aws configure list-profiles`).",
        profile=session.profile,
        known=", ".join(session.available_profiles) or None,
    )


def create_client(session: Session, options: S3Options, *, is_signed: bool = True, **settings: Any) -> Any:
    """Return botocore's client of the bucket; `settings` are those of `botocore.config.Config`."""
    signature: Any = "s3v4" if is_signed and not options.anon else UNSIGNED
    # `Any`: botocore creates the classes of its clients at run time.
    style: Any = {"addressing_style": options.addressing_style} if options.addressing_style is not None else None
    return session.create_client(
        "s3",
        region_name=options.region_name,
        endpoint_url=options.endpoint_url,
        config=Config(signature_version=signature, s3=style, **settings),
    )
