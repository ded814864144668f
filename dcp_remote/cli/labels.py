"""`dcp-remote pin` and `dcp-remote tag`: what keeps a checkpoint, and by what name it can be loaded."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from dcp_remote.cli.arguments import StorageOptions, Url, argument, flag, parse_step
from dcp_remote.cli.ls import read_run_catalog
from dcp_remote.cli.output import Output
from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.run.labels import give_names, set_pin, take_names
from dcp_remote.run.lookup import find_entry
from dcp_remote.storage import open_store

# Short, because a user waits; long enough to retry the swap while a job saves into the run.
_LABEL_SECONDS = 60.0

_Checkpoint: TypeAlias = Annotated[
    int | str, argument(type=parse_step, metavar="STEP|NAME", help="step or name of the checkpoint, or latest")
]


def pin(
    out: Output,
    url: Url,
    step: _Checkpoint,
    *,
    undo: Annotated[bool, flag("unpin: retention may delete the checkpoint again")] = False,
    storage_options: StorageOptions = None,
) -> None:
    """Exempt a checkpoint of a run from retention.

    Saves replace it only with overwrite=True.
    """
    store = open_store(url, storage_options)
    read_run_catalog(store)  # for its error messages, which explain a wrong URL
    step = set_pin(store, step, pin=not undo, deadline=Deadline(_LABEL_SECONDS))
    state = "not pinned; retention may delete it" if undo else "pinned; retention keeps it"
    out.say(f"{store.url}: step {step} is {state}")
    out.give({"url": store.url, "step": step, "pinned": not undo})


def tag(
    out: Output,
    url: Url,
    step: _Checkpoint,
    name: Annotated[str, argument(help="name to give")],
    *,
    move: Annotated[bool, flag("take the name from the checkpoint that has it")] = False,
    undo: Annotated[bool, flag("take the name from this checkpoint, which stays")] = False,
    storage_options: StorageOptions = None,
) -> None:
    """Give a name to a checkpoint of a run.

    A name is accepted wherever a step is, and retention keeps the checkpoint, unless it was told otherwise.
    """
    if move and undo:
        raise InvalidArgumentError("--move and --undo exclude each other.")
    store = open_store(url, storage_options)
    entry = find_entry(read_run_catalog(store), step, url=store.url)
    deadline = Deadline(_LABEL_SECONDS)
    if not undo:
        number = give_names(store, step, name, move=move, deadline=deadline)
    elif name in entry.names:
        number = entry.step
        take_names(store, name, deadline=deadline, save_id=entry.save_id)
    else:
        names = ", ".join(entry.names) or None
        raise InvalidArgumentError("The checkpoint has no such name.", step=entry.step, name=name, names=names)
    out.say(f'{store.url}: step {number} {"no longer has" if undo else "has"} the name "{name}"')
    out.give({"url": store.url, "step": number, "name": name, "given": not undo})
