"""Documents that one rank of a host fetches for all ranks of the host, over the link between them.

A rank asks the leader of the link for a document. The leader tells the first rank that asks to fetch the document, and
has that rank give it to each rank that asks later. So the document is fetched once, and lies in the memory of the rank
that has fetched it until the next round of the link ends: by then all ranks have what they wanted. The frames:

    ("want", key): to the leader, from a rank that needs the document
    ("fetch", key): from the leader, to the rank that is to fetch the document
    ("give", key): from the leader, to the rank that was told to fetch the document, which answers once it has
    ("document", key, data): the answer, None if there is none, and from the leader to the ranks that wait

No load depends on an answer. Where the rank that fetches dies or fails, the next one that waits is told to fetch. Where
the leader dies, all ask the next leader. A rank that has waited for five seconds, for a rank that is stopped or slow,
fetches for itself. The receiver verifies the bytes as it verifies those of the store.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

logger = logging.getLogger(__name__)

Frame: TypeAlias = tuple[Any, ...]

# Sends a frame of the leader to one rank: `send` of a member's connection, or `hear_leader` of the leader's own rank.
Reply: TypeAlias = Callable[[Frame], None]

# Longest wait for a document, after which a rank fetches for itself until the next round ends.
_PATIENCE_SECONDS = 5.0

# Bytes that a rank keeps for the others: 80 segments of a manifest. What is more, each rank fetches for itself.
_KEPT_BYTES_MAX = 64 * 2**20


class SharedFrame(tuple[Any, ...]):  # noqa: SLOT001  # `sealed` is kept
    """Frame that is sent to several ranks, and encoded once."""

    sealed: tuple[bytes, bytes] | None = None


class HostDocuments:
    """Documents that this rank wants or has fetched, and where this rank leads, the ranks that want or have others.

    All but `share` is for the thread of the link.

    Args:
        order: Does something in the thread of the link; called from any thread.
        tell_leader: Sends a frame to the leader, or hands it to `hear_member` here.

    Attributes:
        waits_in_vain: Documents for which this rank has waited in vain.
    """

    def __init__(self, order: Callable[[Callable[[], None]], None], tell_leader: Callable[[Frame], None]) -> None:
        """Ask for nothing."""
        self._order = order
        self._tell_leader = tell_leader
        self.waits_in_vain = 0
        self._is_patient = True
        # By key: documents that this rank waits for or fetches, and those that it has fetched.
        self._wanted: dict[str, queue.SimpleQueue[bytes | None]] = {}
        self._fetched: dict[str, bytes] = {}
        self._promised: set[str] = set()  # keys that the leader waits for
        # Of a leader, by key: the rank that was told to fetch, and those that wait for the document.
        self._holders: dict[str, Reply] = {}
        self._waiting: dict[str, list[Reply]] = {}

    def share(self, key: str, fetch: Callable[[], bytes]) -> bytes:
        """Return a document from the rank that has fetched it, or call `fetch` and keep the result for the others.

        Of two threads of this rank that want one document at a time, the earlier waits in vain.
        """
        if not self._is_patient:
            return fetch()
        answer: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        found = fetched = None
        try:  # also of Ctrl-C: others must not wait for what this rank does not fetch
            self._order(partial(self._want, key, answer))
            try:
                found = answer.get(timeout=_PATIENCE_SECONDS)
            except queue.Empty:
                self._lose_patience(key)
            if found is None:
                found = fetched = fetch()
            return found
        finally:
            self._order(partial(self._end, key, fetched))

    def _lose_patience(self, key: str) -> None:
        log = logger.debug if self.waits_in_vain else logger.info
        log("no rank of this host has sent %s within %d s; this rank fetches for itself", key, _PATIENCE_SECONDS)
        self.waits_in_vain += 1
        self._is_patient = False

    def _want(self, key: str, answer: queue.SimpleQueue[bytes | None]) -> None:
        self._wanted[key] = answer
        self._tell_leader(("want", key))

    def _end(self, key: str, fetched: bytes | None) -> None:
        self._wanted.pop(key, None)
        if fetched is not None and sum(map(len, self._fetched.values())) + len(fetched) <= _KEPT_BYTES_MAX:
            self._fetched[key] = fetched
        if key in self._promised:
            self._promised.discard(key)
            self._tell_leader(("document", key, self._fetched.get(key)))

    def hear_leader(self, frame: Frame | None) -> None:
        """Take a frame of the leader; another frame is left to others."""
        match frame:
            case ("give", str(key)) if key in self._wanted:
                self._promised.add(key)
            case ("give", str(key)):
                self._tell_leader(("document", key, self._fetched.get(key)))
            case ("fetch" | "document", str(key), *data) if key in self._wanted:
                self._wanted[key].put(data[0] if data else None)

    def hear_member(self, reply: Reply, frame: Frame | None) -> None:
        """Take a frame as the leader, from a member or from this rank; None from a member that has ended."""
        match frame:
            case ("want", str(key)) if self._holders.setdefault(key, reply) == reply:
                reply(("fetch", key))
            case ("want", str(key)):
                waiting = self._waiting.setdefault(key, [])
                waiting.append(reply)
                if len(waiting) == 1:
                    self._holders[key](("give", key))
            case ("document", str(key), None):
                self._pass_on(key)
            case ("document", str(key), bytes()):
                shared = SharedFrame(frame)
                for other in self._waiting.pop(key, ()):
                    other(shared)
            case None:
                for waiting in self._waiting.values():
                    waiting[:] = [other for other in waiting if other != reply]
                for key in [key for key, holder in self._holders.items() if holder == reply]:
                    self._pass_on(key)

    def _pass_on(self, key: str) -> None:
        """Tell the next rank that waits to fetch a document that its holder does not have."""
        self._holders.pop(key, None)
        for other in self._waiting.pop(key, ()):
            self.hear_member(other, ("want", key))

    def ask_again(self) -> None:
        """Ask another leader for all that this rank wants."""
        self._promised.clear()
        for key in self._wanted:
            self._tell_leader(("want", key))

    def forget(self) -> None:
        """Forget all documents, at the end of a round, before which each rank has got what it wanted."""
        self._is_patient = True
        for kept in (self._wanted, self._fetched, self._promised, self._holders, self._waiting):
            kept.clear()
