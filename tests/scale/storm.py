"""Requests of ranks that begin at once, at a store that answers 503 above a rate: real stores, sockets and threads.

    python -m tests.scale.storm --ranks 104 [--json FILE]

Each rank has a store of its own, with its throttle and its connections; processes share out the ranks. The server
takes as much less than S3 (3,500 PUTs and 5,500 GETs a second and prefix) as there are fewer ranks than in the job that
the stores are told of, 10,000. All ranks put their objects, and then read them: with the gentle beginning of a large
job, and as if each were alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from dcp_remote.common.deadline import Deadline
from dcp_remote.storage.cloud.store import CloudStore, open_cloud_store
from dcp_remote.storage.cloud.throttle import REQUESTS_MAX, Throttle
from dcp_remote.storage.limits import note_processes
from dcp_remote.storage.retrying import RANGE_RETRY_SECONDS, RetryingStore
from dcp_remote.storage.url import parse_url
from tests.scale.processes import Rank, Ranks
from tests.scale.run import write
from tests.support.rated_server import RatedServer, Rates, rated_server

_OBJECT_BYTES = 512
_PHASE_SECONDS = 400.0


def open_stores(process: Rank, options: dict[str, str], ranks: int) -> None:
    """Open the stores of the ranks of one process, and all that costs CPU: clients and first connections."""
    stores = process.kept["stores"] = {
        rank: open_cloud_store(parse_url("s3://storm/run"), options)
        for rank in range(process.rank, ranks, process.world_size)
    }
    for rank, store in stores.items():
        store.put(f"{rank}/0", [b"of no phase"])
        store.get_into(f"{rank}/0", 0, memoryview(bytearray(1)))


def prepare(process: Rank, method: str, requests: int, told: int) -> None:
    """Start the threads of all ranks of one process, which wait for `send`."""
    note_processes(told)
    begin, longest, failures = threading.Event(), [0.0], list[BaseException]()

    def work(rank: int, store: CloudStore, left: Iterator[int]) -> None:
        begin.wait()
        repeating = RetryingStore(store, Deadline(RANGE_RETRY_SECONDS))
        try:
            for number in left:
                began = time.monotonic()
                key = f"{rank}/{number}"
                data = key.encode().ljust(_OBJECT_BYTES)
                if method == "PUT":
                    repeating.put(key, [data])
                else:
                    got = bytearray(_OBJECT_BYTES)
                    repeating.get_into(key, 0, memoryview(got))
                    assert got == data, "of another object"
                longest[0] = max(longest[0], time.monotonic() - began)
        except BaseException as error:  # noqa: BLE001  # raised by `send`
            failures.append(error)

    threads = []
    for rank, store in process.kept["stores"].items():
        store._bucket.throttle = Throttle()
        left = iter(range(requests))
        workers = min(REQUESTS_MAX, requests)
        threads += [threading.Thread(target=work, args=(rank, store, left)) for _ in range(workers)]
    for thread in threads:
        thread.start()
    process.kept["prepared"] = begin, threads, longest, failures


def send(process: Rank) -> float:
    """Send all requests that were prepared; return the longest time of one, with its pauses."""
    begin, threads, longest, failures = process.kept.pop("prepared")
    begin.set()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    seconds: float = longest[0]
    return seconds


def describe(server: RatedServer, method: str, longest_seconds: float) -> dict[str, Any]:
    """Return the figures of one phase."""
    rates = server.rates
    taken, refused = (server.count(method, is_refused=is_refused) for is_refused in (False, True))
    offered = server.seconds(method)
    return {
        "answered": taken,
        "refused": refused,
        "refused_per_answered": round(refused / taken, 3),
        "peak_per_second": max(offered),
        "rate": round(rates.puts if method == "PUT" else rates.gets, 1),
        "seconds": round(server.ended_seconds, 1),
        "ideal_seconds": round(taken / (rates.puts if method == "PUT" else rates.gets), 1),
        "longest_seconds": round(longest_seconds, 1),
        "other_requests": server.count("other", is_refused=False),
        "connections": server.connections,
        "by_second": offered,
        "refused_by_second": server.seconds(method, is_refused=True),
    }


def storm(processes: Ranks, ranks: int, requests: int, told_by_name: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Put and read on all ranks, that are told of so many; return the figures by the name of the phase."""
    found, job_ranks = {}, max(told_by_name.values())
    for name, told in told_by_name.items():
        with rated_server(Rates().scaled(ranks / job_ranks)) as server:
            server.is_limited = False
            processes.run(open_stores, server.storage_options, ranks)
            server.is_limited = True
            for method in ("PUT", "GET"):
                processes.run(prepare, method, requests, told)
                server.reset()
                done = processes.run(send)
                found[f"{method}, {name}"] = describe(server, method, max(done.values))
                assert set(server.answered) == {
                    (method, f"run/{rank}/{number}", f"bytes=0-{_OBJECT_BYTES - 1}" if method == "GET" else "")
                    for rank in range(ranks)
                    for number in range(requests)
                }
    return found


_COLUMNS = {
    "rate": "rate",
    "answered": "answered",
    "refused_per_answered": "refused for each",
    "peak_per_second": "busiest second",
    "seconds": "s",
    "ideal_seconds": "s at the rate",
    "longest_seconds": "longest request, s",
    "other_requests": "other requests",
    "connections": "connections",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the figures as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=104)
    parser.add_argument("--job-ranks", type=int, default=10_000, help="ranks of the job that is modelled")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--requests", type=int, default=16, help="of each rank, in each phase")
    parser.add_argument("--gently", action="store_true", help="not as if each rank were alone")
    parser.add_argument("--json", metavar="FILE", help="file for all figures")
    chosen = parser.parse_args(arguments)
    told = {"gentle": chosen.job_ranks} | ({} if chosen.gently else {"at once": 1})
    with Ranks(chosen.processes, hosts=chosen.processes, timeout_seconds=_PHASE_SECONDS) as processes:
        found = storm(processes, chosen.ranks, chosen.requests, told)
    write("| phase | " + " | ".join(_COLUMNS.values()) + " |")
    write("| --- |" + " ---: |" * len(_COLUMNS))
    for name, figures in found.items():
        write(f"| {name} | " + " | ".join(str(figures[column]) for column in _COLUMNS) + " |")
    if chosen.json is not None:
        with open(chosen.json, "w", encoding="utf-8") as file:
            size = {"ranks": chosen.ranks, "job_ranks": chosen.job_ranks, "requests": chosen.requests}
            json.dump(size | {"phases": found}, file, indent=1)


if __name__ == "__main__":
    main(sys.argv[1:])
