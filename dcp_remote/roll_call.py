"""Who keeps the others of a joint waiting: the silent, those who do something else, and the late; at each beat.

Every rank watches the coordinator, which watches all others, in the thread of the pulse.
"""

from __future__ import annotations

from collections.abc import Sequence

from dcp_remote.ending import Ending, named
from dcp_remote.joint_keys import Place
from dcp_remote.key_value import Client
from dcp_remote.party import Party


class RollCall:
    """Ends a joint by the names of those who keep it from going on.

    Args:
        party: Of the joint.
        ending: Of the joint.
        silence_seconds: After which a rank that was heard of and fell silent ends it.

    Attributes:
        waiting: Whether the coordinator waits for contributions.
    """

    def __init__(self, party: Party, ending: Ending, *, silence_seconds: float) -> None:
        """See the class."""
        self._party = party
        self._pulse = party.pulse
        self._ending = ending
        self._silence_seconds = silence_seconds
        # The coordinator's: whose contribution to which round is not read yet, whether it waits for those, and the
        # beats of ranks that do something else under this number.
        self._missing: tuple[int, Sequence[int]] = (1, range(1, party.world_size))
        self.waiting = False
        self._astray: dict[int, int] = {}

    def expect(self, number: int, ranks: Sequence[int]) -> None:
        """Contributions of these to that round are not read yet; all others are."""
        self._missing = (number, ranks)

    def unread(self, place: Place) -> list[str]:
        """Keys of the contributions that are not read yet."""
        number, ranks = self._missing
        return place.contributions(number, ranks)

    def beat(self, client: Client) -> None:
        """Look who is there, and end it if it cannot go on; in the thread of the pulse."""
        ending = self._ending
        ending.look()
        if ending.left or ending.error is not None:
            return
        if not self._party.is_coordinator:
            beat = ending.coordinators_beat()
            if not ending.hear(client) and beat is not None:
                ending.follow(beat)
            self._blame_the_silent()
        elif not ending.past_return and not ending.hear(client):
            self._blame_the_silent()
            self._blame_the_strays()
            if ending.time.expired():
                self._blame_the_late(client)

    def _blame_the_silent(self) -> None:
        assert self._pulse is not None, "whoever beats has one"
        ending, silent = self._ending, self._pulse.silent(self._silence_seconds)
        if silent:
            have = f"{named(list(silent))} {'has' if len(silent) == 1 else 'have'}"
            told = f"{have} been silent for {max(silent.values()):.0f} s; {ending.what} was given up."
            ending.end(ending.failed(told, **ending.whereabouts(list(silent))), lost=True)

    def _blame_the_strays(self) -> None:
        """Ranks without whose contribution the coordinator cannot go on, and which will never give it."""
        ending = self._ending
        gone: list[int] = []
        for rank in self._missing[1] if self.waiting else ():
            beat = None if self._pulse is None else self._pulse.last(rank)
            if beat is None:
                continue
            if ending.is_gone(beat):
                gone.append(rank)
            elif beat.inside and beat.joint == ending.place.number and beat.what != ending.what:
                # Unless it is about to leave that. Two beats later it has said so again.
                if beat.count >= self._astray.setdefault(rank, beat.count) + 2:
                    gone.append(rank)
            else:
                self._astray.pop(rank, None)
        if gone:
            told = f"{named(gone)} did something else instead of {ending.what}, which was given up."
            ending.end(ending.failed(told, **ending.whereabouts(gone)), whatever=True)

    def _blame_the_late(self, client: Client) -> None:
        missing = number, ranks = self._missing
        ending, itself = self._ending, not self.waiting
        place = ending.place
        present = client.present(place.contributions(number, ranks))
        if self._missing is not missing:
            return  # they have come meanwhile; the next beat looks again
        late = [rank for rank in ranks if place.contribution(number, rank) not in present]
        if itself or not late:
            late.insert(0, 0)
        told = f"{named(late)} did not report by the deadline; {ending.what} was given up."
        ending.end(ending.timed_out(told, **ending.whereabouts(late)))
