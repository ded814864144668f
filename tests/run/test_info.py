"""The newest checkpoint of a run whose catalog the store denies for a moment."""

from __future__ import annotations

import pytest

from dcp_remote import latest, load
from dcp_remote.errors import ObjectNotFoundError, TransientStorageError
from dcp_remote.format.catalog import CATALOG_KEY
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.wrapper import Verb
from dcp_remote.testing import Fault, FaultyStore
from tests.support.runs import a_run


def denying(store: ObjectStore, *, for_ever: bool = False) -> FaultyStore:
    """Return a store whose gateway answers the first GET of the catalog, or all, with 404."""

    def is_catalog(verb: Verb, key: str, _number: int) -> bool:
        return verb == "get" and key == CATALOG_KEY

    def missing() -> ObjectNotFoundError:
        return ObjectNotFoundError("An injected 404.")

    return FaultyStore(store, [Fault(is_catalog, "request", persistent=for_ever, error=missing)])


def test_a_catalog_that_is_denied_for_a_moment() -> None:
    """Answer one GET of the catalog with 404: the run is found, so that no job begins from nothing."""
    info = latest(denying(a_run(1, 2)))
    assert info is not None
    assert info.step == 2


def test_a_catalog_that_is_only_denied() -> None:
    """Answer every GET of the catalog with 404, but not a HEAD: an error, and neither None nor a missing checkpoint."""
    with pytest.raises(TransientStorageError, match="try again"):
        latest(denying(a_run(1), for_ever=True))
    with pytest.raises(TransientStorageError, match="try again"):
        load(denying(a_run(1)))
