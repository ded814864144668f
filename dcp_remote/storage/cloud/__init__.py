"""S3, Google Cloud Storage and Azure Blob Storage as stores; `store.open_cloud_store` opens one.

provider is what differs from cloud to cloud; s3 (with endpoint, credentials and diagnosis), google and azure are the
clouds. bucket has what the stores of one bucket share: obstore's clients with their time limits, direct reads
and the throttle. direct_reads and tls_stream read ranges straight into memory; throttle reduces the requests to an
overloaded store; errors, failures and redaction turn the clients' errors into those of this package; checks are what
`dcp-remote doctor` asks of a bucket.
"""
