"""Credentials of S3: botocore finds and renews them, obstore signs with them, and the store decides if they are valid.

Their expiry is never certain: a file is rewritten, a role is given new ones early. So after a store refused
credentials, `S3.renew_credentials` looks for newer ones.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from dcp_remote.errors import PermissionDeniedError
from dcp_remote.storage.cloud.endpoint import S3Endpoint
from dcp_remote.storage.cloud.errors import FAILURES

if TYPE_CHECKING:
    from botocore.credentials import Credentials, ReadOnlyCredentials
    from obstore.store import S3Credential

# obstore asks for credentials again when less than this is left of them.
_OBSTORE_REFRESH_SECONDS = 300.0

# botocore renews credentials ten minutes before they expire, so what it returns is valid for at least this long.
_VALID_SECONDS = 600.0

# Pause after a failed renewal, because each attempt of botocore takes some seconds.
_FAILED_SECONDS = 30.0

# Fewest attempts and seconds for an answer of the instance: by default botocore asks once, for a second, and takes a
# late answer for none. A host without any credentials, where nothing answers, says so after 12 seconds.
_INSTANCE = {"metadata_service_num_attempts": 3, "metadata_service_timeout": 2}


class S3Credentials:
    """Credentials of a botocore session for obstore, which calls this object in a thread to get fresh ones.

    Attributes:
        source: Credentials that botocore has found; None before they are searched, and on other clouds.
        last_given: Those that requests are signed with now; None before the first signed request.
        changes: Number of times that there were other credentials than before: older clients have the old ones.
        error: Error of the last renewal, if it has failed.
    """

    def __init__(self, source: Credentials | None = None) -> None:
        """Fetch nothing."""
        self.source = source
        self._before: ReadOnlyCredentials | None = None
        self.last_given: ReadOnlyCredentials | None = None
        self.changes = 0
        self.error: Exception | None = None

    def replace(self, source: Credentials) -> None:
        """Use other credentials from now on."""
        self.source = source
        self._before, self.last_given = self.last_given, None
        self.changes += 1

    @property
    def secrets(self) -> tuple[str, ...]:
        """Keys and tokens that requests under way may be signed with."""
        known = (keys for keys in (self._before, self.last_given) if keys is not None)
        return tuple(text for keys in known for text in (keys.access_key, keys.secret_key, keys.token) if text)

    def take_error(self) -> Exception | None:
        """Return why the last renewal by obstore failed, and forget it; None if it did not fail."""
        error, self.error = self.error, None
        return error

    def __call__(self) -> S3Credential:
        """Return credentials as obstore wants them, with an expiry after which obstore calls again.

        If a renewal fails, return the last credentials once more: botocore begins ten minutes before they expire, so
        the issuing service may be back in time.
        """
        valid_seconds, source = _VALID_SECONDS, self.source
        assert source is not None, "obstore gets this object once there are credentials"
        try:
            frozen = source.get_frozen_credentials()
        except FAILURES as error:
            if source is not self.source:
                return self()  # replaced meanwhile
            if self.last_given is None:
                # obstore would turn the error into a text: keep it for `take_error`.
                self.error = error
                raise
            frozen, valid_seconds = self.last_given, _OBSTORE_REFRESH_SECONDS + _FAILED_SECONDS
        if source is not self.source:
            return self()
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


def find_credentials(endpoint: S3Endpoint, bucket: str) -> Credentials:
    """Find credentials by botocore's rules: options, environment, files, then the instance, which costs a request.

    Raises:
        PermissionDeniedError: There are none.
        botocore.exceptions.BotoCoreError: A file cannot be read, or the service that issues credentials failed.
    """
    session = endpoint.session
    for name, least in _INSTANCE.items():
        session.set_config_variable(name, max(least, session.get_config_variable(name)))
    credentials = session.get_credentials()
    if credentials is None:
        raise PermissionDeniedError(
            "No credentials were found. Give aws_access_key_id and aws_secret_access_key, or profile_name, in "
            "storage_options; or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; or use `aws "
            "configure`, or a role. For a public bucket give storage_options['anon'] = True.",
            bucket=bucket,
        )
    return credentials
