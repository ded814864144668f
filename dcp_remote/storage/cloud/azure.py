"""Azure Blob Storage."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from obstore.store import AzureStore

from dcp_remote.errors import BucketNotFoundError
from dcp_remote.storage.cloud.errors import make_bucket_error
from dcp_remote.storage.cloud.provider import NO_RETRIES, Provider
from dcp_remote.storage.options import CloudOptions, check_endpoint, find_environment_endpoint, option

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig


@dataclass(frozen=True, slots=True)
class AzureOptions(CloudOptions):
    """Options of an Azure container, under adlfs's names; obstore takes the others from `AZURE_*`."""

    account_name: str | None = option()
    account_key: str | None = option(secret=True)
    sas_token: str | None = option(None, "sas_key", secret=True)  # with or without the leading `?`
    connection_string: str | None = option(secret=True)  # `AZURE_STORAGE_CONNECTION_STRING` by default
    tenant_id: str | None = option()  # of a service principal, with the next two
    client_id: str | None = option()
    client_secret: str | None = option(secret=True)
    bearer_token: str | None = option(secret=True)  # of OAuth; never renewed

    def secrets(self) -> list[str]:
        """Return all secrets among the options, and those within the connection string."""
        parts = self.parse_connection_string()
        within = [parts.get("AccountKey"), parts.get("SharedAccessSignature")]
        return [*CloudOptions.secrets(self), *(secret for secret in within if secret)]

    def parse_connection_string(self) -> dict[str, str]:
        """Return the settings of the connection string, by their names there."""
        text = self.connection_string or os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
        return {name: value for name, _, value in (part.partition("=") for part in text.split(";")) if value}


class Azure(Provider):
    """Container of Azure Blob Storage. A single option overrides the connection string."""

    options_class = AzureOptions
    known_hosts = (".core.windows.net", ".core.chinacloudapi.cn", ".core.usgovcloudapi.net")
    no_bucket_code = "ContainerNotFound"
    options: AzureOptions

    def endpoint_url(self) -> str | None:
        """Implement `Provider.endpoint_url`."""
        parts = self.options.parse_connection_string()
        account_name = self.options.account_name or parts.get("AccountName")
        endpoint_url = self.options.endpoint_url or parts.get("BlobEndpoint")
        if endpoint_url is None and account_name is not None and "EndpointSuffix" in parts:
            protocol = parts.get("DefaultEndpointsProtocol", "https")
            endpoint_url = f"{protocol}://{account_name}.blob.{parts['EndpointSuffix']}"
        if endpoint_url is None:
            return find_environment_endpoint("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
        check_endpoint(endpoint_url, named="The endpoint of the connection string")
        return endpoint_url

    def open_client(self, http: ClientConfig, *, delete_singly: bool) -> AzureStore:
        """Implement `Provider.open_client`; obstore has no setting for single deletes on Azure."""
        options, parts = self.options, self.options.parse_connection_string()
        sas_token = options.sas_token or parts.get("SharedAccessSignature")
        given = {
            "account_name": options.account_name or parts.get("AccountName"),
            "account_key": options.account_key or parts.get("AccountKey"),
            "sas_key": sas_token.removeprefix("?") if sas_token is not None else None,
            "tenant_id": options.tenant_id,
            "client_id": options.client_id,
            "client_secret": options.client_secret,
            "token": options.bearer_token,
            "endpoint": self.endpoint_url(),
        }
        config: AzureConfig = {"skip_signature": options.anon}
        config.update({name: value for name, value in given.items() if value is not None})  # type: ignore[typeddict-item]  # the names above are AzureConfig's
        return AzureStore(self.bucket, config=config, client_options=http, retry_config=NO_RETRIES)

    def make_bucket_error(self) -> BucketNotFoundError:
        """Implement `Provider.make_bucket_error`."""
        command = f"az storage container create --name {self.bucket}"
        return make_bucket_error(
            self.bucket, command, kind="container", where="URL or the account_name", endpoint_url=self.endpoint_url()
        )
