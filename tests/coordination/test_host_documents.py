"""Documents that ranks of one host share: processes of which those that fetch, or lead, are slow, killed or stopped."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

import pytest

from tests.coordination.test_host_link import Host, Process, Rank, host  # noqa: F401  # a fixture
from tests.support.rank_threads import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract sockets")


def want(key: str, ranks: Sequence[Process], patience: float = 60.0) -> None:
    for one in ranks:
        one.call(Rank.want, key, patience)


def wait_for_fetcher(key: str, ranks: Sequence[Process]) -> Process:
    """Return the one rank that fetches a document."""
    wait_until(lambda: fetchers(key, ranks) != [])
    (one,) = fetchers(key, ranks)
    return one


def fetchers(key: str, ranks: Sequence[Process]) -> list[Process]:
    return [one for one in ranks if one.call(Rank.fetches_now, key)]


def documents(key: str, ranks: Sequence[Process]) -> list[bytes | None]:
    return [one.call(Rank.document, key) for one in ranks]


def end_round(host: Host, ranks: Sequence[Process], number: int) -> None:  # noqa: F811
    for one in ranks:
        one.call(Rank.begin, number, b"")
    host.collect(number, len(ranks))
    host.finish(number, b"answer", ranks)


@pytest.mark.parametrize("leads", [False, True])
def test_one_rank_fetches_for_all(host: Host, leads: bool) -> None:  # noqa: F811
    """The first that asks, whether it leads or not; a late rank gets what was fetched. After a round, all is gone."""
    ranks = host.link(1, 2, 3, 4)
    first, second, third, late = ranks if leads else ranks[1:] + ranks[:1]
    data = bytes(20 * 2**20) + b"end"
    want("large", [first])
    wait_until(lambda: fetchers("large", ranks) == [first])
    want("large", [second, third])
    want("other", [second])
    wait_until(lambda: fetchers("other", ranks) == [second])
    want("other", [first, third])
    second.call(Rank.fetched, "other", b"small")
    assert documents("other", [first, second, third]) == [b"small"] * 3
    first.call(Rank.fetched, "large", data)
    want("large", [late])
    assert documents("large", ranks) == [data] * 4
    assert fetchers("large", ranks) == [first]
    end_round(host, ranks, 1)
    wait_until(lambda: [one.call(Rank.kept) for one in ranks] == [0] * 4)
    assert [one.call(Rank.waits_in_vain) for one in ranks] == [0] * 4


def test_a_rank_that_is_alone_fetches(host: Host) -> None:  # noqa: F811
    """Before its first round, and as the only rank of its host; it keeps nothing."""
    (unlinked,) = host.start(1)
    for number in (1, 2):
        want("key", [unlinked])
        unlinked.call(Rank.fetched, "key", b"data")
        assert documents("key", [unlinked]) == [b"data"]
        assert unlinked.call(Rank.kept) == 0
        end_round(host, [unlinked], number)


@pytest.mark.parametrize("how", ["killed", "raises"])
@pytest.mark.parametrize("leads", [False, True])
def test_a_rank_that_does_not_fetch_is_followed_by_another(host: Host, how: str, leads: bool) -> None:  # noqa: F811
    """Kill the rank that fetches, which leads or not, or let its request fail: one other rank fetches in its place."""
    ranks = host.link(1, 2, 3, 4)
    first = ranks[0 if leads else 1]
    others = [one for one in ranks if one is not first]
    want("key", [first])
    wait_until(lambda: fetchers("key", ranks) == [first])
    want("key", others)
    if how == "killed":
        first.kill()
    else:
        first.call(Rank.fetched, "key", None)
        assert documents("key", [first]) == [None]
        want("key", [first])  # asks once more, as a retry does
        others.append(first)
    one = wait_for_fetcher("key", others)
    one.call(Rank.fetched, "key", b"data")
    assert documents("key", others) == [b"data"] * len(others)
    assert fetchers("key", others) == [one]


def test_ranks_fetch_for_themselves_while_another_is_stopped(host: Host) -> None:  # noqa: F811
    """Stop the rank that fetches: the others wait once, until the next round has ended."""
    leader, stopped, *others = host.link(1, 2, 3, 4)
    want("key", [stopped])
    wait_until(lambda: fetchers("key", [stopped]) == [stopped])
    stopped.signal(signal.SIGSTOP)
    others.append(leader)
    for key in ("key", "next"):
        want(key, others, 0.2)
        wait_until(lambda key=key: fetchers(key, others) == others)  # type: ignore[misc]  # bound now
        for one in others:
            one.call(Rank.fetched, key, b"data")
        assert documents(key, others) == [b"data"] * 3
        assert [one.call(Rank.waits_in_vain) for one in others] == [1] * 3
    stopped.signal(signal.SIGCONT)
    stopped.call(Rank.fetched, "key", b"data")
    assert documents("key", [stopped]) == [b"data"]
    end_round(host, [leader, stopped, *others[:-1]], 1)
    want("key", [stopped, *others])
    one = wait_for_fetcher("key", [stopped, *others])
    one.call(Rank.fetched, "key", b"again")
    assert documents("key", [stopped, *others]) == [b"again"] * 4


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_leader_that_is_struck(host: Host, number: signal.Signals) -> None:  # noqa: F811
    """Kill the leader while another rank fetches: the next one leads. Stop the leader: each rank fetches for itself."""
    leader, first, *others = host.link(1, 2, 3, 4)
    want("key", [first])
    wait_until(lambda: fetchers("key", [first]) == [first])
    want("key", others, 60.0 if number == signal.SIGKILL else 0.2)
    leader.signal(number)
    if number == signal.SIGKILL:
        wait_until(lambda: sum(one.call(Rank.leads) for one in (first, *others)) == 1)
    else:
        wait_until(lambda: fetchers("key", others) == others)
        leader.signal(signal.SIGCONT)
    for one in (first, *others):
        one.call(Rank.fetched, "key", b"data")
    assert documents("key", [first, *others]) == [b"data"] * 3
    # The next leader does not know who fetches already.
    assert len(fetchers("key", [first, *others])) <= (2 if number == signal.SIGKILL else 3)


def test_a_document_that_is_too_large_to_be_kept(host: Host) -> None:  # noqa: F811
    """Each rank fetches for itself, one after another."""
    ranks = host.link(1, 2, 3)
    want("key", ranks)
    left = list(ranks)
    while left:
        one = wait_for_fetcher("key", left)
        one.call(Rank.fetched, "key", bytes(64 * 2**20 + 1))
        left.remove(one)
    assert [len(data or b"") for data in documents("key", ranks)] == [64 * 2**20 + 1] * 3


def test_a_document_is_encoded_once_for_all(host: Host) -> None:  # noqa: F811
    """Members that are stopped take nothing: what is to be sent to them lies in the leader's memory once."""
    leader, *stopped = host.link(1, 2, 3, 4)
    want("key", [leader])
    wait_until(lambda: fetchers("key", [leader]) == [leader])
    want("key", stopped)
    wait_until(lambda: leader.call(Rank.waiting_for, "key") == 3)
    for one in stopped:
        one.signal(signal.SIGSTOP)
    leader.call(Rank.fetched, "key", bytes(20 * 2**20))
    wait_until(lambda: leader.call(Rank.copies)[0] == 3)
    assert leader.call(Rank.copies) == (3, 1)
    for one in stopped:
        one.signal(signal.SIGCONT)
    assert documents("key", stopped) == [bytes(20 * 2**20)] * 3


def test_ctrl_c_while_a_rank_begins_to_wait(host: Host) -> None:  # noqa: F811
    """The rank fetches nothing, and another one that wants the document is told to."""
    ranks = host.link(1, 2, 3)
    ranks[1].call(Rank.want_interrupted, "key")
    want("key", [ranks[2]])
    wait_until(lambda: fetchers("key", [ranks[2]]) == [ranks[2]])
    ranks[2].call(Rank.fetched, "key", b"data")
    assert documents("key", [ranks[2]]) == [b"data"]


def test_an_answer_that_comes_twice(host: Host) -> None:  # noqa: F811
    """A leader that was stopped sends an answer that its member has got alone: a later document stays."""
    leader, one = host.link(1, 2, pings=3)
    leader.signal(signal.SIGSTOP)
    one.call(Rank.begin, 1, b"data")
    host.collect(1, 1)
    host.finish(1, b"answer", [one])
    want("key", [one])
    wait_until(lambda: fetchers("key", [one]) == [one])
    one.call(Rank.fetched, "key", b"data")
    assert documents("key", [one]) == [b"data"]
    wait_until(lambda: one.call(Rank.kept) == 2)
    leader.signal(signal.SIGCONT)
    wait_until(lambda: one.call(Rank.heard) == [b"answer"])
    assert one.call(Rank.kept) == 2
