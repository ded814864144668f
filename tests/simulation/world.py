"""Several programs on one store, scheduled request by request; a seed decides the order and every fault.

An actor is ordinary synchronous code in a thread of its own, with a store that stops it at every request until the
scheduler lets it go on: exactly one actor runs at a time, so that a history is a function of its seed. Only the
scheduler advances time: nothing sleeps, and no clock of this machine is read. This module does not know what the actors
do; `jobs.py` does.
"""

from __future__ import annotations

import random
import secrets
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, tzinfo
from functools import lru_cache
from typing import Any, Literal, Protocol, Self, TypeAlias, TypeVar

import pytest

from dcp_remote.common import deadline, threads
from dcp_remote.common.arrays import Buffer
from dcp_remote.common.deadline import Clock, Deadline
from dcp_remote.errors import (
    ConditionFailedError,
    DcpRemoteError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.format import catalog_json, manifest_json
from dcp_remote.loading import downloads
from dcp_remote.run import job, recovery
from dcp_remote.saving import uploads
from dcp_remote.storage import MemoryStore, ObjectStore
from dcp_remote.storage.base import Condition, Version
from dcp_remote.storage.wrapper import Request, WrappedStore

_Answer = TypeVar("_Answer")
_T = TypeVar("_T")

# Outcome of a request.
Fate: TypeAlias = Literal[
    "answered",
    "lost",  # never carried out
    "unheard",  # carried out; the answer is lost
    "late",  # the answer is lost, and the write is carried out later
    "409",  # another conditional write was under way; nothing was written
    "412 of its own",  # carried out, repeated by a client that lost the answer, and refused then
    "in part",  # of several keys some are deleted
    "503",
    "403",
    "stops before",  # the actor stops permanently, and nothing was sent
    "stops after",  # the request was carried out
    "stops, late",  # the request is carried out later
]

# Events of other actors that an actor may wait for: requests; puts of new objects; swaps and deletions.
What: TypeAlias = Literal["requests", "puts", "changes"]
_HELD_FOR: dict[What, list[int]] = {"requests": [3, 10], "puts": [1, 2, 3, 4, 6], "changes": [1, 1, 2, 3]}

# Epoch of the actors' clocks; the store's clock has another.
_EPOCH_SECONDS = 1_800_000_000.0


class StoppedError(BaseException):
    """Raised in the thread of an actor that stops permanently: at its next request, and at each later one."""


class BrokenError(AssertionError):
    """An invariant of the simulated run is broken."""


class Observer(Protocol):
    """Observer of every request that is carried out, at that moment."""

    def wrote(self, key: str, data: bytes, before: bytes | None, doing: object) -> str:
        """Check an object that was put, and return a short text about it. Raises `BrokenError`."""
        ...

    def deleted(self, keys: Sequence[str], doing: object) -> None:
        """Check objects that were deleted, as far as they existed. Raises `BrokenError`."""
        ...


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Probability of each fault, per request."""

    lost: float = 0.0  # probability that a request, or its answer, is lost
    late: float = 0.0  # probability that a write is carried out later
    refused: float = 0.0  # probability that a conditional write is refused, carried out or not
    stops: float = 0.0  # probability that an actor stops permanently
    # Probability that an actor is held up before its request, or by an awaited answer, while others go on.
    stalls: float = 0.0
    outage: float = 0.0  # probability that requests of one actor or of all begin to fail, for a while
    swaps: float = 1.0  # factor on all of these for conditional replacements of an object
    stay: float = 0.5  # probability that the same actor goes on
    reweigh: float = 0.1  # probability that actors are given new weights
    latency_seconds: float = 0.1  # mean latency of a request, in seconds
    rest_seconds: float = 10.0  # mean pause between two operations of an actor, in seconds

    @classmethod
    def drawn(cls, rng: random.Random) -> Self:
        """Return the rates of one history: some have no fault of a kind, some many."""
        latency_seconds = rng.choice([0.05, 0.5, 1.0])

        def some(most: float) -> float:
            return rng.choice([0.0, 0.2, 1.0]) * most

        return cls(
            lost=some(0.08),
            late=some(0.06),
            refused=some(0.06),
            stops=some(0.01),
            stalls=some(0.1),
            outage=some(0.01),
            swaps=rng.choice([1.0, 3.0, 6.0]),
            stay=rng.choice([0.0, 0.4, 0.8]),
            reweigh=rng.choice([0.02, 0.1, 0.5]),
            latency_seconds=latency_seconds,
            rest_seconds=latency_seconds * rng.choice([1.0, 5.0, 20.0]),
        )


class Actor:
    """A program on a machine of its own."""

    def __init__(self, world: World, name: str, play: Callable[[Actor], None], *, begins_seconds: float) -> None:
        self.world, self.name = world, name
        self.rng = random.Random(f"{world.seed} {name}")  # a text is hashed the same in every process
        self.doing: object = None  # present operation, for the observer
        self.store: ObjectStore = Gate(world.store, self)
        self.may_delete = True
        self.wakes_seconds = begins_seconds
        self.weight = 1.0
        # The actor goes on after so many requests, puts or changes of all actors.
        self.held_for: What = "requests"
        self.held_until = 0
        # Numbers of its requests, from 1, at which the actor waits until others have changed something.
        self.gives_way_at: frozenset[int] = frozenset()
        self.requests = 0
        self.go = threading.Lock()
        self.go.acquire()
        self.stopped = self.ended = False
        # Most clocks are right to the second, some are wrong by hours, and their rates differ slightly.
        self._skew_seconds = self.rng.choice([0.0, self.rng.uniform(-2, 2), self.rng.uniform(-10_000, 10_000)])
        self._speed = self.rng.choice([1.0, self.rng.uniform(0.98, 1.02)])
        self._play = play
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def clock(self) -> float:
        """Return seconds on a monotonic clock."""
        return self.world.now_seconds * self._speed

    def time(self) -> float:
        """Return seconds since 1970, by this machine's clock."""
        return _EPOCH_SECONDS + self._skew_seconds + self.clock()

    def sleep(self, seconds: float) -> None:
        """Let time pass while others go on."""
        self.world.sleep(self, seconds)

    def deadline(self, seconds: float) -> Deadline:
        """Return a deadline by this actor's clock."""
        return Deadline(seconds, self.clock)

    def say(self, what: str) -> None:
        """Add a line to the history."""
        self.world.say(self.name, what)

    def _run(self) -> None:
        self.go.acquire()
        _here.actor = self
        try:
            if not self.stopped:
                self._play(self)
        except StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001  # raised again by `World.run`
            self.world.broken = self.world.broken or error
        self.ended = True
        self.world.hand_over()


class Gate(WrappedStore):
    """Store of an actor: each of its requests waits here until the scheduler lets it go on."""

    def __init__(self, store: ObjectStore, actor: Actor) -> None:
        super().__init__(store)
        self._actor = actor

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        """Put an object; copies its buffers, since the put may be carried out late."""
        data = b"".join(buffers)
        sent = Sent(self._actor, self._actor.doing, self._named("put", key, size_bytes=len(data)), data, condition)
        return self._actor.world.request(sent, lambda: self._store.put(key, [data], condition=condition))

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        keys = tuple(keys)
        sent = Sent(self._actor, self._actor.doing, self._named("delete", *keys))
        return self._actor.world.request(sent, lambda: self._store.delete(keys))

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        return self._actor.world.request(Sent(self._actor, self._actor.doing, request), send)


@dataclass(frozen=True, slots=True)
class Sent:
    """A request, its actor and operation; for a put also its bytes and condition."""

    actor: Actor
    doing: object
    request: Request
    data: bytes = b""
    condition: Condition = "any"

    @property
    def writes(self) -> bool:
        return self.request.verb in ("put", "delete")

    def __str__(self) -> str:
        """Return the request as it stands in the history."""
        keys = " ".join(self.request.keys)
        if self.condition == "any":
            return f"{self.request.verb} {keys}"
        version = self.condition if isinstance(self.condition, str) else self.condition.etag
        return f"put {keys} if {version}"


class World:
    """A store, actors and time; the seed decides everything."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.rates = FaultRates.drawn(self.rng)
        self.now_seconds = 0.0
        ahead_seconds = _EPOCH_SECONDS + self.rng.choice([0.0, self.rng.uniform(-10_000, 10_000)])
        self.store = MemoryStore(clock=lambda: self.now_seconds + ahead_seconds)
        self.observer: Observer | None = None
        self.lines: list[str] = []
        self.crashes = self.faults = 0
        self._counts: dict[What, int] = {"requests": 0, "puts": 0, "changes": 0}
        self.broken: BaseException | None = None
        self._actors: list[Actor] = []
        self._running = self._over = False
        self._late: list[tuple[float, int, Sent, Callable[[], object]]] = []
        self._outage: tuple[float, Actor | None] = (0.0, None)
        self._numbers = 0
        self._finished = threading.Lock()
        self._finished.acquire()

    def stop_faults(self) -> None:
        self.rates = FaultRates()
        self._outage = (0.0, None)

    @property
    def requests(self) -> int:
        """Return the number of requests so far."""
        return self._counts["requests"]

    @property
    def store_seconds(self) -> float:
        """Return seconds on the store's clock."""
        return self.store._clock()

    def number(self) -> int:
        """Return a new number, from 1 on."""
        self._numbers += 1
        return self._numbers

    def add(self, name: str, play: Callable[[Actor], None], *, rests: bool = False) -> Actor:
        """Add an actor, which may rest before it begins; works while others act."""

        def begun(actor: Actor) -> None:
            if rests:
                self.rest(actor)
            play(actor)

        actor = Actor(self, name, begun, begins_seconds=self.now_seconds)
        self._actors.append(actor)
        if self._running:
            actor.thread.start()
        return actor

    def choose_who_gives_way(self) -> None:
        """Choose up to two of the waiting actors that will be held up, once or twice, until others change something.

        By chance alone that is rare: an actor that is seldom held up is rarely held up at the point that matters, and
        one that is often held up finds all others held up as well.
        """
        for actor in self.rng.sample(self._actors, min(len(self._actors), self.rng.choice([0, 1, 1, 2]))):
            last = self.rng.choice([8, 8, 24])
            actor.gives_way_at = frozenset(self.rng.randint(1, last) for _ in range(self.rng.choice([1, 1, 2])))

    def run(self) -> None:
        """Let all actors act until each has ended or stopped; then carry out what is late."""
        self._running = True
        for actor in self._actors:
            actor.thread.start()
        self._next(None)
        self._finished.acquire()
        self._running, self._over = False, True
        for actor in self._actors:
            if not actor.ended:  # an invariant is broken: all actors end
                actor.stopped = True
                actor.go.release()
            actor.thread.join()
        self._actors.clear()
        self._over = False
        if self.broken is None:
            try:
                self._carry_out_late(upto=float("inf"))
            except BrokenError as error:
                self.broken = error
        if self.broken is not None:
            raise self.broken

    def say(self, who: str, what: str) -> None:
        """Add a line to the history."""
        self.lines.append(f"{self.now_seconds:10.3f} {who:<12} {what}")

    # ---- called by actors, each in its own thread

    def sleep(self, actor: Actor, seconds: float) -> None:
        """Let time pass while others go on."""
        actor.wakes_seconds = self.now_seconds + max(0.0, seconds)
        self._wait(actor)

    def rest(self, actor: Actor) -> None:
        """Do nothing for this history's usual time, or until others change something."""
        seconds = self.rng.expovariate(1 / self.rates.rest_seconds)
        what: What | None = self.rng.choice([None, "puts", "changes"])
        if what is not None:
            self._hold_for(actor, what)
        self.sleep(actor, seconds if what is None else 0.0)

    def request(self, sent: Sent, send: Callable[[], _Answer]) -> _Answer:
        """Wait for the turn of this actor; then apply the scheduler's fate to its request."""
        actor, rng = sent.actor, self.rng
        actor.requests += 1
        if actor.requests in actor.gives_way_at:
            self._hold_for(actor, "changes")
        elif rng.random() < self.rates.stalls:
            self._hold(actor)
        self._wait(actor)
        self._counts["requests"] += 1
        self.now_seconds += self._about(1.0)
        try:
            self._carry_out_late(upto=self.now_seconds)
            fate = self._fate(sent)
            if fate != "answered":
                self.faults += 1
            return self._met(fate, sent, send)
        except BrokenError as error:
            self.broken = self.broken or error
            actor.stopped = True
            raise StoppedError from error

    def hand_over(self) -> None:
        """Let the next actor go on: this one has ended."""
        self._next(None)

    # ---- the scheduler

    def _about(self, requests: float) -> float:
        """Return a random time in which about so many requests are answered, in seconds."""
        return self.rng.expovariate(1 / (requests * self.rates.latency_seconds))

    def _hold(self, actor: Actor) -> None:
        """Let others go first, however long that takes: a few requests, or until the store has changed."""
        self._hold_for(actor, self.rng.choice(["changes", "changes", "requests"]))

    def _hold_for(self, actor: Actor, what: What) -> None:
        actor.held_for = what
        actor.held_until = self._counts[what] + self.rng.choice(_HELD_FOR[what])

    def _is_held(self, actor: Actor) -> bool:
        return actor.held_until > self._counts[actor.held_for]

    def _wait(self, actor: Actor) -> None:
        """Wait for this actor's turn."""
        if not actor.stopped and self._next(actor) is not actor:
            actor.go.acquire()
        if actor.stopped:
            raise StoppedError

    def _next(self, current: Actor | None) -> Actor | None:
        """Choose the actor that goes on, and wake it unless it is awake; None if all ended or an invariant broke."""
        if self._over:
            return None
        chosen = None if self.broken is not None else self._chosen(current)
        if chosen is not current or current is None:
            (chosen.go if chosen is not None else self._finished).release()
        return chosen

    def _chosen(self, current: Actor | None) -> Actor | None:
        living = [actor for actor in self._actors if not actor.ended]
        if not living:
            return None
        going = [actor for actor in living if not self._is_held(actor)] or living
        ready = [actor for actor in going if actor.wakes_seconds <= self.now_seconds]
        if not ready:
            first = min(going, key=lambda actor: actor.wakes_seconds)
            self.now_seconds = first.wakes_seconds
            return first
        rng = self.rng
        if rng.random() < self.rates.reweigh:
            for actor in living:
                actor.weight = rng.random() ** 4
        if len(ready) == 1:
            return ready[0]
        if current in ready and rng.random() < self.rates.stay:
            return current
        return rng.choices(ready, [actor.weight for actor in ready])[0]

    def _fate(self, sent: Sent) -> Fate:
        rates, rng, actor = self.rates, self.rng, sent.actor
        swaps = sent.condition != "any"
        scale = rates.swaps if swaps else 1.0
        if sent.request.verb == "delete" and not actor.may_delete:
            return "403"
        if rng.random() < rates.outage:
            whose = rng.choice([None, actor])
            self._outage = self.now_seconds + self._about(rng.choice([10.0, 100.0])), whose
        if self.now_seconds < self._outage[0] and self._outage[1] in (None, actor):
            return "503"
        fates: list[tuple[float, Sequence[Fate]]] = [
            (rates.lost, ("lost", "unheard") if sent.writes else ("lost",)),
            (rates.late if sent.writes else 0.0, ("late",)),
            (rates.refused if swaps else 0.0, ("409", "412 of its own")),
            (rates.refused if len(sent.request.keys) > 1 else 0.0, ("in part",)),
            (rates.stops, ("stops before", "stops after", "stops, late") if sent.writes else ("stops before",)),
        ]
        x = rng.random()
        for likely, which in fates:
            x -= likely * scale
            if x < 0:
                return rng.choice(which)
        return "answered"

    def _met(self, fate: Fate, sent: Sent, send: Callable[[], _Answer]) -> _Answer:
        """Apply a fate to a request, and return or raise what its actor gets."""
        actor, verb, key = sent.actor, sent.request.verb, sent.request.key
        match fate:
            case "answered":
                return self._carried_out(sent, send)
            case "in part":
                return self._carried_out_in_part(sent)  # type: ignore[return-value]  # the answer to a delete
            case "unheard" | "412 of its own" | "stops after":
                try:
                    self._carried_out(sent, send, fate)
                except DcpRemoteError as error:
                    if fate == "412 of its own":
                        raise
                    self.say(actor.name, f"    which would have been told {type(error).__name__}")
            case "late" | "stops, late":
                due = self.now_seconds + self._about(self.rng.choice([5.0, 20.0, 100.0, 1e9]))
                self._late.append((due, self.number(), sent, send))
                self.say(actor.name, f"{sent}: {fate}")
            case _:
                self.say(actor.name, f"{sent}: {fate}")
        if fate.startswith("stops"):
            self.crashes += 1
            actor.stopped = True
            raise StoppedError
        if fate in ("409", "412 of its own"):
            raise ConditionFailedError("The object is not in the state that this write asks for.", key=key, fate=fate)
        if fate == "403":
            raise PermissionDeniedError("This may not be deleted.", key=key)
        if fate != "503":
            # The actor waits for an answer, perhaps long.
            if self.rng.random() < 0.4:
                self._hold(actor)
            self.sleep(actor, self._about(self.rng.choice([1.0, 20.0])))
        raise TransientStorageError("The store did not answer.", verb=verb, key=key, fate=fate)

    def _carried_out(self, sent: Sent, send: Callable[[], _Answer], fate: str = "answered") -> _Answer:
        """Carry out a request, show it to the observer, and add it to the history."""
        request, objects = sent.request, self.store.space.objects
        found = objects.get(request.key) if request.verb == "put" else None
        before = found.data if found is not None else None
        ending = "" if fate == "answered" else f": {fate}"
        try:
            answer = send()
        except DcpRemoteError as error:
            self.say(sent.actor.name, f"{sent}{ending}: {type(error).__name__}")
            raise
        self.say(sent.actor.name, f"{sent}{ending}")
        if sent.writes:
            self._counts["puts" if request.verb == "put" and sent.condition == "any" else "changes"] += 1
        if self.observer is not None:
            if request.verb == "put":
                said = self.observer.wrote(request.key, sent.data, before, sent.doing)
                self.lines[-1] += said and f"  -> {said}"
            elif request.verb == "delete":
                self.observer.deleted(request.keys, sent.doing)
        return answer

    def _carried_out_in_part(self, sent: Sent) -> Mapping[str, StorageError]:
        keys = sorted(sent.request.keys)
        failed = self.rng.sample(keys, self.rng.randrange(1, len(keys)))
        left = tuple(key for key in keys if key not in failed)
        part = Sent(sent.actor, sent.doing, Request("delete", left))
        self._carried_out(part, lambda: self.store.delete(left), "the rest failed")
        kind = self.rng.choice([TransientStorageError, StorageError])
        return {key: kind("It was not deleted.", key=key) for key in failed}

    def _carry_out_late(self, *, upto: float) -> None:
        while due := sorted(one for one in self._late if one[0] <= upto)[:1]:
            self._late.remove(due[0])
            _, _, sent, send = due[0]
            with suppress(DcpRemoteError):  # no actor gets the answer
                self._carried_out(sent, send, "arrives late")


# ---- replacements of default clocks, randomness and threads


class _Here(threading.local):
    actor: Actor | None = None


_here = _Here()


class _Cancellation:
    """`Cancellation` on the clock of the actor that transfers."""

    def cancel(self) -> None:
        """Do nothing: no thread waits."""

    @property
    def clock(self) -> Clock:
        return Clock(_clock, _sleep)


class _Pool:
    """Executor that runs each call at once, in the thread that submits it."""

    def __init__(self, *_args: Any, **_other: Any) -> None:
        pass

    def submit(self, call: Callable[..., _T], *args: Any) -> Future[_T]:
        future: Future[_T] = Future()
        try:
            future.set_result(call(*args))
        except StoppedError:
            raise
        except BaseException as error:  # noqa: BLE001  # raised again from the future, as after a worker thread
            future.set_exception(error)
        return future

    def shutdown(self, **_other: Any) -> None:
        pass


class _Datetime(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return cls.fromtimestamp(_here.actor.time() if _here.actor is not None else _EPOCH_SECONDS, tz)


def _clock() -> float:
    return _here.actor.clock() if _here.actor is not None else 0.0


def _sleep(seconds: float) -> None:
    assert _here.actor is not None, "who waits is an actor"
    _here.actor.sleep(seconds)


@contextmanager
def simulated(world: World) -> Iterator[pytest.MonkeyPatch]:
    """Replace time, names and threads by the simulation's, also where the package takes them by default."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deadline, "SYSTEM_CLOCK", Clock(_clock, _sleep))
        for module in (uploads, downloads):
            patch.setattr(module, "Cancellation", _Cancellation)
            patch.setattr(module, "Workers", _Pool)
        patch.setattr(threads, "Workers", _Pool)
        patch.setattr(job, "datetime", _Datetime)
        for module in (job, recovery):
            patch.setattr(module, "describe_process", lambda: "")  # it differs between processes
        # Pure, and without a cache half of a history's time.
        for module in (catalog_json, manifest_json):
            patch.setattr(module, "decode", lru_cache(maxsize=200)(module.decode))
        patch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=world.number()))
        patch.setattr(secrets, "token_hex", lambda size=8: f"{world.number():0{2 * size}x}")
        patch.setattr(deadline, "_generator", random.Random(world.seed))
        yield patch
