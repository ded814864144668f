"""Test kit for authors of stores, and for tests of training that saves through this package.

`store_suite.StoreSuite` tests the contract of stores (it needs pytest and is not imported here). `wrappers` has stores
that record requests and inject faults, exported here. `servers` has moto's S3 server.
"""

from __future__ import annotations

from dcp_remote.testing.wrappers import Fault, FaultyStore, RecordingStore, nth

__all__ = ["Fault", "FaultyStore", "RecordingStore", "nth"]
