"""The saves of one manager: one under way at a time, who waits for it, and what closing does about the last one."""

from __future__ import annotations

import logging
import math
import time

from dcp_remote.flight import Flight
from dcp_remote.preemption import Preemption
from dcp_remote.reports import SaveReport
from dcp_remote.save_rank import Task

logger = logging.getLogger(__name__)


class Flights:
    """Saves of one rank, one after another.

    Args:
        url: Of the run, for the log.
        preemption: Knows how long there is.

    Attributes:
        report: Of the last save that was committed and waited for.
        newest: The last save that was begun, which may still be tidying up.
    """

    def __init__(self, url: str, preemption: Preemption) -> None:
        """See the class."""
        self._url = url
        self._preemption = preemption
        self._under_way: Flight | None = None  # until it was waited for
        self.report: SaveReport | None = None
        self.newest: Flight | None = None

    def start(self, flight: Flight, task: Task) -> None:
        """Begin a save; abandon it if this raises, or whatever follows in the call that saves."""
        self._under_way = flight
        flight.start(task)
        self.newest = flight

    def abandon(self, flight: Flight, error: BaseException) -> None:
        """Give a save up, since the call that saves raises; what is committing already goes on, and is waited for."""
        if flight.abandon(error):
            self.newest = flight
        if self._under_way is flight and flight.is_settled:
            self._under_way = None

    def wait(self) -> SaveReport | None:
        """Return when no save is under way: the report of the last one that was committed.

        Raises:
            DcpRemoteError: The save failed. Raised once.
        """
        flight = self._under_way
        if flight is not None:
            try:
                self.report = flight.result(self._left_seconds)
            finally:
                # Ctrl-C leaves it under way.
                if flight.is_settled:
                    self._under_way = None
        return self.report

    def close(self, *, is_interrupted: bool) -> None:
        """Wait for the save under way, and for what it tidies up.

        Args:
            is_interrupted: Whether Ctrl-C was pressed already: then it is said at once what is waited for, and until
                when. If not, the next Ctrl-C says so. One more gives the save up.

        Raises:
            DcpRemoteError: The save failed.
            KeyboardInterrupt: The save was given up.
        """
        seconds = math.inf
        try:
            self._wait_to_close(is_interrupted=is_interrupted)
        except KeyboardInterrupt:
            seconds = 0.0
            raise
        finally:
            newest, self.newest = self.newest, None
            if newest is not None:
                if is_interrupted and not newest.has_ended:
                    # A store that hangs holds its thread for as long as one request may take.
                    logger.warning("%s: waiting for requests of %s; Ctrl-C ends this", self._url, newest.what)
                newest.finish(min(seconds, self._preemption.working_seconds()))

    def _wait_to_close(self, *, is_interrupted: bool) -> None:
        while (flight := self._under_way) is not None:
            if is_interrupted and not flight.is_settled:
                until = time.strftime("%H:%M:%S", time.localtime(time.time() + flight.remaining_seconds))
                logger.warning("%s: waiting for %s, until %s; Ctrl-C gives it up", self._url, flight.what, until)
            try:
                self.wait()
            except KeyboardInterrupt as error:
                if is_interrupted:
                    flight.abandon(error)
                    raise
                is_interrupted = True

    def _left_seconds(self) -> float:
        remaining = self._preemption.remaining_seconds()
        return math.inf if remaining is None else remaining
