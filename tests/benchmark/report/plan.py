"""Plan of the benchmark: sections of one server each, with groups of steps that follow each other; no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from dcp_remote.common.units import GiB
from tests.benchmark.server.shape import Shape

OURS = "dcp_remote"
RAW = "raw socket"
S3FS = "FsspecWriter + s3fs"
CONNECTOR = "s3torchconnector"
BOTO3 = "torch.save + boto3"
BEST = ", best"

# Peers whose better one is the measure of ours: both save and load by torch's DCP, at any number of ranks.
PEERS = (f"{S3FS}{BEST}", f"{CONNECTOR}{BEST}")

# "again" is the second save of a process, whose connections and latencies are known; "background" is saves by
# `CheckpointManager`, which returns early; "overlapped" is the same after a call of `before_update()`, so that `save`
# returns while the state is being copied; "train" is training while a save is under way.
Action: TypeAlias = Literal["save", "load", "again", "background", "overlapped", "train"]

# For a save: the place of a busy loop. For training: the place of the save, a thread of the training process or a
# process beside it; "manager" is the thread of `CheckpointManager`.
Beside: TypeAlias = Literal["nothing", "thread", "process", "manager"]


@dataclass(frozen=True, slots=True)
class Step:
    """One measurement, in fresh processes."""

    action: Action
    ranks: int = 1
    beside: Beside = "nothing"


@dataclass(frozen=True, slots=True)
class Group:
    """Steps of one client that follow each other on an empty server: a load reads what the save before it wrote."""

    client: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """Comparison of clients on one server."""

    name: str
    state: str  # one of `state.SHAPES`
    groups: tuple[Group, ...]  # interleaved: each round runs each of them once, and begins with another
    rounds: int = 5
    tls: bool = False
    server: Shape = Shape()  # noqa: RUF009  # frozen
    ceph: bool = False  # whether Ceph's gateway is the server instead, a new one for each group
    server_bytes: int = 3 * GiB  # space on the server for what is saved, in bytes

    def turns(self) -> Iterator[tuple[int, Group]]:
        """Yield the number of the round and the group, in order."""
        for number in range(self.rounds):
            first = number % len(self.groups)
            for group in (*self.groups[first:], *self.groups[:first]):
                yield number, group


HTTP, TLS = "http", "TLS"
FAR, REFUSING = "100 ms, 50 MB/s a connection", "5 % of requests 503"
DEFAULTS, CEPH, BUSY, TRAINING, RESHARDING, LARGEST = "defaults", "Ceph", "busy", "training", "resharding", "largest"
MANY, TINY = "many small tensors", "1 MiB"

# Numbers of ranks that save and load a state.
SAVED_BY_RANKS, LOADED_BY_RANKS = 8, (1, 2, 3, 5)


_SPINNING: tuple[Beside, ...] = ("thread", "process", "nothing")
_EXECUTORS: tuple[Beside, ...] = ("manager", "thread", "process")

# There are four saves in the background, none of which is deleted.
_SEVERAL_SAVES_BYTES = 6 * GiB


def _both(client: str, ranks: int) -> Group:
    return Group(client, (Step("save", ranks), Step("load", ranks)))


def _transfers(several: Sequence[int]) -> tuple[Group, ...]:
    """Return groups of all clients on one rank, and on several ranks of those that load at any number of ranks."""
    alone = tuple(_both(client, 1) for client in (RAW, OURS, *PEERS, f"{BOTO3}{BEST}"))
    return alone + tuple(_both(client, ranks) for ranks in several for client in (OURS, *PEERS))


_SECTIONS = (
    Section(
        HTTP,
        "large",
        (*_transfers((2, 4)), Group(OURS, (Step("background"),)), Group(OURS, (Step("overlapped"),))),
        server_bytes=_SEVERAL_SAVES_BYTES,
    ),
    Section(TLS, "large", _transfers((2, 4)), tls=True),
    Section(
        FAR,
        "medium",
        (*(_both(client, 1) for client in (OURS, *PEERS)), Group(OURS, (Step("background"),))),
        rounds=3,  # each waits equally long for the server
        server=Shape(latency_ms=100, bandwidth_bytes_per_second=50_000_000),
    ),
    Section(
        REFUSING,
        "medium",
        tuple(_both(client, 1) for client in (OURS, *PEERS)),
        server=Shape(slow_down_share=0.05),
    ),
    Section(DEFAULTS, "medium", tuple(_both(client, 1) for client in (OURS, S3FS, CONNECTOR, BOTO3)), rounds=3),
    Section(
        CEPH, "medium", tuple(_both(client, 1) for client in (OURS, *PEERS, f"{BOTO3}{BEST}")), rounds=3, ceph=True
    ),
    Section(
        BUSY,
        "large",
        tuple(Group(OURS, (Step("save", beside=one), Step("again", beside=one))) for one in _SPINNING),
        server_bytes=_SEVERAL_SAVES_BYTES,
    ),
    Section(
        TRAINING,
        "large",
        tuple(Group(OURS, (Step("train", beside=one),)) for one in _EXECUTORS),
        rounds=3,  # of several saves each
        server_bytes=_SEVERAL_SAVES_BYTES,
    ),
    Section(
        RESHARDING,
        "medium",
        tuple(
            Group(client, (Step("save", SAVED_BY_RANKS), *(Step("load", ranks) for ranks in LOADED_BY_RANKS)))
            for client in (OURS, *PEERS)
        ),
        rounds=1,  # the counts are the same in each
    ),
    Section(LARGEST, "largest", (_both(OURS, 1),), rounds=2, server_bytes=5 * GiB),
    Section(MANY, "many", tuple(_both(client, 1) for client in (OURS, *PEERS)), rounds=3),
    Section(TINY, "tiny", (Group(OURS, (Step("background"),)),)),
)

FULL = {section.name: section for section in _SECTIONS}


def _quick(section: Section) -> Section:
    """Return one round on a smaller state, without steps of more than two processes."""
    groups = tuple(
        replace(group, steps=steps)
        for group in section.groups
        if (steps := tuple(step for step in group.steps if step.ranks in (1, 2)))
    )
    state = {"many": "fewer", "tiny": "tiny"}.get(section.state, "medium")
    return replace(section, state=state, groups=groups, rounds=1, server_bytes=3 * GiB)


QUICK = {name: _quick(section) for name, section in FULL.items() if name not in {LARGEST, RESHARDING, CEPH}}
