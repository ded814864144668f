"""Credentials of S3: botocore finds and renews them, obstore is given them, and the store has the last word.

Until when they are good is known to nobody here for certain: a file is written anew without a word, a role is given
others before their time. So what the store refused is looked for once more (`Connections.renew_credentials`).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError

from dcp_remote.errors import PermissionDeniedError
from dcp_remote.storage.s3_place import S3Place

if TYPE_CHECKING:
    from botocore.credentials import Credentials, ReadOnlyCredentials
    from obstore.store import S3Credential

# obstore asks again when less than this is left.
_ASKED_AGAIN_SECONDS = 300.0

# botocore renews what it gives out ten minutes before its end.
_GIVEN_SECONDS = 600.0

# After so long botocore is asked again that could not renew them, which it tries for some seconds each time.
_FAILED_SECONDS = 30.0


class S3Credentials:
    """Gives botocore's credentials to obstore, whenever it asks for fresh ones (from a thread of its own).

    Args:
        credentials: Of a session.
        before: Which these replace: what was secret stays it.

    Attributes:
        given: What was given last; None before the first time.
        changes: How often that was something else than before.
        error: Why there was nothing to give when obstore asked last.
    """

    def __init__(self, credentials: Credentials, *, before: S3Credentials | None = None) -> None:
        """See the class."""
        self._credentials = credentials
        self._before = before.given if before is not None else None
        self.given: ReadOnlyCredentials | None = None
        self.changes = 0
        self.error: Exception | None = None

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must not be shown, of those that may be in use."""
        known = (one for one in (self._before, self.given) if one is not None)
        return tuple(text for one in known for text in (one.access_key, one.secret_key, one.token) if text)

    def now(self) -> ReadOnlyCredentials:
        """Those of this moment; asked of whoever gives them, if their time is nearly over.

        Raises:
            botocore.exceptions.BotoCoreError: They cannot be renewed.
            botocore.exceptions.ClientError: So says who gives them.
        """
        return self._credentials.get_frozen_credentials()

    def __call__(self) -> S3Credential:
        """What obstore calls."""
        good_for_seconds = _GIVEN_SECONDS
        try:
            frozen = self.now()
        except (BotoCoreError, ClientError, OSError, ValueError) as error:
            if self.given is None:
                # obstore would make a text of it: what it was is kept for who tells it.
                self.error = error
                raise
            # botocore gives up ten minutes before they expire, and until then whoever gives them may be back.
            frozen, good_for_seconds = self.given, _ASKED_AGAIN_SECONDS + _FAILED_SECONDS
        self.error = None  # of before, which nobody may have asked for
        if self.given is not None and frozen != self.given:
            self._before = self.given
            self.changes += 1
        self.given = frozen
        return {
            "access_key_id": frozen.access_key or "",
            "secret_access_key": frozen.secret_key or "",
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=good_for_seconds),
        }


def find_credentials(place: S3Place, bucket: str, *, before: S3Credentials | None = None) -> S3Credentials:
    """Those that botocore finds: in options, environment or files, or of the instance, which costs a request.

    Raises:
        PermissionDeniedError: There are none.
        botocore.exceptions.BotoCoreError: A file cannot be read, or who gives them fails.
    """
    credentials = place.session.get_credentials()
    if credentials is None:
        raise PermissionDeniedError(
            "No credentials were found. Give storage_options['profile_name'], or 'aws_access_key_id' and "
            "'aws_secret_access_key'; or set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; or write "
            "~/.aws/credentials (`aws configure`); or run with an instance or container role. For a public bucket "
            "give 'anon': True.",
            bucket=bucket,
        )
    return S3Credentials(credentials, before=before)
