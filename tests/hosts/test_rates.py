"""A restore at several pairs of rates: between hosts, where ranks read for each other, and to the store."""

from __future__ import annotations

import pytest

from dcp_remote.common.units import MiB
from tests.hosts.scenario import MANAGER, MARGIN_SECONDS, Outcome, Scenario

REPLICATED_BYTES = 48 * MiB


# Rates in Mbit/s: of a host in the network of training, of a host to the store, and of the store.
RATES = [(100, 1000, 4000), (10, 1000, 4000), (1000, 100, 4000), (200, 200, 4000), (1000, 1000, 200)]


@pytest.mark.parametrize(
    ("train_megabits", "store_megabits", "server_megabits"),
    RATES,
    ids=[f"{train} between hosts, {store} to the store, {server} of the store" for train, store, server in RATES],
)
def test_rates(train_megabits: int, store_megabits: int, server_megabits: int, scenario: Scenario) -> None:
    """Restore what all ranks hold, with and without sockets between ranks: the exchange is never much slower.

    A job without sockets is the measure, so that the rates of this machine count in both. The first restore of a job
    learns the rates; the second is compared, too.
    """
    rig = scenario.rig
    rig.limit("train", train_megabits)
    rig.limit("store", store_megabits)
    rig.limit("store", server_megabits, "store")
    seconds: dict[bool, list[float]] = {}
    texts: dict[str, str] = {}
    saved = rig.start(["restore first", "save 1"], manager=MANAGER, sharded_bytes=0, replicated_bytes=REPLICATED_BYTES)
    scenario.await_end(saved)
    for rank_sockets in (False, True):
        job = rig.start(
            ["restore once", "restore twice"],
            name=f"sockets-{rank_sockets}",
            manager=MANAGER | {"rank_sockets": rank_sockets},
            sharded_bytes=0,
            replicated_bytes=REPLICATED_BYTES,
        )
        scenario.await_end(job)
        scenario.await_success(job, "restore twice")
        seconds[rank_sockets] = [
            max(one.seconds for one in job.events(operation, "end")) - job.events(operation, "begin")[-1].seconds
            for operation in ("restore once", "restore twice")
        ]
    alone, together = seconds[False], seconds[True]
    for number, (reading_alone, exchanging) in enumerate(zip(alone, together, strict=True)):
        texts[f"restore {number + 1}"] = f"{exchanging:.1f} s; each rank by itself: {reading_alone:.1f} s"
    scenario.outcome = Outcome(texts, max(together), None)
    assert max(together) <= 3 * max(alone) + MARGIN_SECONDS / 2, texts
