"""Checks that the ranks of a job make together before a training: `dcp-remote doctor` under torchrun."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dcp_remote.common.descriptors import find_store_shortage
from dcp_remote.common.text import format_count, join_some
from dcp_remote.coordination.group import RankGroup
from dcp_remote.coordination.outcome import Terms
from dcp_remote.errors import StorageError
from dcp_remote.loading.peer_sockets import connect, host_towards, listen_on_tcp
from dcp_remote.storage.checks import Finding

# Checks of a store that does not answer end within half a minute, and some ranks start later than others.
_ARRIVAL_SECONDS = 90.0

# Time to reach the key-value store, and at the end for the other ranks to read the last answer.
_STORE_SECONDS = 5.0

# Time in which ranks that are all there have met: a tenth of the time for which a save waits for a rank by default.
_ROUND_SECONDS_MAX = 3.0

# Other ranks to which each connects: with more ranks, every second, third … from its own on. After some failures, each
# of which may take seconds, no more are tried.
_OTHERS_MAX = 64
_FAILURES_MAX = 4


def exchange_reports(report: dict[str, Any], *, arrival_seconds: float = _ARRIVAL_SECONDS) -> list[dict[str, Any]]:
    """Return the reports of all ranks that torchrun has started, by rank; each gets a check of its sockets.

    Ranks meet in the key-value store of the job, as in a save, and connect as they do that read for each other.

    Raises:
        StorageError: The key-value store does not answer, or ranks did not come in time, which are named.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun hosts it, else rank 0
    is_host, limit = rank == 0 and not is_agents, timedelta(seconds=arrival_seconds)
    try:
        end_seconds = time.monotonic() + (0.0 if is_agents else arrival_seconds)  # that of torchrun listens already
        while not is_host:  # torch tries for minutes, and reports its own stack
            try:
                socket.create_connection((host, port), timeout=_STORE_SECONDS).close()
                break
            except OSError:
                if time.monotonic() >= end_seconds:
                    raise
            time.sleep(1)
        store = dist.TCPStore(host, port, is_master=is_host, timeout=limit, wait_for_workers=False)
    except (OSError, dist.DistError) as error:
        raise StorageError(
            f"the key-value store of the job, {host} port {port}, does not answer {socket.gethostname()}. Let this "
            "host reach MASTER_ADDR and MASTER_PORT: a process group needs them, too.",
            cause=str(error).partition("\n")[0],
        ) from error
    if rank == 0 and (shortage := find_store_shortage(host, world_size)):
        fact, _, cure = shortage.partition(". ")
        report["checks"].append({"name": "store connections", **Finding("warn", fact, cure)._asdict()})
    prefix = f"dcp_remote/doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    group = RankGroup(rank, world_size, dist.PrefixStore(prefix, store))
    terms = Terms(StorageError, StorageError, seconds=2 * arrival_seconds, arrival_seconds=arrival_seconds)
    collective = group.prepare("`dcp-remote doctor`", terms)
    group.begin(collective)
    try:
        with collective, listen_on_tcp(host_towards(host), None) as listening:
            addresses = collective.gather(listening.getsockname()[:2], list)
            report["checks"].append({"name": "rank sockets", **check_sockets(rank, addresses)._asdict()})
            collective.gather(None, len)  # ranks come at different times from their connections
            began_seconds = time.monotonic()
            collective.gather(None, len)
            seconds = time.monotonic() - began_seconds
            if rank == 0 and seconds > _ROUND_SECONDS_MAX:
                report["checks"].append({"name": "key-value store", **describe_wait(seconds, world_size)._asdict()})
            return collective.gather(report, list)
    except StorageError as error:  # whose advice is for saves
        node = f"rank N is on node N // {os.environ.get('LOCAL_WORLD_SIZE', '1')} of torchrun"
        advice = f"Look at the output of these ranks, and whether their hosts run; {node}."
        raise StorageError(f"{error.what.partition('. ')[0].rstrip('.')}. {advice}") from error
    finally:
        group.close(_STORE_SECONDS)


def describe_wait(seconds: float, world_size: int) -> Finding:
    """Describe a wait of the ranks for each other that took long, although all were there."""
    return Finding(
        "warn",
        f"one wait of {format_count(world_size, 'rank')} for each other took {seconds:.1f} s, limit "
        f"{_ROUND_SECONDS_MAX:g} s",
        "A save waits three times, a restore five. Give the process at MASTER_ADDR, which is rank 0 or its torchrun, a "
        "core of its own and a name service that answers at once, or raise arrival_seconds to ten such waits.",
    )


def check_sockets(rank: int, addresses: Sequence[tuple[str, int]]) -> Finding:
    """Connect to the addresses of other ranks."""
    world_size, failed = len(addresses), list[str]()
    others = range(rank + 1, rank + world_size, max(1, -(-(world_size - 1) // _OTHERS_MAX)))
    for other in (number % world_size for number in others):
        try:
            connect(*addresses[other], b"").close()
        except OSError as error:
            failed.append(f"{other} (address {addresses[other][0]}: {error.strerror or error})")
            if len(failed) == _FAILURES_MAX:
                break
    if not failed:
        return Finding("ok", f"connected to {format_count(len(others), 'other rank')}")
    cure = (
        "Let hosts of the job reach each other, or set rank_sockets=RankSockets(ports=…, interface=…) of the manager."
    )
    return Finding("warn", f"no connection to rank {join_some(failed)}", f"{cure} Else each rank reads for itself.")
