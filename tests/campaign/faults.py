"""Faults: each is a function that begins and ends with the job of a campaign waiting at its gate.

Random choices (steps, victims, orders, pauses) are drawn from the campaign's seed. The outcome of each fault is checked
here; what holds after every fault is checked by `Campaign`.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

from dcp_remote.format import catalog_json
from dcp_remote.format.catalog import CATALOG_KEY
from dcp_remote.run.gc import find_orphans
from tests.campaign.campaign import SAVE_EVERY, URL, Campaign
from tests.campaign.job import PATIENCE_SECONDS, ROOT, Job
from tests.campaign.relay import CONFLICT, DENIED, SLOW_DOWN, Asked, Fate, Moment
from tests.campaign.trainee import SILENCE_SECONDS

Fault: TypeAlias = Callable[[Campaign], None]

# Faults of the whole campaign, by description; and those of the short form.
FAULTS: dict[str, Fault] = {}

# More steps than any fault needs: training goes on until a process ends it.
MANY_STEPS = 600


def fault(name: str) -> Callable[[Fault], Fault]:
    """Register a fault under a name."""

    def named(function: Fault) -> Fault:
        FAULTS[name] = function
        return function

    return named


# ---- ranks, or the processes around them, are killed


def killed_in_training(campaign: Campaign, *, who: str) -> None:
    """Kill a process at a random moment of training and saving."""
    job = campaign.job
    campaign.advance(MANY_STEPS)
    time.sleep(campaign.random.uniform(0.1, 1.0))
    kill(campaign, job, who)
    campaign.restart()


FAULTS["a rank is killed in training"] = partial(killed_in_training, who="a rank")
FAULTS["the coordinator is killed in training"] = partial(killed_in_training, who="the coordinator")
FAULTS["all are killed in training"] = partial(killed_in_training, who="all")


def kill(campaign: Campaign, job: Job, who: str) -> None:
    if who == "all":
        job.kill_all()
    else:
        job.kill(0 if who == "the coordinator" else campaign.victim())


@fault("torchrun is killed, and the host of the store with it")
def torchrun_is_killed(campaign: Campaign) -> None:
    """Kill torchrun: the ranks go on, and their next save fails on every one of them, with the reason."""
    job = campaign.job
    job.kill_torchrun()
    campaign.advance(MANY_STEPS)
    job.wait_ended(job.ranks)
    for rank in job.ranks:
        assert "store of the process group" in campaign.save_error(job, rank)["text"]
    campaign.start()


@contextmanager
def at_request(
    campaign: Campaign, moment: Moment, what: str, act: Callable[[], None], *, rank: int | None = None
) -> Iterator[int]:
    """Call `act` when a request of this kind is at this moment, in one of the next saves; yield the step.

    The connection is then cut, so that a request not yet carried out is lost. The job waits for that save, or trains on
    meanwhile.
    """
    step = campaign.next_save()

    def act_and_cut(_: Asked) -> Fate:
        act()
        return "cut"

    wanted = campaign.asks(what, step=None if what == "delete" else step, rank=rank)
    with campaign.relay.trapped(moment, wanted, act_and_cut) as trap:
        campaign.job.order(gate=step + campaign.random.choice((0, MANY_STEPS)))
        trap.wait(PATIENCE_SECONDS)
        yield step


def killed_in_a_save(
    campaign: Campaign, *, who: str, moment: Moment, what: str, live: bool, world_size: int | None = None
) -> None:
    """Kill a process at this moment of a save, which is then live or not; the other ranks name the lost rank.

    The next job has `world_size` ranks.
    """
    job = campaign.job
    rank = None
    if who != "all":
        rank = 0 if who == "the coordinator" else campaign.victim()

    def act() -> None:
        kill_rank(job, rank)

    with at_request(campaign, moment, what, act, rank=rank if what == "shard" else None) as step:
        job.wait_ended()
        newest = campaign.catalog().latest()
        assert newest is not None
        assert (newest.step == step) == live, f"{newest} {step}"
    for one in job.ranks:
        if rank is None or one == rank:
            continue
        if live:
            # The save is committed though its coordinator was killed, as the catalog shows.
            assert campaign.told(job, step, one), job.story()
        else:
            assert campaign.save_error(job, one)["details"]["ranks"] == str(rank), job.story()
    campaign.start(world_size=world_size)


def kill_rank(job: Job, rank: int | None) -> None:
    if rank is None:
        job.kill_all()
    else:
        job.kill(rank)


for _who in ("a rank", "the coordinator", "all"):
    FAULTS[f"killed in mid-upload: {_who}"] = partial(
        killed_in_a_save, who=_who, moment="half", what="shard", live=False
    )
for _who in ("the coordinator", "all"):
    FAULTS[f"killed between manifest and swap: {_who}"] = partial(
        killed_in_a_save, who=_who, moment="answered", what="manifest", live=False
    )
    FAULTS[f"killed before it hears that the swap was made: {_who}"] = partial(
        killed_in_a_save, who=_who, moment="answered", what="swap", live=True
    )


@fault("the coordinator is killed while old checkpoints are deleted")
def killed_while_it_deletes(campaign: Campaign) -> None:
    """Kill the coordinator while it deletes: the catalog no longer names the objects, so that the rest are orphans."""
    job = campaign.job
    moments: tuple[Moment, ...] = ("half", "answered")
    with at_request(campaign, campaign.random.choice(moments), "delete", lambda: job.kill(0)):
        job.wait_ended()
    campaign.start()


def is_read_of_a_shard(asked: Asked) -> bool:
    return asked.what == "read" and asked.key.startswith("shards/")


def fail_in_a_restore(campaign: Campaign, *, killed: bool) -> None:
    """Kill or stop a rank in a restore: the others name a stopped rank in seconds; the next job restores the same."""
    campaign.job.kill_all()

    with campaign.relay.trapped("half", is_read_of_a_shard, lambda _: "cut", times=10_000) as trap:
        job, victim = campaign.launch(), campaign.victim()
        trap.wait(PATIENCE_SECONDS)
        if killed:
            # torchrun ends the other ranks at once: no handler of preemption is installed yet.
            job.kill(victim)
        else:
            job.stop(victim)
            for rank in job.ranks:
                if rank != victim:
                    failed = job.wait_told(rank, "failed")
                    assert failed["details"]["ranks"] == str(victim), job.story()
            job.kill(victim)
        job.wait_ended()
    campaign.start()


FAULTS["a rank is killed while it restores"] = partial(fail_in_a_restore, killed=True)
FAULTS["a rank is stopped while it restores"] = partial(fail_in_a_restore, killed=False)


# ---- ranks stopped, slow, or failing


def stopped_for_a_moment(campaign: Campaign, *, who: str, what: str) -> None:
    """Stop a rank for less than the silence limit: the save goes on, and is committed."""
    job, step = campaign.job, campaign.next_save()
    rank = 0 if who == "the coordinator" else campaign.victim()

    def stop(_: Asked) -> Fate:
        job.stop(rank)
        return "goes on"

    wanted = campaign.asks(what, step=step, rank=rank if what == "shard" else None)
    with campaign.relay.trapped(campaign.random.choice(("half", "answered")), wanted, stop) as trap:
        job.order(gate=step)
        trap.wait(PATIENCE_SECONDS)
        time.sleep(campaign.random.uniform(0.3, 0.5) * SILENCE_SECONDS)
        job.go_on(rank)
        job.wait_idle()
    assert all(campaign.told(job, step, one) for one in job.ranks)


FAULTS["a rank is stopped for a moment, in mid-upload"] = partial(stopped_for_a_moment, who="a rank", what="shard")
FAULTS["the coordinator is stopped for a moment, in mid-commit"] = partial(
    stopped_for_a_moment, who="the coordinator", what="manifest"
)


def stopped_for_good(campaign: Campaign, *, who: str) -> None:
    """Stop a rank during its upload: the others name it within seconds of the silence limit; resumed, it is told so."""
    job, step = campaign.job, campaign.next_save()
    stopped = 0 if who == "the coordinator" else campaign.victim()

    def stop(_: Asked) -> Fate:
        job.stop(stopped)
        return "goes on"

    with campaign.relay.trapped("half", campaign.asks("shard", step=step, rank=stopped), stop) as trap:
        job.order(gate=step)
        trap.wait(PATIENCE_SECONDS)
    others = [rank for rank in job.ranks if rank != stopped]
    for rank in others:
        job.wait_told(rank, "failed")
        error = campaign.save_error(job, rank)
        assert error["details"]["ranks"] == str(stopped), job.story()
        assert "silent" in error["text"], job.story()
    job.wait_ended(others)
    if campaign.random.random() < 0.7:
        job.go_on(stopped)
        job.wait_ended()
        assert campaign.save_error(job, stopped), job.story()
    else:
        job.kill(stopped)
    assert not campaign.told(job, step)
    campaign.restart()


FAULTS["a rank is stopped for good"] = partial(stopped_for_good, who="a rank")
FAULTS["the coordinator is stopped for good"] = partial(stopped_for_good, who="the coordinator")


@fault("all ranks are stopped for longer than the silence limit, and resumed")
def the_machine_sleeps(campaign: Campaign) -> None:
    """Suspend all processes, as with a virtual machine: the job goes on or ends with an error that blames no rank."""
    job = campaign.job
    step = campaign.advance(MANY_STEPS)
    job.wait_saving(step)
    job.torchrun.send_signal(signal.SIGSTOP)
    for rank in job.ranks:
        job.stop(rank)
    time.sleep(SILENCE_SECONDS + 2)
    job.torchrun.send_signal(signal.SIGCONT)
    for rank in job.ranks:
        job.go_on(rank)
    gate = max(event["step"] for rank in job.ranks for event in job.events(rank, "saving")) + 4 * SAVE_EVERY
    gate -= gate % SAVE_EVERY
    job.order(gate=gate)

    def over() -> bool:
        idle = [any(one["step"] >= gate for one in job.events(rank, "idle")) for rank in job.ranks]
        return all(idle) or not any(map(job.alive, job.ranks))

    job.wait_until(over, "it goes on, or ends")
    if not any(map(job.alive, job.ranks)):
        campaign.restart()


@fault("a slow rank")
def slow_rank(campaign: Campaign) -> None:
    """Let a rank reach a save seconds after the others, which wait for it."""
    job, step = campaign.job, campaign.next_save()
    job.order(gate=step, sleeps=(campaign.random.randrange(job.world_size), 0.6 * SILENCE_SECONDS))
    job.wait_idle()
    assert campaign.told(job, step)


@fault("a rank raises in training")
def raises_in_training(campaign: Campaign) -> None:
    """Let a rank raise just after a save began: the save is committed all the same, since all ranks take part in it."""
    job, step, victim = campaign.job, campaign.next_save(), campaign.victim()
    job.order(gate=step + 1, raises=(victim, step + 1))
    job.wait_ended()
    assert "an error of the training itself" in campaign.errors(job, victim)[0]["text"]
    assert campaign.told(job, step), job.story()
    campaign.start()


@fault("a rank cannot give its state")
def cannot_give_its_state(campaign: Campaign) -> None:
    """Let a rank fail to give its state: the save ends at once on all ranks, with that rank's error."""
    job, step = campaign.job, campaign.next_save()
    victim = campaign.random.randrange(job.world_size)
    job.order(gate=step, refuses=(victim, step))
    job.wait_ended()
    for rank in job.ranks:
        error = campaign.errors(job, rank)[0]
        if rank == victim:
            assert error["error"] == "RuntimeError"
        else:
            assert (error["error"], error["details"]["rank"]) == ("SaveFailedError", victim), job.story()
            assert "cannot be had" in error["text"]
    campaign.start()


# ---- the relay and the server


def met(campaign: Campaign, act: Callable[[Asked], Fate], moment: Moment, what: str, *, times: int = 1) -> None:
    """Apply a fate to some requests of a save, which is committed all the same, by its first attempt."""
    job, step = campaign.job, campaign.next_save()
    with campaign.relay.trapped(moment, campaign.asks(what, step=step), act, times=times) as trap:
        job.order(gate=step)
        trap.wait(PATIENCE_SECONDS)
        job.wait_idle()
    for rank in job.ranks:
        told = [event for event in job.events(rank, "committed") if event["step"] == step]
        assert [event["attempts"] for event in told] == [1], job.story()


def _cut(_: Asked) -> Fate:
    return "cut"


FAULTS["a connection is cut in mid-PUT"] = partial(met, act=_cut, moment="half", what="shard", times=2)
FAULTS["the answer to a shard is lost"] = partial(met, act=_cut, moment="answered", what="shard", times=2)
FAULTS["the swap is lost on its way"] = partial(met, act=_cut, moment="sent", what="swap")
FAULTS["the answer to the swap is lost"] = partial(met, act=_cut, moment="answered", what="swap")
FAULTS["the store answers swaps with 409"] = partial(met, act=lambda _: CONFLICT, moment="sent", what="swap", times=3)


def often(campaign: Campaign, act: Callable[[Asked], Fate], moments: tuple[Moment, ...]) -> None:
    """Apply a fate to many requests of any kind, during two saves."""
    job, chance = campaign.job, random.Random(campaign.random.random())
    traps = [
        campaign.relay.trap(moment, lambda _: chance.random() < 0.4, act, times=12 // len(moments))
        for moment in moments
    ]
    gate = job.gate + 2 * SAVE_EVERY
    job.order(gate=gate)
    job.wait_idle()
    assert any(trap.sprung() for trap in traps)


FAULTS["a storm of 503"] = partial(often, act=lambda _: SLOW_DOWN, moments=("sent",))
FAULTS["connections are cut all the time"] = partial(often, act=_cut, moments=("half", "sent", "answered"))


@fault("a slow link")
def slow_link(campaign: Campaign) -> None:
    """Slow the link, so that a save takes longer than the silence limit: an uploading rank is not taken for dead."""
    job, step = campaign.job, campaign.next_save()
    sizes = [entry.size_bytes for entry in campaign.catalog().entries]
    # Less than half of the checkpoint is sent: the rest is frozen.
    campaign.relay.bytes_per_second = sizes[-1] / 2 / SILENCE_SECONDS / 1.3
    campaign.relay.latency_seconds = 0.1
    job.order(gate=step)
    job.wait_idle()
    assert campaign.told(job, step)


def held_up(campaign: Campaign, *, act: Callable[[Campaign], None]) -> None:
    """Hold up the store when half of a shard is sent: the save waits, and is committed."""
    job, step = campaign.job, campaign.next_save()
    with campaign.relay.trapped("half", campaign.asks("shard", step=step), lambda _: "goes on") as trap:
        job.order(gate=step)
        trap.wait(PATIENCE_SECONDS)
    act(campaign)
    job.wait_idle()
    assert campaign.told(job, step)


def link_is_down(campaign: Campaign) -> None:
    """Cut connections and refuse new ones, for seconds."""
    campaign.relay.close()
    time.sleep(campaign.random.uniform(1.0, 3.0))
    campaign.relay.open()


def server_is_restarted(campaign: Campaign) -> None:
    """End the server's process, and start another one with the same objects."""
    campaign.relay.close()
    campaign.replace_server()
    campaign.relay.open()


def server_hangs(campaign: Campaign) -> None:
    """Stop the server's process and resume it: connections stay open without an answer."""
    os.kill(campaign.server.pid, signal.SIGSTOP)
    try:
        time.sleep(campaign.random.uniform(1.0, 3.0))
    finally:
        os.kill(campaign.server.pid, signal.SIGCONT)


FAULTS["the link is down for a while"] = partial(held_up, act=link_is_down)
FAULTS["the server is stopped and started"] = partial(held_up, act=server_is_restarted)
FAULTS["the server hangs for a moment"] = partial(held_up, act=server_hangs)


@fault("nothing may be deleted")
def nothing_may_be_deleted(campaign: Campaign) -> None:
    """Refuse all deletes: retention goes on, and leaves the objects to gc."""
    job = campaign.job
    with campaign.relay.trapped("sent", campaign.asks("delete"), lambda _: DENIED, times=1_000) as trap:
        job.order(gate=job.gate + 2 * SAVE_EVERY)
        trap.wait(PATIENCE_SECONDS)
        job.wait_idle()
    assert find_orphans(campaign.store(), grace_seconds=0).old


@fault("a bit flips on the way down")
def a_bit_flips(campaign: Campaign) -> None:
    """Flip a bit of a shard during a restore: the job ends, and names the shard; the next job restores it."""
    campaign.job.kill_all()

    with campaign.relay.trapped("answered", is_read_of_a_shard, lambda _: "flipped") as trap:
        job = campaign.launch()
        trap.wait(PATIENCE_SECONDS)
        job.wait_ended()
    for rank in job.ranks:
        assert campaign.errors(job, rank)[0]["error"] == "CorruptCheckpointError", job.story()
    campaign.start()


# ---- other jobs, and commands


@fault("two jobs at once")
def two_jobs(campaign: Campaign) -> None:
    """Run two jobs: the newer one saves; the older one is told that it is fenced, and commits nothing more."""
    old = campaign.job
    new = campaign.start()
    if campaign.random.random() < 0.5:
        campaign.advance()
        new.wait_idle()
        old.order(gate=old.gate + SAVE_EVERY)
    else:
        # The older job is saving when the newer one takes the fence.
        with campaign.relay.trapped("half", campaign.asks("shard"), lambda _: _paused(1.0)):
            old.order(gate=old.gate + SAVE_EVERY)
            campaign.advance()
            new.wait_idle()
        old.order(gate=old.gate + SAVE_EVERY)
    old.wait_ended()
    for rank in old.ranks:
        assert campaign.errors(old, rank)[0]["error"] == "FencedError", old.story()


def _paused(seconds: float) -> Fate:
    time.sleep(seconds)
    return "goes on"


@fault("a coordinator that was taken for dead resumes during another job")
def zombie(campaign: Campaign) -> None:
    """Stop a job between manifest and swap: when it goes on after another job, it commits nothing, and says why."""
    old, step = campaign.job, campaign.next_save()

    def stop(_: Asked) -> Fate:
        old.stop(0)
        return "goes on"

    with campaign.relay.trapped("answered", campaign.asks("manifest", step=step), stop) as trap:
        old.order(gate=step)
        trap.wait(PATIENCE_SECONDS)
    old.kill_torchrun()
    for rank in old.ranks[1:]:
        old.kill(rank)
    old.wait_ended(old.ranks[1:])
    new = campaign.start()
    campaign.advance(SAVE_EVERY * campaign.random.randrange(1, 4))
    new.wait_idle()
    old.go_on(0)
    old.wait_ended()
    assert not campaign.told(old, step), old.story()
    assert campaign.errors(old, 0), old.story()
    assert campaign.catalog() == campaign.relay.catalogs[-1]


def late_swap(campaign: Campaign, *, after_saves: int) -> None:
    """Delay a dead job's swap until another job has restored, or has saved."""
    old, step = campaign.job, campaign.next_save()
    arrives, gone = threading.Event(), threading.Event()

    def hold(_: Asked) -> Fate:
        arrives.wait(PATIENCE_SECONDS)
        return "goes on"

    def pass_by(_: Asked) -> Fate:
        gone.set()
        return "goes on"

    held = campaign.relay.trap("sent", campaign.asks("swap", step=step), hold)
    try:
        old.order(gate=step)
        old.wait_until(lambda: held.hits > 0, "the swap is on its way")
        old.kill_all()
        new = campaign.start()
        campaign.advance(after_saves * SAVE_EVERY)
        new.wait_idle()
        campaign.relay.trap("answered", campaign.asks("swap"), pass_by)
    finally:
        arrives.set()
    assert gone.wait(PATIENCE_SECONDS)
    there = campaign.catalog()
    committed = [entry.step for entry in there.entries if entry.token == there.token] if after_saves else [step]
    newest = there.latest()
    assert newest is not None
    assert newest.step == max(committed), there


FAULTS["a dead job's swap arrives when the next has restored"] = partial(late_swap, after_saves=0)
FAULTS["a dead job's swap arrives when the next has saved"] = partial(late_swap, after_saves=1)


def orphans_removed(campaign: Campaign, *, moment: Moment, what: str) -> None:
    """Run `dcp-remote gc --yes --grace-hours 0` during a save: it begins again, and is committed."""
    job, step = campaign.job, campaign.next_save()

    def collect(_: Asked) -> Fate:
        gc(campaign, "--yes", "--grace-hours", "0")
        return "goes on"

    with campaign.relay.trapped(moment, campaign.asks(what, step=step), collect) as trap:
        job.order(gate=step)
        trap.wait(PATIENCE_SECONDS)
        job.wait_idle()
    (told,) = [event for event in job.events(0, "committed") if event["step"] == step]
    assert told["attempts"] == 2, job.story()


FAULTS["orphans are removed in mid-upload"] = partial(orphans_removed, moment="answered", what="shard")
FAULTS["orphans are removed between manifest and swap"] = partial(orphans_removed, moment="answered", what="manifest")


def command(campaign: Campaign, *arguments: str) -> str:
    """Return the output of a command of `dcp-remote` on this run, without the relay."""
    options = [f"--option={name}={value}" for name, value in campaign.server.storage_options.items()]
    program = "import sys; from dcp_remote.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, arguments[0], URL, *arguments[1:], *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    return done.stdout


def gc(campaign: Campaign, *arguments: str) -> str:
    return command(campaign, "gc", *arguments)


def catalog_lost(campaign: Campaign, *, damaged: bool) -> None:
    """Lose the catalog: the next save fails on every rank; after `dcp-remote recover` the next job goes on."""
    job, store = campaign.job, campaign.store()
    newest = campaign.catalog().latest()
    assert newest is not None
    if damaged:
        data = bytearray(store.get(CATALOG_KEY, limit_bytes=catalog_json.STORED_BYTES_MAX).data)
        data[campaign.random.randrange(len(data))] ^= 1
        store.put(CATALOG_KEY, [data])
    else:
        store.delete([CATALOG_KEY])
    campaign.advance()
    job.wait_ended()
    kind = "CorruptCheckpointError" if damaged else "CheckpointNotFoundError"
    for rank in job.ranks:
        error = campaign.errors(job, rank)[0]
        assert error["error"] == kind, job.story()
        assert "recover" in error["text"], job.story()
    command(campaign, "recover", "--yes")
    recovered = campaign.catalog().latest()
    assert recovered is not None
    assert recovered.step >= newest.step
    campaign.start()


FAULTS["the catalog is deleted"] = partial(catalog_lost, damaged=False)
FAULTS["the catalog is damaged"] = partial(catalog_lost, damaged=True)


@fault("rolled back to an older step")
def rolled_back(campaign: Campaign) -> None:
    """Roll back: newer checkpoints are abandoned by the first commit, and kept."""
    campaign.job.kill_all()
    older = [entry for entry in campaign.catalog().entries if not entry.abandoned][:-1]
    entry = campaign.random.choice(older[-2:])
    newer = {one.save_id for one in older if one.step > entry.step}
    job = campaign.start(restore_step=entry.step)
    step = campaign.advance()
    job.wait_idle()
    catalog = campaign.catalog()
    newest = catalog.latest()
    assert newest is not None
    assert newest.step == step
    assert all(one.abandoned or one.step == step for one in catalog.entries if one.save_id in newer)


# ---- preemption


def preempted(campaign: Campaign, *, how: str) -> None:
    """Send SIGTERM: all ranks stop at one step, which is saved."""
    job = campaign.job
    campaign.advance(MANY_STEPS)
    time.sleep(campaign.random.uniform(0.0, 0.5))
    if how == "torchrun":
        job.torchrun.terminate()
    else:
        ranks = list(job.ranks)
        campaign.random.shuffle(ranks)
        for rank in ranks if how == "each" else ranks[:1]:
            job.terminate(rank)
            time.sleep(campaign.random.uniform(0.0, 1.0))
    steps = {job.wait_told(rank, "preempted")["step"] for rank in job.ranks}
    assert len(steps) == 1, job.story()
    step = steps.pop()
    assert all(campaign.told(job, step, rank) for rank in job.ranks), job.story()
    job.wait_ended()
    newest = campaign.catalog().latest()
    assert newest is not None
    assert newest.step == step
    campaign.start()


FAULTS["preemption: SIGTERM to each rank at its own time"] = partial(preempted, how="each")
FAULTS["preemption: SIGTERM to one rank alone"] = partial(preempted, how="one")
FAULTS["preemption: SIGTERM to torchrun"] = partial(preempted, how="torchrun")
