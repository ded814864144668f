"""Tables of the measurements, in Markdown; no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dcp_remote.common.text import human_bytes
from dcp_remote.common.units import GiB
from tests.benchmark.report.goals import Goal, cpu_seconds_of_a_save, training_seconds_lost
from tests.benchmark.report.plan import (
    BUSY,
    CEPH,
    LOADED_BY_RANKS,
    MANY,
    OURS,
    RAW,
    RESHARDING,
    SAVED_BY_RANKS,
    TINY,
    TLS,
    TRAINING,
    Beside,
)
from tests.benchmark.report.rows import Results, Row, cpu_per_gib, median, wall

_NOTHING = "–"

# A traceback's last line; a table is no log.
_FAILURE_CHARACTERS_MAX = 300


_WAITS = "training waits, s"
_SERVERS_CPU, _REQUESTS, _WIRE = "server's CPU", "requests", "bytes on the wire / state"
# The benchmark's own server counts these; Ceph does not.
_COUNTED_BY_OUR_SERVER = {_SERVERS_CPU, _REQUESTS, _WIRE}
COLUMNS = (
    "ranks",
    "client",
    "save, s (× dcp_remote)",
    "load, s (× dcp_remote)",
    "CPU up, s/GiB (× raw)",
    "CPU down",
    _SERVERS_CPU,
    "memory above the state",
    _REQUESTS,
    _WIRE,
    _WAITS,
)


def about(results: Results) -> str:
    """Return how the figures were taken."""
    told = results.about
    rounds = sorted({1 + max(row.round for row in results.rows if row.section == one) for one in results.sections()})
    many = f"Medians of {_listed(rounds)} interleaved rounds" if rounds != [1] else "One round"
    machine = f"{told['cores']} cores, {told['processor']}, {told['system']}, Python {told['python']}"
    return (
        f"{many}, each measurement in fresh processes, with the server on the same machine: {machine}; "
        f"{told['versions']}. {told['date']}, {told['seconds'] / 60:.0f} minutes. CPU is the client's. “raw socket” "
        "moves the bytes alone, without checksums or retries; “best” marks a peer's best settings. In pairs, the save "
        "comes first. Every load was compared with what was saved."
    )


def _listed(numbers: Sequence[int]) -> str:
    return " or ".join(filter(None, (", ".join(map(str, numbers[:-1])), str(numbers[-1]))))


def goals_table(goals: Iterable[Goal]) -> str:
    """Return the table of goals, each with its measured value."""
    rows = []
    for goal in goals:
        limit = f"at least {goal.at_least:g}" if goal.at_least is not None else f"at most {goal.at_most:g}"
        digits = 3 if goal.unit == " s" else 2
        rows.append((goal.what, f"{limit}{goal.unit}", f"{goal.measured:.{digits}f}{goal.unit}", _judged(goal)))
    return _table(("goal", "wanted", "measured", ""), rows)


def _judged(goal: Goal) -> str:
    return "reached" if goal.reached else "**missed**"


def transfer_table(results: Results, section: str) -> str:
    """Return the table of a section: saves and loads by client, with ratios to ours."""
    found = [row for row in results.rows if row.section == section and row.action in {"save", "load"}]
    # How long ours waits is known only if a save in the background was measured.
    left = set() if results.select(section, OURS, "background") else {_WAITS}
    if section == CEPH:
        left |= _COUNTED_BY_OUR_SERVER
    shown = [name for name in COLUMNS if name not in left]
    lines = []
    for ranks, client in dict.fromkeys((row.ranks, row.client) for row in found):
        cells = _cells(results, section, ranks, client)
        lines.append([cells[name] for name in shown])
    sizes = {row.state_bytes for row in found}
    told = f"A state of {human_bytes(max(sizes))}." if sizes else ""
    if section == TLS:
        told += (
            " The server's TLS runs on the same cores and costs as much CPU as that of the fastest clients. This "
            "leaves the client's CPU as it is, but makes ratios of seconds smaller than against a server elsewhere."
        )
    if section == CEPH:
        told += (
            " Ceph 16, in memory, on the same cores, without S3's newer checksums. Its requests, CPU and bytes on the "
            "wire are not counted."
        )
    return f"{told}\n\n{_table(shown, lines)}"


def _cells(results: Results, section: str, ranks: int, client: str) -> dict[str, str]:
    """Return the cells of one line, by column."""
    both, own, raw = (
        [results.select(section, name, action, ranks=ranks) for action in ("save", "load")]
        for name in (client, OURS, RAW)
    )
    background = results.select(section, client, "background", ranks=ranks)
    # Ours returns early; a save of the others blocks as long as it takes.
    waits = median(background, lambda row: row.blocked_seconds) if client == OURS else median(both[0], wall)
    values = (
        str(ranks),
        client,
        *(_against(one, mine, wall) for one, mine in zip(both, own, strict=True)),
        *(_against(one, base, cpu_per_gib) for one, base in zip(both, raw, strict=True)),
        _pair(both, lambda row: row.server_cpu_seconds / (row.state_bytes / GiB), "{:.2f}".format),
        _pair(both, lambda row: row.above_state_bytes, lambda value: human_bytes(int(value))),
        _pair(both, lambda row: row.requests, "{:.0f}".format),
        _pair(both, _wire_bytes_per_byte, "{:.2f}".format),
        f"{waits:.2f}" if waits is not None and client != RAW else _NOTHING,
    )
    return dict(zip(COLUMNS, values, strict=True))


def _wire_bytes_per_byte(row: Row) -> float:
    return (row.sent_bytes if row.action == "save" else row.got_bytes) / row.state_bytes


def _against(rows: Sequence[Row], base: Sequence[Row], figure: Callable[[Row], float]) -> str:
    value, other = median(rows, figure), median(base, figure)
    if value is None:
        return "failed" if figure is wall else _NOTHING
    return f"{value:.2f} ({value / other:.1f} ×)" if other and rows != base else f"{value:.2f}"


def _pair(both: Sequence[Sequence[Row]], figure: Callable[[Row], float], told: Callable[[float], str]) -> str:
    values = [median(rows, figure) for rows in both]
    return ", ".join(told(value) if value is not None else _NOTHING for value in values)


def busy_table(results: Results) -> str:
    """Return the table of saves beside a busy loop, in the same process or another."""
    places: tuple[Beside, ...] = ("nothing", "process", "thread")
    saves = ("save", "again")
    bases = [results.select(BUSY, OURS, action, beside="process") for action in saves]
    rows = []
    for name, place in zip(("nothing", "another process", "a thread of the same process"), places, strict=True):
        found = [results.select(BUSY, OURS, action, beside=place) for action in saves]
        if any(found):
            rows.append((name, *(_against(one, base, wall) for one, base in zip(found, bases, strict=True))))
    titles = ("the loop runs in", "first save of a process, s (× beside another process)", "second save, s")
    return "A save beside a loop of pure Python that never waits.\n\n" + _table(titles, rows)


def training_table(results: Results) -> str:
    """Return the table of training on one core while saves are under way."""
    places: tuple[Beside, ...] = ("manager", "thread", "process")
    names = ("CheckpointManager (a thread)", "dcp.async_save, a thread", "dcp.async_save, a process")
    rows = []
    for name, place in zip(names, places, strict=True):
        found = results.select(TRAINING, OURS, "train", beside=place)
        lost = training_seconds_lost(found)
        if lost is not None:
            rows.append(
                (
                    name,
                    _one(found, lambda row: row.alone_steps_per_second, "{:.0f}"),
                    _one(found, lambda row: row.steps_per_second, "{:.0f}"),
                    _one(found, lambda row: row.wall_seconds / row.saves, "{:.2f}"),
                    f"{lost:.2f}",
                    _one(found, lambda row: row.first_blocked_seconds, "{:.2f}"),
                    _one(found, lambda row: row.blocked_seconds, "{:.2f}"),
                )
            )
    cpu = cpu_seconds_of_a_save(results)
    needed = f" The same save needs {cpu:.2f} s of CPU." if cpu is not None else ""
    titles = (
        "saved by",
        "steps/s alone",
        "steps/s during a save",
        "a save takes, s",
        "training lost by a save, s",
        "the first call blocks, s",
        "a later one, s",
    )
    return f"Training (matrix products on one thread) while saves run in the background.{needed}\n\n" + _table(
        titles, rows
    )


def _one(rows: Sequence[Row], figure: Callable[[Row], float], form: str) -> str:
    value = median(rows, figure)
    return form.format(value) if value is not None else _NOTHING


def tiny_table(results: Results) -> str:
    """Return the table of a state so small that only what each save costs is seen."""
    found = results.select(TINY, OURS, "background")
    figures = (_one(found, lambda row: row.later_cpu_seconds, "{:.3f}"), _one(found, _blocked_seconds, "{:.3f}"))
    told = "A later save of `CheckpointManager`, with its catalog and manifest; one rank."
    return f"{told}\n\n" + _table(("CPU of the client, s", "the call blocks, s"), [figures])


def _blocked_seconds(row: Row) -> float:
    return row.blocked_seconds


def resharding_table(results: Results) -> str:
    """Return the table of fetched bytes over needed bytes."""
    clients = dict.fromkeys(row.client for row in results.rows if row.section == RESHARDING)
    rows = []
    for client in clients:
        found = [results.select(RESHARDING, client, "load", ranks=ranks) for ranks in LOADED_BY_RANKS]
        rows.append((client, *(_one(one, _wire_bytes_per_byte, "{:.3f}") for one in found)))
    titles = ("bytes fetched / bytes needed", *(f"{SAVED_BY_RANKS} → {ranks} ranks" for ranks in LOADED_BY_RANKS))
    return "Sharded along dimension 0, counted by the server.\n\n" + _table(titles, rows)


def many_table(results: Results) -> str:
    """Return the table of a state of many small tensors, whose bytes cost nothing beside their number."""
    found = [row for row in results.rows if row.section == MANY]
    rows = []
    for client in dict.fromkeys(row.client for row in found):
        own, base = ([results.select(MANY, name, action) for action in ("save", "load")] for name in (client, OURS))
        rows.append(
            (
                client,
                *(_against(one, mine, wall) for one, mine in zip(own, base, strict=True)),
                _pair(own, lambda row: row.cpu_seconds, "{:.2f}".format),
                _pair(own, lambda row: row.above_state_bytes, lambda value: human_bytes(int(value))),
                _pair(own, lambda row: row.requests, "{:.0f}".format),
            )
        )
    titles = (
        "client",
        "save, s (× dcp_remote)",
        "load, s (× dcp_remote)",
        "CPU, s",
        "memory above the state",
        "requests",
    )
    told = (
        f"A state of {human_bytes(max((row.state_bytes for row in found), default=0))}, of 4 to 1,024 bytes a tensor."
    )
    return f"{told}\n\n{_table(titles, rows)}"


def failures(results: Results) -> str:
    """Return a list of the measurements that failed, with the reason; empty if none did."""
    told = (
        f"- {row.section}, {row.client}, {row.action}: `{last_line(row.failed)}`"
        for row in results.rows
        if row.failed is not None
    )
    return "\n".join(dict.fromkeys(told))


def last_line(failure: str) -> str:
    """Return the last line of a traceback, which names the error."""
    return failure.strip().rpartition("\n")[2][:_FAILURE_CHARACTERS_MAX].replace("`", "'")


def scale_table(runs: Sequence[dict[str, Any]]) -> str:
    """Return the table of what many ranks ask the key-value store of their job."""
    told = (
        "Processes of one machine, each a rank, and a TCPStore (`make scale`; docs/scale.md). In each cell: operations "
        "of all ranks at the store; in brackets, those for a rank, but for looks in vain and its heartbeats; seconds, "
        "in which all processes share the cores named above."
    )
    titles = ("", *(f"{run['ranks']} ranks, {run['hosts']} hosts" for run in runs))
    rows = []
    for phase in runs[0]["phases"]:
        found = [run["phases"][phase] for run in runs]
        cells = [
            f"{one['operations']:,} ({one['without_looks_per_rank']:.1f}), {one['seconds']:.2f} s" for one in found
        ]
        rows.append((phase, *cells))
    return f"{told}\n\n" + _table(titles, rows)


def storm_table(runs: Sequence[dict[str, Any]]) -> str:
    """Return the table of what ranks that begin at once send to a store that answers 503 above a rate."""
    told = (
        "Ranks that all begin in one second, each a store with its throttle, and a server that answers 503 above S3's "
        "rates (3,500 PUTs, 5,500 GETs a second; one prefix), scaled as the ranks are (`make storm`). In each cell: "
        "requests refused for each that is answered; those sent in the busiest second, as a multiple of the rate; "
        "seconds, and in brackets those that the rate alone takes. None failed."
    )
    titles = ("", *(f"{one['job_ranks']:,} ranks, as {one['ranks']} of {one['requests']} requests" for one in runs))
    rows = []
    for phase in runs[0]["phases"]:
        found = [run["phases"][phase] for run in runs]
        cells = [
            f"{one['refused_per_answered']:.1f}, {one['peak_per_second'] / one['rate']:.0f} times, "
            f"{one['seconds']:.0f} s ({one['ideal_seconds']:.0f} s)"
            for one in found
        ]
        rows.append((phase, *cells))
    return f"{told}\n\n" + _table(titles, rows)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
