"""Shipped for whoever writes a store, or tests training that saves through this package.

`store_suite.StoreSuite` holds what every store must do (it needs pytest, and so is not imported here); the wrappers
record requests and inject faults.
"""

from __future__ import annotations

from dcp_remote.testing.wrappers import Fault, FaultyStore, RecordingStore, matching, nth

__all__ = ["Fault", "FaultyStore", "RecordingStore", "matching", "nth"]
