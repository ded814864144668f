"""Google Cloud Storage, through its XML API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from obstore.store import GCSStore

from dcp_remote.errors import BucketNotFoundError, ConditionFailedError
from dcp_remote.storage.base import Version, quote_etag
from dcp_remote.storage.cloud.errors import make_bucket_error
from dcp_remote.storage.cloud.provider import NO_RETRIES, Provider
from dcp_remote.storage.options import CloudOptions, find_environment_endpoint, option

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutResult, UpdateVersion
    from obstore.store import ClientConfig, GCSConfig

# Words that gcsfs accepts as `token`, beside credentials.
_ANONYMOUS = "anon"
_WORDS = (_ANONYMOUS, "google_default")


@dataclass(frozen=True, slots=True)
class GoogleOptions(CloudOptions):
    """Options of a Google Cloud bucket; without credentials, obstore finds the application's default ones."""

    token: str | None = option(secret=True)  # of gcsfs: path of a credentials file, its JSON text, or one of `_WORDS`
    service_account: str | None = option(None, "service_account_path", "service_account_file")  # path of a key file
    service_account_key: str | None = option(secret=True)  # content of a key file
    application_credentials: str | None = option(None, "google_application_credentials")  # path
    bearer_token: str | None = option(None, "access_token", secret=True)  # of OAuth; never renewed

    def secrets(self) -> list[str]:
        """Return all secrets among the options; `token` may also be a word."""
        return [secret for secret in CloudOptions.secrets(self) if secret not in _WORDS]


class GoogleCloud(Provider):
    """Bucket of Google Cloud Storage. Conditions compare its generations, and not ETags."""

    options_class = GoogleOptions
    known_hosts = (".googleapis.com",)
    options: GoogleOptions

    def endpoint_url(self) -> str | None:
        """Implement `Provider.endpoint_url`."""
        return self.options.endpoint_url or find_environment_endpoint("GOOGLE_BASE_URL")

    def open_client(self, http: ClientConfig, *, delete_singly: bool) -> GCSStore:
        """Implement `Provider.open_client`; Google Cloud always deletes singly."""
        options = self.options
        given = {
            "service_account": options.service_account,
            "service_account_key": options.service_account_key,
            "application_credentials": options.application_credentials,
            "bearer_token": options.bearer_token,
            "base_url": self.endpoint_url(),
        }
        is_anonymous = options.anon or options.token == _ANONYMOUS
        if is_anonymous:
            # Without the empty token, obstore would ask the instance for credentials to send a PUT or DELETE.
            given["bearer_token"] = ""
        elif options.token is not None and options.token not in _WORDS:
            is_json = options.token.lstrip().startswith("{")
            given["service_account_key" if is_json else "application_credentials"] = options.token
        config: GCSConfig = {"skip_signature": is_anonymous}
        config.update({name: value for name, value in given.items() if value is not None})  # type: ignore[typeddict-item]  # the names above are GCSConfig's
        return GCSStore(self.bucket, config=config, client_options=http, retry_config=NO_RETRIES)

    def make_bucket_error(self) -> BucketNotFoundError:
        """Implement `Provider.make_bucket_error`."""
        command = f"gcloud storage buckets create gs://{self.bucket}"
        return make_bucket_error(self.bucket, command, endpoint_url=self.endpoint_url())

    def version_of(self, meta: ObjectMeta | PutResult) -> Version:
        """Implement `Provider.version_of`."""
        return Version(etag=quote_etag(meta["e_tag"]), generation=meta["version"])

    def condition_of(self, version: Version) -> UpdateVersion:
        """Implement `Provider.condition_of`; every version that Google Cloud returned has a generation."""
        if version.generation is None:
            what = "The object is not in the state that this write asks for: no object has this version."
            raise ConditionFailedError(what, bucket=self.bucket)
        return {"e_tag": version.etag, "version": version.generation}
