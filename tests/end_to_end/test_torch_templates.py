"""States and templates of users of torch's checkpoints, with torch's own folder format as the oracle.

Where torch succeeds, the values are the same; where its planner fails, so does this package, in the same class and
words. Templates that torch's reader refuses without a name, or fills wrongly, are refused by the name of the tensor.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from dcp_remote import RemoteReader, RemoteWriter, load
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.storage import MemoryStore
from dcp_remote.testing import RecordingStore
from tests.end_to_end.test_torch_expectations import State, assert_as_torch, load_into, of_both, outcome, save_and_load
from tests.serialization.test_tags import same
from tests.support.simulated_ranks import load_as_ranks, save_as_ranks, shard
from tests.support.states import equal

pytestmark = pytest.mark.torture(smoke=False)


@pytest.fixture
def store() -> RecordingStore:
    return RecordingStore(MemoryStore())


# ---- templates


# torch converts among these without a warning. It warns of complex to real.
CONVERTED = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
)


@pytest.mark.parametrize("saved", CONVERTED, ids=str)
def test_a_template_of_another_dtype_is_converted_as_by_torch(saved: torch.dtype, tmp_path: Path) -> None:
    """A template of each other dtype, whole or strided, gets rounding, overflow and NaN as `copy_` makes them."""
    values = torch.tensor([[0.0, -0.0, 1.0, -2.5], [300.7, 1e-8, float("nan"), float("inf")]])
    if not saved.is_floating_point:
        values = values.nan_to_num(0, 100).clamp(0 if "u" in str(saved) else -100, 100)

    def template() -> State:
        wholes = {f"whole {dtype}": torch.ones(2, 4).to(dtype) for dtype in CONVERTED}
        return wholes | {f"strided {dtype}": torch.ones(4, 6).to(dtype)[:, ::3].t() for dtype in CONVERTED}

    theirs, ours = of_both(tmp_path, lambda: dict.fromkeys(template(), values.to(saved)), template)
    assert theirs.error is None
    assert theirs.template is not None
    assert ours.template is not None
    for name, expected in theirs.template.items():
        assert same(ours.template[name], expected), name


# Saved state, and template.
MISFITS: dict[str, tuple[State, Callable[[], State]]] = {
    "missing tensor": ({"w": torch.ones(2)}, lambda: {"w": torch.zeros(2), "missing": torch.zeros(2)}),
    "missing object": ({"w": torch.ones(2)}, lambda: {"w": torch.zeros(2), "deep": {"missing": 1}}),
    "not asked for": ({"w": torch.ones(2), "more": 1}, lambda: {"w": torch.zeros(2)}),
    "other shape": ({"w": torch.ones(2)}, lambda: {"w": torch.zeros(3)}),
    "other dimensions": ({"w": torch.tensor(1.0)}, lambda: {"w": torch.zeros(1)}),
    "an object was saved": ({"w": 3}, lambda: {"w": torch.zeros(1)}),
    "a tensor was saved": ({"w": torch.ones(1)}, lambda: {"w": 3}),
    "longer list": ({"w": [torch.ones(1)]}, lambda: {"w": [torch.zeros(1), torch.zeros(1)]}),
    "shorter list": ({"w": [torch.ones(1), torch.ones(1)]}, lambda: {"w": [torch.zeros(1)]}),
    "on the meta device": ({"w": torch.ones(1)}, lambda: {"w": torch.zeros(1, device="meta")}),
    "flattened to one name": ({"a.b": 1, "a": {"b": 2}}, dict),
    "flattened to one name by str": ({"a": {1: 1, "1": 2}}, dict),
    "keys that cannot be sorted": ({"w": 1}, lambda: {"w": 0, 1: 0}),  # type: ignore[dict-item]  # unsortable keys are the test
}


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("name", MISFITS)
def test_a_template_that_does_not_fit_ends_as_with_torch(name: str, partial: bool, tmp_path: Path) -> None:
    """A template that does not fit gives torch's values, or torch's class and words, also with `allow_partial_load`."""
    state, template = MISFITS[name]
    theirs, ours = of_both(
        tmp_path, lambda: dict(state), template, load_planner=lambda: DefaultLoadPlanner(allow_partial_load=partial)
    )
    assert_as_torch(theirs, ours)


def test_what_no_template_can_take_is_named_before_a_byte_is_read(store: RecordingStore) -> None:
    """Sparse for dense, dense for sparse, expanded dimensions and windows are refused by name before any read.

    torch's own errors name no tensor; into an expanded template it would read row after row, each over the one before.
    """
    state = {"dense": torch.ones(3, 3), "sparse": torch.eye(3).to_sparse(), "more": torch.ones(1000)}
    dcp.save(state, storage_writer=RemoteWriter(store))
    templates = {
        "dense": [
            torch.zeros(3, 3).to_sparse(),
            torch.zeros(1, 3).expand(3, 3),
            torch.zeros(3, 1).expand(3, 3),
            torch.zeros(5).unfold(0, 3, 1),
            torch.zeros(9).as_strided((3, 3), (1, 2)),
        ],
        "sparse": [torch.zeros(3, 3), torch.zeros(3, 3).to_sparse_csr()],
    }
    for name, wrong in templates.items():
        for template in wrong:
            store.clear()
            loading = {"more": torch.zeros(1000), name: template}
            failed = outcome(lambda: load_into(store, loading))  # noqa: B023  # called here
            assert isinstance(failed.error, InvalidArgumentError)
            assert failed.error.details["tensor"] == name
            assert store.calls == [("get", "manifest.json")]
    parts = shard(torch.arange(9.0).reshape(3, 3), 3, (3, 1))
    sharded = RecordingStore(MemoryStore())
    save_as_ranks([{"w": part} for part in parts], lambda: RemoteWriter(sharded))
    with pytest.raises(InvalidArgumentError, match="share one place"):
        load_as_ranks([{"w": torch.zeros(1, 3).expand(3, 3)}], lambda: RemoteReader(sharded))


@pytest.mark.parametrize("given", [torch.zeros(3).to_sparse(), torch.zeros(1).expand(3), torch.zeros(3, device="meta")])
def test_what_a_planner_gives_and_cannot_be_written_is_named(given: torch.Tensor, store: RecordingStore) -> None:
    """A planner's tensor that cannot be written, which is known only with the bytes there, is named in the error."""

    class Giving(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            return given

    dcp.save({"w": torch.ones(3)}, storage_writer=RemoteWriter(store))
    failed = outcome(lambda: load_into(store, {"w": torch.zeros(3)}, Giving()))
    assert isinstance(failed.error, InvalidArgumentError)
    assert failed.error.details["tensor"] == "w"


def in_three_bits() -> torch.Tensor:
    return torch.arange(4, dtype=torch.uint8).view(torch.uint3)  # type: ignore[attr-defined]  # not in torch's stubs


def test_a_dtype_that_torch_cannot_convert_is_named(store: RecordingStore) -> None:
    """A template of three bits, for which torch has no copy, is named in the error."""
    dcp.save({"w": torch.ones(4)}, storage_writer=RemoteWriter(store))
    failed = outcome(lambda: load_into(store, {"w": in_three_bits()}))
    assert isinstance(failed.error, InvalidArgumentError)
    assert failed.error.details["tensor"] == "w"
    assert "uint3" in str(failed.error)


def test_an_object_that_torch_cannot_save_is_named(store: RecordingStore) -> None:
    """An object with a tensor of three bits loads, but by a planner that wants a pickle is named in an error."""
    tensor = in_three_bits()
    dcp.save({"pair": (tensor, 1)}, storage_writer=RemoteWriter(store))
    assert torch.equal(load(store)["pair"][0].view(torch.uint8), tensor.view(torch.uint8))
    template: State = {"pair": None}
    dcp.load(template, storage_reader=RemoteReader(store))
    assert torch.equal(template["pair"][0].view(torch.uint8), tensor.view(torch.uint8))

    class Other(DefaultLoadPlanner):
        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            super().load_bytes(read_item, value)

    failed = outcome(lambda: dcp.load({"pair": None}, storage_reader=RemoteReader(store), planner=Other()))
    assert isinstance(failed.error, InvalidArgumentError)
    assert failed.error.details["object"] == "pair"


# ---- states


def freed(tensor: torch.Tensor, *, kept_bytes: int) -> torch.Tensor:
    """Free a tensor's memory, as FSDP does with parameters."""
    tensor.untyped_storage().resize_(kept_bytes)
    return tensor


WITHOUT_DATA: dict[str, Callable[[], torch.Tensor]] = {
    "on the meta device": lambda: torch.ones(1000, device="meta"),
    "freed": lambda: freed(torch.ones(1000), kept_bytes=0),
    "freed but for a part": lambda: freed(torch.ones(1000), kept_bytes=8),
    "freed, transposed": lambda: freed(torch.ones(10, 100).t(), kept_bytes=8),
    "never there": lambda: torch._efficientzerotensor(1000),
}


@pytest.mark.parametrize("name", WITHOUT_DATA)
def test_a_tensor_without_data_is_refused_by_name(name: str, store: RecordingStore) -> None:
    """A tensor without data, in the state or the template, is named in the error; torch crashes, or names none."""
    saving = outcome(lambda: save_and_load(store, {"w": WITHOUT_DATA[name]()}, {}))
    assert store.count("put") == 0
    template = WITHOUT_DATA[name]()
    dcp.save({"w": torch.ones(template.shape)}, storage_writer=RemoteWriter(store))
    store.clear()
    planner = DefaultLoadPlanner()
    planner.set_up_planner({"w": torch.ones(template.shape)}, RemoteReader(store).read_metadata())
    # torch makes memory for a template on the meta device, or fails, before it asks a reader.
    planner.state_dict = {"w": template}
    reader = RemoteReader(store)
    reader.read_metadata()
    with pytest.raises(InvalidArgumentError) as loading:
        reader.read_data(planner.create_local_plan(), planner)
    assert {verb for verb, _ in store.calls} == {"get"}
    for error in (saving.error, loading.value):
        assert isinstance(error, InvalidArgumentError)
        assert error.details["tensor"] == "w"


NAMES = [
    "",
    ".",
    "..",
    "a..b",
    ".a",
    "/",
    "../x",
    "\n\0",
    "é😀",
    "x" * 20_000,
    " ",
    "__metadata__",
    "$tuple",
    "%2F",
    "a@0",
    "0",
]


def nested(levels: int, leaf: object) -> Any:
    value = leaf
    for level in range(levels):
        value = {"k": value} if level % 2 else [value, torch.ones(1)]
    return value


base = torch.arange(24.0)

# State and template; torch's folder format is the oracle for values and errors.
STATES: dict[str, tuple[Callable[[], State], Callable[[], State]]] = {
    "empty": (dict, dict),
    "empty containers": (
        lambda: {"a": {}, "b": [], "c": [{}], "d": (), "e": {"f": {}}},
        lambda: {"a": {}, "b": [1], "c": [{}], "d": 0, "e": {}},
    ),
    "0-d and empty tensors": (
        lambda: {"a": torch.tensor(1.5), "b": torch.ones(0), "c": torch.ones(3, 0, 2), "d": torch.ones(1, 1, 1)},
        lambda: {"a": torch.tensor(0.0), "b": torch.ones(0), "c": torch.ones(3, 0, 2), "d": torch.zeros(1, 1, 1)},
    ),
    "parameters": (
        lambda: {"a": nn.Parameter(torch.ones(3)), "b": torch.ones(2, requires_grad=True), "c": nn.Buffer(base)},
        lambda: {"a": nn.Parameter(torch.zeros(3)), "b": torch.zeros(2), "c": torch.zeros(24, requires_grad=True)},
    ),
    "results of a computation": (
        lambda: {"a": torch.ones(3, requires_grad=True) * 2},
        lambda: {"a": torch.zeros(3, requires_grad=True) * 2},
    ),
    "one memory": (
        lambda: {"a": base, "b": base[4:8], "c": base.view(4, 6).t(), "d": base.view(4, 6)[:, ::2], "e": base},
        lambda: {
            "a": torch.zeros(24),
            "b": torch.zeros(4),
            "c": torch.zeros(6, 4),
            "d": torch.zeros(3, 4).t(),
            "e": torch.zeros(24),
        },
    ),
    "expanded and flipped": (
        lambda: {"a": torch.arange(3.0).expand(4, 3), "b": base.flip(0), "c": base.view(2, 3, 4).permute(2, 0, 1)},
        lambda: {"a": torch.zeros(3, 4).t(), "b": torch.zeros(48)[::2], "c": torch.zeros(2, 3, 4).permute(2, 0, 1)},
    ),
    "lazily conjugated": (
        lambda: {"a": torch.tensor([1 + 2j, 3j]).conj(), "b": torch.tensor([1 + 2j]).conj().imag},
        lambda: {"a": torch.zeros(2, dtype=torch.complex64), "b": torch.zeros(1)},
    ),
    "channels last": (
        lambda: {"a": torch.randn(2, 3, 4, 5, generator=seeded()).to(memory_format=torch.channels_last)},
        lambda: {"a": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)},
    ),
    "keys of other types": (
        lambda: {"a": {2: 3, None: 4, 2.5: torch.ones(1), (1, 2): 5, True: 6}},
        lambda: {"a": {2: 0, None: 0, 2.5: torch.zeros(1), (1, 2): 0, True: 0}},
    ),
    "names": (
        lambda: {name: torch.full((3,), float(n)) for n, name in enumerate(NAMES)} | {"o": dict.fromkeys(NAMES, (1,))},
        lambda: {name: torch.zeros(3) for name in NAMES} | {"o": dict.fromkeys(NAMES, 0)},
    ),
    "nested deep": (lambda: {"d": nested(200, 7)}, lambda: {"d": nested(200, 0)}),
    "nested deep, a tensor": (lambda: {"d": nested(201, base)}, lambda: {"d": nested(201, torch.zeros(24))}),
}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize("name", STATES)
def test_states_come_back_as_from_torch(name: str, tmp_path: Path) -> None:
    """States load as with torch, into templates of other memory layouts, which keep their strides."""
    theirs, ours = of_both(tmp_path, *STATES[name])
    assert theirs.error is None
    assert_as_torch(theirs, ours)


def test_a_lazily_conjugated_template_is_filled(store: RecordingStore) -> None:
    """A lazily conjugated template shows the saved values; its memory holds the conjugate."""
    saved, memory = torch.tensor([1 + 2j, -3j]), torch.zeros(2, dtype=torch.complex64)
    save_and_load(store, {"w": saved}, {"w": memory.conj()})
    assert torch.equal(memory, torch.tensor([1 - 2j, 3j]))


def test_a_loaded_parameter_is_the_one_of_the_template(store: RecordingStore) -> None:
    """A parameter is loaded in place: it is the module's own, with its gradient and `requires_grad`."""
    model, loaded = nn.Linear(3, 2), nn.Linear(3, 2)
    before = list(loaded.parameters())
    before[1].requires_grad_(False)
    loaded(torch.ones(1, 3)).sum().backward()
    grad = before[0].grad
    template = {"model": loaded.state_dict(keep_vars=True)}
    save_and_load(store, {"model": model.state_dict()}, template)
    assert all(one is other for one, other in zip(loaded.parameters(), before, strict=True))
    assert [parameter.requires_grad for parameter in before] == [True, False]
    assert before[0].grad is grad
    assert equal([p.data for p in model.parameters()], [p.data for p in before])
