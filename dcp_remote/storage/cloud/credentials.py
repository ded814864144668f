"""Credentials of S3: botocore finds and renews them, obstore signs with them, and the store decides if they are valid.

Their expiry is never certain: a file is rewritten, a role is given new ones early. So after a store refused
credentials, `BucketClients.renew_credentials` looks for newer ones.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError

from dcp_remote.errors import PermissionDeniedError
from dcp_remote.storage.cloud.endpoint import S3Endpoint

if TYPE_CHECKING:
    from botocore.credentials import Credentials, ReadOnlyCredentials
    from obstore.store import S3Credential

# obstore asks for credentials again when less than this is left of them.
_OBSTORE_REFRESH_SECONDS = 300.0

# botocore renews credentials ten minutes before they expire, so what it returns is valid for at least this long.
_VALID_SECONDS = 600.0

# Pause after a failed renewal, because each attempt of botocore takes some seconds.
_FAILED_SECONDS = 30.0


class S3Credentials:
    """Provider of botocore's credentials for obstore, which calls it in a thread of its own to get fresh ones.

    Args:
        credentials: Credentials of a botocore session.
        before: Provider that this one replaces; its secrets stay secret.

    Attributes:
        last_given: Credentials that the last call returned; None before the first call.
        changes: Number of calls that returned other credentials than the call before.
        error: Error of the last call; None if it returned credentials.
    """

    def __init__(self, credentials: Credentials, *, before: S3Credentials | None = None) -> None:
        """Store the arguments; nothing is fetched."""
        self._credentials = credentials
        self._before = before.last_given if before is not None else None
        self.last_given: ReadOnlyCredentials | None = None
        self.changes = 0
        self.error: Exception | None = None

    @property
    def secrets(self) -> tuple[str, ...]:
        """Keys and tokens that requests under way may be signed with."""
        known = (keys for keys in (self._before, self.last_given) if keys is not None)
        return tuple(text for keys in known for text in (keys.access_key, keys.secret_key, keys.token) if text)

    def fetch(self) -> ReadOnlyCredentials:
        """Return the current credentials; botocore renews them first if they expire soon.

        Raises:
            botocore.exceptions.BotoCoreError: The credentials cannot be renewed.
            botocore.exceptions.ClientError: The service that issues credentials refused.
        """
        return self._credentials.get_frozen_credentials()

    def __call__(self) -> S3Credential:
        """Return credentials as obstore wants them, with an expiry after which obstore calls again.

        If a renewal fails, return the last credentials once more: botocore begins ten minutes before they expire, so
        the issuing service may be back in time.
        """
        valid_seconds = _VALID_SECONDS
        try:
            frozen = self.fetch()
        except (BotoCoreError, ClientError, OSError, ValueError) as error:
            if self.last_given is None:
                # obstore would turn the error into a text: keep it for `BucketClients.take_credentials_error`.
                self.error = error
                raise
            frozen, valid_seconds = self.last_given, _OBSTORE_REFRESH_SECONDS + _FAILED_SECONDS
        self.error = None  # an earlier error that was never taken
        if self.last_given is not None and frozen != self.last_given:
            self._before = self.last_given
            self.changes += 1
        self.last_given = frozen
        return {
            "access_key_id": frozen.access_key or "",
            "secret_access_key": frozen.secret_key or "",
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=valid_seconds),
        }


def find_credentials(endpoint: S3Endpoint, bucket: str, *, before: S3Credentials | None = None) -> S3Credentials:
    """Find credentials by botocore's rules: options, environment, files, then the instance, which costs a request.

    Raises:
        PermissionDeniedError: There are none.
        botocore.exceptions.BotoCoreError: A file cannot be read, or the service that issues credentials failed.
    """
    credentials = endpoint.session.get_credentials()
    if credentials is None:
        raise PermissionDeniedError(
            "No credentials were found. Give storage_options['profile_name'], or 'aws_access_key_id' and "
            "'aws_secret_access_key'; or set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; or write "
            "~/.aws/credentials (`aws configure`); or run with an instance or container role. For a public bucket "
            "give 'anon': True.",
            bucket=bucket,
        )
    return S3Credentials(credentials, before=before)
