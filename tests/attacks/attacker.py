"""Powers of an attacker, and reactions of a victim.

The attacker may write any object of the bucket. Digests have no secret: the attacker seals documents as the package
does, and so reaches the code behind the digest. A victim loads without a template, loads into one, and shows the
checkpoint by the command line; the only allowed results are the saved values, or an error of this package.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dcp_remote import RemoteReader, RemoteWriter, load
from dcp_remote.cli.output import Output
from dcp_remote.cli.show import show
from dcp_remote.errors import CorruptCheckpointError, DcpRemoteError
from dcp_remote.format.columns import to_base64
from dcp_remote.format.document import seal, unseal
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.serialization.torch_streams import save
from dcp_remote.storage import MemoryStore
from dcp_remote.storage.memory import MemoryObject
from dcp_remote.testing.wrappers import RecordingStore
from tests.support.columns import decode_column
from tests.support.figures import count
from tests.support.simulated_ranks import LocalShards, State, load_as_ranks, save_as_ranks

# Two blocks and more, so that parts of it are read by the block table.
SHAPE = (400, 230)
NOTES = "0123456789" * 10_000

# Errors quote the attacker's text within one line.
MESSAGE_CHARACTERS_MAX = 4_000

_numbers = itertools.count()


def _state(weight: torch.Tensor | None = None) -> State:
    if weight is None:
        weight = torch.arange(400 * 230, dtype=torch.float32).reshape(SHAPE)
    repeated = [1, 2]
    return {
        "model": {"weight": weight, "bias": torch.ones(5)},
        "sparse": torch.eye(3).to_sparse(),
        "step": 3,
        "notes": NOTES,
        "shared": [repeated, repeated],
    }


def saved(weight: torch.Tensor | None = None) -> dict[str, bytes]:
    """Return the objects of a valid checkpoint, perhaps with other numbers."""
    store = MemoryStore()
    save_as_ranks([_state(weight)], lambda: RemoteWriter(store))
    return {key: found.data for key, found in store.space.objects.items()}


_saved = functools.cache(saved)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A checkpoint in a bucket that the attacker may write to; the victim's requests are recorded."""

    store: MemoryStore
    watched: RecordingStore

    def document(self) -> dict[str, Any]:
        """Return the manifest's document, parsed."""
        document: dict[str, Any] = json.loads(unseal(self.objects[MANIFEST_KEY]))
        return document

    @property
    def objects(self) -> dict[str, bytes]:
        return {key: found.data for key, found in self.store.space.objects.items()}

    def put(self, key: str, data: bytes) -> None:
        """Write an object without the store."""
        objects = self.store.space.objects
        known = objects.get(key) or next(iter(objects.values()))
        objects[key] = replace(known, data=data)

    def commit(self, document: object) -> None:
        """Write a manifest, sealed as the package does."""
        self.put(MANIFEST_KEY, seal(json.dumps(document, separators=(",", ":")).encode()))


def bucket() -> Bucket:
    """Return a new, valid checkpoint with objects of its own."""
    # The name is how the command line finds it.
    store = MemoryStore(f"attack-{next(_numbers)}")
    store.put(MANIFEST_KEY, [b""])
    template: MemoryObject = store.space.objects[MANIFEST_KEY]
    store.space.objects.update({key: replace(template, data=data) for key, data in _saved().items()})
    return Bucket(store, RecordingStore(store))


# ---- victims


def assert_saved(found: State) -> None:
    """Check that a state is exactly the saved one."""
    assert torch.equal(found["model"]["weight"], _state()["model"]["weight"])
    assert torch.equal(found["model"]["bias"], torch.ones(5))
    assert torch.equal(found["sparse"].to_dense(), torch.eye(3))
    assert (found["step"], found["notes"], found["shared"]) == (3, NOTES, [[1, 2], [1, 2]])


def _load(attacked: Bucket) -> None:
    assert_saved(load(attacked.watched))


def _load_into_template(attacked: Bucket) -> None:
    state: State = {
        "model": {"weight": torch.zeros(SHAPE), "bias": torch.zeros(5)},
        "sparse": torch.zeros(3, 3).to_sparse(),
        "step": 0,
        "notes": "",
        "shared": None,
    }
    load_as_ranks([state], lambda: RemoteReader(attacked.watched))
    assert_saved(state)


def _load_rows(attacked: Bucket) -> None:
    rows = torch.zeros(20, SHAPE[1])
    state: State = {"model": {"weight": LocalShards(SHAPE, torch.float32, [((300, 0), rows)])}}
    load_as_ranks([state], lambda: RemoteReader(attacked.watched))
    assert torch.equal(rows, _state()["model"]["weight"][300:320])


def show_text(attacked: Bucket, *, as_json: bool = False, patterns: Sequence[str] = ("*",)) -> str:
    """Return the output of `dcp-remote show`."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        show(Output(as_json=as_json), attacked.store.url, key=patterns)
    return out.getvalue()


LOADS: dict[str, Callable[[Bucket], object]] = {
    "load": _load,
    "template": _load_into_template,
    "rows": _load_rows,
}
LOOKS: dict[str, Callable[[Bucket], object]] = {
    "show": show_text,
    "show of top-level keys": functools.partial(show_text, patterns=()),
    "show --json": functools.partial(show_text, as_json=True),
}


def outcomes(attacked: Bucket, victims: Mapping[str, Callable[[Bucket], object]]) -> dict[str, DcpRemoteError | None]:
    """Return each victim's error, None for exactly the saved values. Any other result fails the test."""
    found: dict[str, DcpRemoteError | None] = {}
    for name, victim in victims.items():
        count("attacks")
        found[name] = _error_of(victim, attacked)
    for error in found.values():
        if error is not None:
            assert str(pickle.loads(pickle.dumps(error))) == str(error)
            assert len(str(error)) < MESSAGE_CHARACTERS_MAX
    return found


def _error_of(victim: Callable[[Bucket], object], attacked: Bucket) -> DcpRemoteError | None:
    try:
        victim(attacked)
    except DcpRemoteError as error:
        return error
    return None


def assert_refused(attacked: Bucket, *kinds: type[DcpRemoteError]) -> None:
    """Check that every victim gets one of these errors; a load requests only the manifest, twice if damaged."""
    attacked.watched.clear()
    found = outcomes(attacked, LOADS | LOOKS)
    for name, error in found.items():
        assert isinstance(error, kinds), (name, error)
    gets = sum(2 if isinstance(found[name], CorruptCheckpointError) else 1 for name in LOADS)
    assert attacked.watched.calls == [("get", MANIFEST_KEY)] * gets, "only the manifest is read"


def assert_harmless(attacked: Bucket) -> None:
    """Check that every victim gets exactly the saved values."""
    for name, error in outcomes(attacked, LOADS | LOOKS).items():
        assert error is None, (name, error)


# ---- numbers in a manifest


def numbers(column: str) -> list[int]:
    values: list[int] = decode_column(column, name="column").tolist()
    return values


def column(values: Sequence[int]) -> str:
    """Return a column, also of invalid numbers."""
    steps = [b - a for a, b in itertools.pairwise([0, *values])]
    return "8:" + to_base64(b"".join((step % 2**64).to_bytes(8, "little") for step in steps))


def with_number(document: dict[str, Any], path: str, index: int, change: Callable[[int], int]) -> dict[str, Any]:
    """Return the document with one number of a column changed; `path` is `part.column`."""
    part, name = path.split(".")
    values = numbers(document[part][name])
    values[index] = change(values[index])
    document[part][name] = column(values)
    return document


# ---- streams


def stream(program: bytes, **storages: bytes) -> bytes:
    """Return a well-formed zip around a pickle; `d0` is the storage `data/0`."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + program + b".")
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/byteorder", b"little")
        for name, data in storages.items():
            archive.writestr(f"archive/data/{name[1:]}", data)
    return packed.getvalue()


def word(text: str) -> bytes:
    """Return the opcode BINUNICODE."""
    return b"X" + len(text.encode()).to_bytes(4, "little") + text.encode()


def integer(value: int) -> bytes:
    """Return the opcode LONG1."""
    data = pickle.encode_long(value)
    return b"\x8a" + bytes([len(data)]) + data


def named(module: str, name: str) -> bytes:
    """Return the opcode GLOBAL."""
    return f"c{module}\n{name}\n".encode()


def call(module: str, name: str, arguments: bytes) -> bytes:
    """Return the opcodes GLOBAL, the arguments as a tuple, REDUCE."""
    return named(module, name) + b"(" + arguments + b"tR"


def tensor(shape: int, stride: int, *, items: int = 1, storage: str = "FloatStorage", key: str = "0") -> bytes:
    """Return the opcodes of a tensor of one dimension over a storage of `items`."""
    identity = b"(" + word("storage") + named("torch", storage) + word(key) + word("cpu") + integer(items) + b"tQ"
    sizes = integer(shape) + b"\x85" + integer(stride) + b"\x85"
    hooks = call("collections", "OrderedDict", b"")
    return call("torch._utils", "_rebuild_tensor_v2", identity + b"K\x00" + sizes + b"\x89" + hooks)


def doubled(times: int) -> bytes:
    """Return the opcodes of a tuple that holds an empty tuple `2 ** times` times, in five bytes for each doubling."""
    steps = (b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(times))
    return b"()q\x00" + b"".join(steps) + b"t"


def innocent_stream() -> bytes:
    """Return what `torch.save` writes of a dict, a tensor, a set and an OrderedDict with attributes."""
    return save({"a": torch.ones(3), "b": {1, 2}, "c": b"ab", "d": (1, (2.5, None))})
