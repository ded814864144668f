"""S3, Google Cloud Storage and Azure Blob Storage as stores; `store.open_cloud_store` opens one.

options, config, credentials and endpoint configure the clients of a bucket; clients creates them, once per process;
range_reader, tls_stream, connector and circuit_breaker read ranges straight into memory; rate_limit reduces the request
rate of an overloaded store; errors, failures, diagnosis and redaction turn the clients' errors into those of this
package.
"""

from __future__ import annotations

__all__ = [
    "circuit_breaker",
    "clients",
    "config",
    "connector",
    "credentials",
    "diagnosis",
    "endpoint",
    "errors",
    "failures",
    "options",
    "range_reader",
    "rate_limit",
    "redaction",
    "store",
    "tls_stream",
]
