"""`dcp-remote tag`."""

from __future__ import annotations

from typing import Annotated

from dcp_remote.cli.arguments import StorageOptions, Url, argument, flag, parse_step
from dcp_remote.cli.ls import read_run_catalog
from dcp_remote.cli.output import Output
from dcp_remote.cli.pin import LABEL_SECONDS
from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.run.labels import give_names, take_names
from dcp_remote.run.lookup import find_entry
from dcp_remote.storage import open_store


def tag(
    out: Output,
    url: Url,
    step: Annotated[
        int | str, argument(type=parse_step, metavar="STEP|NAME", help="step or name of the checkpoint, or latest")
    ],
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
    deadline = Deadline(LABEL_SECONDS)
    if not undo:
        number = give_names(store, step, name, move=move, deadline=deadline)
    elif name in entry.names:
        number = entry.step
        take_names(store, name, deadline=deadline)
    else:
        names = ", ".join(entry.names) or None
        raise InvalidArgumentError("The checkpoint has no such name.", step=entry.step, name=name, names=names)
    out.say(f'{store.url}: step {number} {"no longer has" if undo else "has"} the name "{name}"')
    out.give({"url": store.url, "step": number, "name": name, "given": not undo})
