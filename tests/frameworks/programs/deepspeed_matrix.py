"""Saves of several kinds of engines, or loads of several runs into each kind; reports digests of the full states.

deepspeed_matrix.py save <url> <kinds>          saves <url>/<kind>-<ranks>, reports a result by kind
deepspeed_matrix.py load <url> <kinds> <runs>   reports a result by "<run> <kind>"

Several commands follow each other in one process. Of each kind one engine loads all runs: the first one before its
first step, the others trained since.
"""

from __future__ import annotations

import sys
from typing import Any

import deepspeed
import torch.distributed as dist

from dcp_remote.integrations.deepspeed import attach
from dcp_remote.integrations.runs import close_managers
from deepspeed_engines import KINDS, digests, evaluate, full_state, make_engine, steps_of, train
from tests.support.rank_programs import leave_process_group, report


def result_of(engine: Any) -> dict[str, Any]:
    return {
        "digests": digests(full_state(engine)),
        "steps": steps_of(engine),
        "counters": [engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps],
        "rates": [group["lr"] for group in engine.optimizer.param_groups],
        "scheduler": engine.lr_scheduler.last_epoch,
        "loss": evaluate(engine),
    }


def save(url: str, kinds: str) -> None:
    for kind in kinds.split(","):
        engine = make_engine(seed=KINDS[kind]["stage"], **KINDS[kind])
        attach(engine, wait=True, progress=False)
        train(engine, 3)
        engine.save_checkpoint(f"{url}/{kind}-{dist.get_world_size()}", client_state={"kind": kind})
        result = result_of(engine)
        report(**{kind: result | {"next": train(engine, 2)}})
        engine.destroy()
    close_managers()


def load(url: str, kinds: str, runs: str) -> None:
    results = {}
    for kind in kinds.split(","):
        engine = make_engine(seed=50, **KINDS[kind])
        attach(engine, progress=False)
        for run in runs.split(","):
            path, client_state = engine.load_checkpoint(f"{url}/{run}")
            assert path is not None
            result = result_of(engine)
            results[f"{run} {kind}"] = result | {"next": train(engine, 2), "client_state": client_state}
            close_managers()
        engine.destroy()
    report(**results)


def main() -> None:
    arguments = sys.argv[1:]
    deepspeed.init_distributed("gloo")
    while arguments:
        command, *arguments = arguments
        if command == "save":
            url, kinds, *arguments = arguments
            save(url, kinds)
        else:
            url, kinds, runs, *arguments = arguments
            load(url, kinds, runs)
    leave_process_group()


if __name__ == "__main__":
    main()
