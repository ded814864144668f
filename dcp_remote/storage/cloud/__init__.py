"""S3, Google Cloud Storage and Azure Blob Storage as stores; `store.open_cloud_store` opens one.

provider is what differs from cloud to cloud; s3 (with endpoint, credentials and diagnosis), google and azure are the
clouds. options are `storage_options`; clients creates obstore's clients, once per process, with the limits of timeouts.
direct_reads and tls_stream read ranges straight into memory; throttle reduces the requests to an overloaded store;
errors, failures and redaction turn the clients' errors into those of this package; checks are what `dcp-remote doctor`
asks of a bucket.
"""
