"""Every interleaving of the requests of a few actors on one run, with the functions that the package decides by.

An actor is a generator of requests to the store. From each state each actor's next request is carried out: its answer
arrives, or, of a swap, is lost, or the swap itself is late and carried out at any time after. Every state is looked at,
so that any actor may as well have stopped there for ever. What must hold: every object that a live checkpoint names
exists; no fenced job commits; whoever is told "committed" is or was live; a name belongs to one checkpoint; what is
pinned stays, where nobody retires or overwrites it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TypeAlias

from dcp_remote.errors import DcpRemoteError
from dcp_remote.format import catalog as rules
from dcp_remote.format.catalog import Attempt, BeginAgainError, Catalog, Entry
from dcp_remote.run.catalog_store import Change

RUN = "run"

# How often an actor reads again before it gives up.
TRIES = 2


# ---- the store: one catalog and a set of names ----


@dataclass(frozen=True, slots=True)
class Read:
    """Asks for the catalog."""


@dataclass(frozen=True, slots=True)
class List:
    """Asks for the names of all objects."""


@dataclass(frozen=True, slots=True)
class Put:
    """Writes an object."""

    name: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletes an object."""

    name: str


@dataclass(frozen=True, slots=True)
class Swap:
    """Replaces the catalog of this revision; no two catalogs that ever lay there have the same."""

    revision: int
    catalog: Catalog


@dataclass(frozen=True, slots=True)
class World:
    """What the store holds. An object is "revision/who"; a manifest spells out what it names behind a colon."""

    catalog: Catalog
    objects: frozenset[str]


Request: TypeAlias = Read | List | Put | Delete | Swap
Answer: TypeAlias = Catalog | frozenset[str] | bool | None  # None: the answer to a swap was lost, or it is on its way
Actor: TypeAlias = Generator[Request, Answer, "Told"]


@dataclass(frozen=True, slots=True)
class Told:
    """How an actor ended.

    Attributes:
        outcome: "done", or the class of what refused it, or why it gave up.
        catalog: The catalog that it ended with, if it is done.
        save_id: What it says is committed.
    """

    outcome: str
    catalog: Catalog | None = None
    save_id: str | None = None


def answered(world: World, request: Request) -> tuple[World, Answer]:
    match request:
        case Read():
            return world, world.catalog
        case List():
            return world, world.objects
        case Put(name):
            return replace(world, objects=world.objects | {name}), True
        case Delete(name):
            return replace(world, objects=world.objects - {name}), True
        case Swap(revision, catalog) if revision == world.catalog.revision:
            return replace(world, catalog=catalog), True
        case Swap():
            return world, False


def manifest_of(began: int, who: str, names: Sequence[str]) -> str:
    return f"{began}/{who}:{'+'.join(sorted(names))}"


@cache
def named_by(manifest: str) -> frozenset[str]:
    """A manifest's own name, and those in it."""
    return frozenset({manifest, *filter(None, manifest.partition(":")[2].split("+"))})


@lru_cache(maxsize=100_000)
def named(catalog: Catalog) -> frozenset[str]:
    return frozenset[str]().union(*(named_by(entry.manifest) for entry in catalog.entries))


def began_at(name: str) -> int:
    return int(name.partition("/")[0])


# ---- the actors ----


@dataclass(frozen=True, slots=True)
class Rules:
    """What the actors decide by, so that a test can leave something out."""

    committed: Callable[[Catalog, Attempt], Catalog | None] = rules.committed
    retired: Callable[[Catalog, Sequence[str]], Catalog | None] = rules.retired
    thinned: Callable[..., Catalog | None] = rules.thinned
    raised: Callable[[Catalog, int], Catalog | None] = rules.raised
    delete_first: bool = False
    ignore_others: bool = False
    take_silence_for_success: bool = False
    tries: int = TRIES


def swapping(by: Rules, change: Change) -> Actor:
    """What `catalog_store.swap` does."""
    for _ in range(by.tries):
        seen = yield Read()
        assert isinstance(seen, Catalog)
        try:
            wanted = change(seen)
        except DcpRemoteError as error:
            return Told(type(error).__name__)
        if wanted is None:
            return Told("done", seen)
        answer = yield Swap(seen.revision, wanted)
        if answer is True or (answer is None and by.take_silence_for_success):
            return Told("done", wanted)
    return Told("unknown")


def save(
    by: Rules,
    step: int,
    who: str,
    *,
    token: int = 1,
    base: int | None = None,
    overwrite: bool = False,
    again: bool = False,
    abandons: int | None = None,
    names: tuple[str, ...] = (),
    attempts: int = 1,
) -> Actor:
    """Save into the run, once more if it is to begin again.

    Args:
        by: The rules.
        step: To save.
        who: The save_id.
        token: Of the job.
        base: Step whose shards are named again.
        overwrite: What is live at this step may be replaced.
        again: An attempt before this one did not commit.
        abandons: See `Attempt`.
        names: Of the checkpoint.
        attempts: How often to begin.
    """
    if again and (yield from swapping(by, rules.refreshed)).outcome != "done":
        return Told("unknown")
    seen = yield Read()
    assert isinstance(seen, Catalog)
    if seen.token != token:
        return Told("FencedError")
    there, borrowed = seen.at(step), None if base is None else seen.at(base)
    if there is not None and abandons is None and not overwrite and not there.abandoned:
        return Told("exists")
    if there is not None and not overwrite and not there.is_replaceable_by(names):
        return Told("exists")
    shard = f"{seen.revision}/{who}"
    yield Put(shard)
    borrows = [] if borrowed is None else [one for one in named_by(borrowed.manifest) if ":" not in one]
    manifest = manifest_of(seen.revision, who, [shard, *borrows])
    yield Put(manifest)
    entry = Entry(step, who, manifest, 1, "", token, began=seen.revision, names=names)
    attempt = Attempt(
        entry,
        run_id=RUN,
        before=there.save_id if there is not None and overwrite else None,
        borrowed=None if borrowed is None else (borrowed.save_id, borrowed.manifest),
        abandons=abandons,
    )
    told = yield from swapping(by, lambda now: by.committed(now, attempt))
    if told.outcome == BeginAgainError.__name__ and attempts > 1:
        return (
            yield from save(
                by,
                step,
                f"{who}'",
                token=token,
                base=base,
                overwrite=overwrite,
                again=True,
                abandons=abandons,
                names=names,
                attempts=attempts - 1,
            )
        )
    return replace(told, save_id=who if told.outcome == "done" else None)


def retire(by: Rules, step: int) -> Actor:
    """Retire what is live at a step, then delete what it named and no live checkpoint names."""
    seen = yield Read()
    assert isinstance(seen, Catalog)
    entry = seen.at(step)
    if entry is None:
        return Told("nothing")
    gone = named_by(entry.manifest)
    if by.delete_first:
        yield from deleting(gone)
    told = yield from swapping(by, lambda now: by.retired(now, [entry.save_id]))
    if told.catalog is not None:
        yield from deleting(gone if by.ignore_others else gone - named(told.catalog))
    return told


def thin(by: Rules, step: int, who: str) -> Actor:
    """Leave out one shard, "0/opt", of what is live at a step."""
    seen = yield Read()
    assert isinstance(seen, Catalog)
    entry = seen.at(step)
    if entry is None:
        return Told("nothing")
    old = named_by(entry.manifest)
    manifest = manifest_of(seen.revision, who, [one for one in old if ":" not in one and one != "0/opt"])
    yield Put(manifest)

    def change(now: Catalog) -> Catalog | None:
        return by.thinned(
            now,
            entry.save_id,
            began=seen.revision,
            seen=entry.manifest,
            manifest=manifest,
            keys=["optim"],
            size_bytes=1,
        )

    told = yield from swapping(by, change)
    if told.catalog is not None:
        yield from deleting(old - named(told.catalog))
    return told


def gc(by: Rules) -> Actor:
    """Delete what no live checkpoint names, under a floor."""
    objects, seen = (yield List()), (yield Read())
    assert isinstance(objects, frozenset)
    assert isinstance(seen, Catalog)
    orphans = objects - named(seen)
    if not orphans:
        return Told("nothing")
    floor = max(map(began_at, orphans)) + 1
    told = yield from swapping(by, lambda now: by.raised(now, floor))
    if told.catalog is not None:
        yield from deleting(orphans - named(told.catalog))
    return told


def pin(by: Rules, step: int) -> Actor:
    """Pin what is live at a step."""
    return (yield from swapping(by, lambda now: rules.pinned(now, step, pin=True)))


def fence(by: Rules) -> Actor:
    return (yield from swapping(by, rules.fenced))


def roll_back(by: Rules, to: int, *, steps: Sequence[int], who: str) -> Actor:
    """A new job that restored a step: it takes the fence, and saves these steps."""
    told = yield from fence(by)
    if told.catalog is None:
        return told
    token = told.catalog.token
    for number, step in enumerate(steps):
        told = yield from save(by, step, f"{who}{step}", token=token, abandons=None if number else to)
        if told.outcome != "done":
            return told
    return told


def deleting(names: frozenset[str]) -> Generator[Request, Answer, None]:
    for name in sorted(names):
        yield Delete(name)


# ---- the explorer ----


@dataclass(frozen=True, slots=True)
class State:
    """All that the future depends on.

    Attributes:
        world: The store.
        places: Of each actor, as the explorer numbers them.
        flying: Swaps that are on their way.
        lived: Every save_id that was ever live.
        fenced: The save_id that a fenced job committed.
        unpinned: The save_id of what was pinned and went.
    """

    world: World
    places: tuple[int, ...]
    flying: frozenset[Swap]
    lived: frozenset[str]
    fenced: str | None = None
    unpinned: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor is, which the answers that it got decide: what it asks next, or was told at its end."""

    heard: tuple[Answer, ...]
    next: Request | Told


class Explorer:
    """All states that a scene can come into.

    Args:
        actors: Who acts; each call begins anew.
        late: Whether a swap may be carried out after its actor went on.
    """

    def __init__(self, actors: Sequence[Callable[[], Actor]], *, late: bool) -> None:
        self._actors, self._late = actors, late
        self._places = [Place((), replay(actor(), ())) for actor in actors]
        self._numbers: dict[tuple[int, int, Answer], int] = {}

    def explore(self, world: World) -> tuple[str | None, int]:
        """What is broken in some state, or None; and how many states there are."""
        lived = frozenset(entry.save_id for entry in world.catalog.entries)
        start = State(world, tuple(range(len(self._actors))), frozenset(), lived)
        found, todo = {start}, [start]
        while todo:
            state = todo.pop()
            broken = self._broken(state)
            if broken is not None:
                return broken, len(found)
            after = [one for one in self._following(state) if one not in found]
            found.update(after)
            todo += after
        return None, len(found)

    def ends(self) -> list[Told]:
        """How actors ended, in any order so far."""
        return [place.next for place in self._places if isinstance(place.next, Told)]

    def _broken(self, state: State) -> str | None:
        catalog, objects = state.world.catalog, state.world.objects
        if not named(catalog) <= objects:
            return f"missing: {sorted(named(catalog) - objects)}"
        if state.fenced is not None:
            return f"a fenced job committed: {state.fenced}"
        if state.unpinned is not None:
            return f"what is pinned went: {state.unpinned}"
        names = [name for entry in catalog.entries for name in entry.names]
        if len(set(names)) != len(names):
            return f"a name twice: {names}"
        ends = [place.next for place in map(self._places.__getitem__, state.places) if isinstance(place.next, Told)]
        wrong = [end.save_id for end in ends if end.save_id is not None and end.save_id not in state.lived]
        return f"told committed, never was: {wrong}" if wrong else None

    def _following(self, state: State) -> Iterator[State]:
        for swap in state.flying:
            landed = carried_out(state, swap)
            if landed is not None:
                yield landed
        for actor, place in enumerate(state.places):
            request = self._places[place].next
            if isinstance(request, Told):
                continue
            if not isinstance(request, Swap):
                world, answer = answered(state.world, request)
                yield replace(state, world=world, places=self._moved(state, actor, answer))
                continue
            after = carried_out(state, request)
            yield replace(after or state, places=self._moved(state, actor, after is not None))
            if after is not None:
                unheard = self._moved(state, actor, None)
                yield replace(after, places=unheard)
                if self._late:
                    yield replace(state, places=unheard, flying=state.flying | {request})

    def _moved(self, state: State, actor: int, answer: Answer) -> tuple[int, ...]:
        """Where all are when an actor has got an answer."""
        places = state.places
        key = (actor, places[actor], answer)
        number = self._numbers.get(key)
        if number is None:
            heard = (*self._places[places[actor]].heard, answer)
            number = self._numbers[key] = len(self._places)
            self._places.append(Place(heard, replay(self._actors[actor](), heard)))
        return (*places[:actor], number, *places[actor + 1 :])


def carried_out(state: State, swap: Swap) -> State | None:
    """After a swap; None if the catalog is another than it was asked for."""
    before = state.world.catalog
    world, done = answered(state.world, swap)
    if done is not True:
        return None
    added = [entry for entry in world.catalog.entries if not before.holds(entry.save_id)]
    return replace(
        state,
        world=world,
        flying=frozenset(one for one in state.flying if one.revision >= world.catalog.revision),
        lived=state.lived | {entry.save_id for entry in added},
        fenced=next((entry.save_id for entry in added if entry.token != before.token), state.fenced),
        unpinned=next(
            (one.save_id for one in before.entries if one.pinned and not world.catalog.holds(one.save_id)),
            state.unpinned,
        ),
    )


def replay(actor: Actor, heard: Sequence[Answer]) -> Request | Told:
    try:
        request = next(actor)
        for answer in heard:
            request = actor.send(answer)
    except StopIteration as end:
        told = end.value
        assert isinstance(told, Told)
        return told
    return request
