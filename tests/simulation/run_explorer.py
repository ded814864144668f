"""All interleavings of the requests of a few actors on one run, with the functions that the package decides by.

An actor is a generator of requests to the store. From each state, each actor's next request is carried out: its answer
arrives, or, for a swap, is lost, or the swap itself is late and carried out at any time after. Every state is checked,
so that any actor may as well have stopped there. Invariants: every object that a live checkpoint names exists;
no fenced job commits; a save that was reported as committed is or was live; a name belongs to one checkpoint; a pinned
checkpoint stays unless it is retired or overwritten.
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

# Attempts of a swap before its actor gives up.
TRIES = 2


# ---- the store: one catalog and a set of names


@dataclass(frozen=True, slots=True)
class Read:
    """Request of the catalog."""


@dataclass(frozen=True, slots=True)
class List:
    """Request of the names of all objects."""


@dataclass(frozen=True, slots=True)
class Put:
    """Request to write an object."""

    name: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Request to delete an object."""

    name: str


@dataclass(frozen=True, slots=True)
class Swap:
    """Request to replace the catalog of this revision; no two catalogs of a history have the same revision."""

    revision: int
    catalog: Catalog


@dataclass(frozen=True, slots=True)
class World:
    """Contents of the store. An object is "revision/who"; a manifest lists its objects' names behind a colon."""

    catalog: Catalog
    objects: frozenset[str]


Request: TypeAlias = Read | List | Put | Delete | Swap
Answer: TypeAlias = Catalog | frozenset[str] | bool | None  # None: the answer to a swap was lost, or is late
Actor: TypeAlias = Generator[Request, Answer, "Told"]


@dataclass(frozen=True, slots=True)
class Told:
    """Outcome of an actor."""

    outcome: str  # "done", the name of the class of the error, or the reason for giving up
    catalog: Catalog | None = None  # last catalog that the actor saw, if its outcome is "done"
    save_id: str | None = None  # save_id that was reported as committed


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
    """Return a manifest's own name, and the names in it."""
    return frozenset({manifest, *filter(None, manifest.partition(":")[2].split("+"))})


@lru_cache(maxsize=100_000)
def named(catalog: Catalog) -> frozenset[str]:
    return frozenset[str]().union(*(named_by(entry.manifest) for entry in catalog.entries))


def began_at(name: str) -> int:
    return int(name.partition("/")[0])


# ---- the actors


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules that the actors decide by, so that a test can leave one out."""

    committed: Callable[[Catalog, Attempt], Catalog | None] = rules.add_entry
    retired: Callable[[Catalog, Sequence[str]], Catalog | None] = rules.retire_entries
    thinned: Callable[..., Catalog | None] = rules.thin_entry
    raised: Callable[[Catalog, int], Catalog | None] = rules.raise_floor
    delete_first: bool = False
    ignore_others: bool = False
    take_silence_for_success: bool = False
    tries: int = TRIES


def swapping(by: Rules, change: Change) -> Actor:
    """Swap the catalog as `catalog_store.swap` does."""
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
    who: str,  # save_id of the attempt
    *,
    token: int = 1,  # token of the job
    base: int | None = None,  # step whose shards are reused
    overwrite: bool = False,  # whether a live checkpoint of this step may be replaced
    again: bool = False,  # whether an attempt before this one did not commit
    abandons: int | None = None,  # step that the job resumed from; see `Attempt`
    names: tuple[str, ...] = (),
    attempts: int = 1,  # most attempts
) -> Actor:
    """Save into the run, again if a new attempt is asked for."""
    if again and (yield from swapping(by, rules.raise_revision)).outcome != "done":
        return Told("unknown")
    seen = yield Read()
    assert isinstance(seen, Catalog)
    if seen.token != token:
        return Told("FencedError")
    there, source = seen.entry_at(step), None if base is None else seen.entry_at(base)
    if there is not None and abandons is None and not overwrite and not there.abandoned:
        return Told("exists")
    if there is not None and not overwrite and not there.is_replaceable_by(names):
        return Told("exists")
    shard = f"{seen.revision}/{who}"
    yield Put(shard)
    reused = [] if source is None else [key for key in named_by(source.manifest) if ":" not in key]
    manifest = manifest_of(seen.revision, who, [shard, *reused])
    yield Put(manifest)
    entry = Entry(step, who, manifest, 1, "", token, began_revision=seen.revision, names=names)
    attempt = Attempt(
        entry,
        run_id=RUN,
        before=there.save_id if there is not None and overwrite else None,
        reused=None if source is None else (source.save_id, source.manifest),
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
    """Retire the live checkpoint of a step, then delete what no other live checkpoint names."""
    seen = yield Read()
    assert isinstance(seen, Catalog)
    entry = seen.entry_at(step)
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
    """Leave out one shard, "0/opt", of the live checkpoint of a step."""
    seen = yield Read()
    assert isinstance(seen, Catalog)
    entry = seen.entry_at(step)
    if entry is None:
        return Told("nothing")
    old = named_by(entry.manifest)
    manifest = manifest_of(seen.revision, who, [one for one in old if ":" not in one and one != "0/opt"])
    yield Put(manifest)

    def change(now: Catalog) -> Catalog | None:
        made = replace(entry, manifest=manifest, began_revision=seen.revision, thinned=("optim",), size_bytes=1)
        return by.thinned(now, made, seen=entry.manifest)

    told = yield from swapping(by, change)
    if told.catalog is not None:
        yield from deleting(old - named(told.catalog))
    return told


def gc(by: Rules) -> Actor:
    """Delete orphans, under a raised floor."""
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
    """Pin the live checkpoint of a step."""
    return (yield from swapping(by, lambda now: rules.pin_entry(now, step, pin=True)))


def fence(by: Rules) -> Actor:
    return (yield from swapping(by, rules.take_fence))


def roll_back(by: Rules, to: int, *, steps: Sequence[int], who: str) -> Actor:
    """Start a new job that restored a step: take the fence, and save these steps."""
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


# ---- the explorer


@dataclass(frozen=True, slots=True)
class State:
    """State of the store and all actors."""

    world: World
    places: tuple[int, ...]  # number of each actor's place, as the explorer counts them
    sent: frozenset[Swap]  # swaps that were sent and not yet carried out
    lived: frozenset[str]  # save_ids that were ever live
    fenced: str | None = None  # save_id that a fenced job committed
    unpinned: str | None = None  # save_id of a pinned checkpoint that was lost


@dataclass(frozen=True, slots=True)
class Place:
    """Position of an actor, given by the answers that it got: its next request, or its outcome."""

    heard: tuple[Answer, ...]
    next: Request | Told


class Explorer:
    """Explorer of all states that a scene can reach."""

    # Each call of a function makes its actor anew. `late`: a swap may be carried out after its actor went on.
    def __init__(self, actors: Sequence[Callable[[], Actor]], *, late: bool) -> None:
        self._actors, self._late = actors, late
        self._places = [Place((), replay(actor(), ())) for actor in actors]
        self._numbers: dict[tuple[int, int, Answer], int] = {}

    def explore(self, world: World) -> tuple[str | None, int]:
        """Return the broken invariant of some state (None if there is none), and the number of states."""
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
        """Return the outcomes of actors so far, in any order."""
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
        for swap in state.sent:
            carried = carried_out(state, swap)
            if carried is not None:
                yield carried
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
                    yield replace(state, places=unheard, sent=state.sent | {request})

    def _moved(self, state: State, actor: int, answer: Answer) -> tuple[int, ...]:
        """Return the places of all actors after one actor got an answer."""
        places = state.places
        key = (actor, places[actor], answer)
        number = self._numbers.get(key)
        if number is None:
            heard = (*self._places[places[actor]].heard, answer)
            number = self._numbers[key] = len(self._places)
            self._places.append(Place(heard, replay(self._actors[actor](), heard)))
        return (*places[:actor], number, *places[actor + 1 :])


def carried_out(state: State, swap: Swap) -> State | None:
    """Return the state after a swap; None if the catalog's revision is another than the swap's."""
    before = state.world.catalog
    world, done = answered(state.world, swap)
    if done is not True:
        return None
    added = [entry for entry in world.catalog.entries if not before.holds(entry.save_id)]
    return replace(
        state,
        world=world,
        sent=frozenset(one for one in state.sent if one.revision >= world.catalog.revision),
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
