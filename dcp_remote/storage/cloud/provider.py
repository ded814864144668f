"""A cloud, as `CloudStore` knows it: everything in which S3, Google Cloud Storage and Azure differ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Self, TypeAlias

from obstore.store import AzureStore, GCSStore, S3Store

from dcp_remote.errors import BucketNotFoundError
from dcp_remote.storage.base import Version, quote_etag
from dcp_remote.storage.cloud.credentials import S3Credentials
from dcp_remote.storage.cloud.errors import NO_SUCH_BUCKET_CODE, CloudError
from dcp_remote.storage.options import CloudOptions, parse_options

if TYPE_CHECKING:
    from botocore.credentials import ReadOnlyCredentials
    from obstore import ObjectMeta, PutResult, UpdateVersion
    from obstore.store import ClientConfig, RetryConfig

Client: TypeAlias = S3Store | GCSStore | AzureStore

# One attempt per call: `RetryingStore`, which knows the deadline, retries.
NO_RETRIES: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(0)}


class Provider(ABC):
    """Bucket of one cloud, shared by one opened store and its children. Safe to use from many threads.

    A cloud is a subclass in a module of its own, entered in `CLOUDS` of `store.py`. What has a default here is what
    only some clouds have.
    """

    options_class: ClassVar[type[CloudOptions]]

    # Ends of the names of servers whose conditional writes are known to be correct.
    known_hosts: ClassVar[tuple[str, ...]]

    # Error code of a listing without its bucket, which obstore raises as GenericError.
    no_bucket_code: ClassVar[str] = NO_SUCH_BUCKET_CODE

    options: CloudOptions

    def __init__(self, bucket: str, options: CloudOptions) -> None:
        """Store the arguments; nothing is created or sent."""
        self.bucket = bucket
        self.options = options
        self.credentials = S3Credentials()  # stays empty where obstore has credentials of its own

    @classmethod
    def parse(cls, bucket: str, options: Mapping[str, object]) -> Self:
        """Return the bucket for `storage_options`, which are checked."""
        return cls(bucket, parse_options(cls.options_class, options))

    @abstractmethod
    def endpoint_url(self) -> str | None:
        """Return the URL of the server; None if obstore uses the cloud's own. Sends nothing.

        Raises:
            InvalidArgumentError: An option is invalid.
            botocore.exceptions.BotoCoreError: Profile or region cannot be read.
        """

    @abstractmethod
    def open_client(self, http: ClientConfig, *, delete_singly: bool) -> Client:
        """Return a new client of obstore; finds credentials first, where obstore does not."""

    @abstractmethod
    def make_bucket_error(self) -> BucketNotFoundError:
        """Return the error for this bucket, which does not exist. Sends nothing; raises like `endpoint_url`."""

    def verify(self) -> bool | str | None:
        """Return how certificates are verified: False accepts any, a path names a file of trusted ones."""
        return self.options.verify

    def version_of(self, meta: ObjectMeta | PutResult) -> Version:
        """Return the version by which the cloud compares an object: its ETag, unless a cloud has another."""
        return Version(etag=quote_etag(meta["e_tag"]))

    def condition_of(self, version: Version) -> UpdateVersion:
        """Return the condition of a put that replaces a version; raise if no object of this cloud has that version."""
        return {"e_tag": version.etag}

    def secrets(self) -> list[str]:
        """Return all texts that no message may show: secrets of the options and credentials in use."""
        return [*self.options.secrets(), *self.credentials.secrets]

    def sign_get(self, client: Client, path: str) -> str | None:
        """Return a signed URL for a GET, a secret; None if obstore has to read, or if signing costs a request."""
        return None

    def renew_credentials(self, refused: ReadOnlyCredentials | None) -> bool:
        """Look for credentials other than the refused ones; return whether any were found for the next request."""
        return False

    def diagnose(self, prefix: str, *, listing: bool = False, reuse: bool = False) -> CloudError | None:
        """Find out why requests below a prefix fail, by one request; None if nothing is found.

        Only on S3: for the other clouds obstore is the only client, and its error says all that it knows.

        With `listing`, a listing failed; with `reuse`, a recent result may be returned, so that a hundred failures cost
        one diagnosis.
        """
        return None
