"""Options of a load: patterns, other names, and the paths of renamed entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from dcp_remote.errors import InvalidArgumentError
from dcp_remote.loading.load_options import LoadOptions, rename_path
from dcp_remote.serialization.name_links import NameLink

NAMES = ["model.lm_head.weight", "model.lm_header", "model.a.weight", "ema.a.weight", "step"]


HEAD, HEADER, WEIGHT, AVERAGE, STEP = NAMES


@pytest.mark.parametrize(
    ("rename", "expected"),
    [
        ({"model.lm_head": "model.head"}, {HEAD: "model.head.weight"}),
        ({"model.lm_head.": "model.head."}, {HEAD: "model.head.weight"}),
        (
            {"model": "net", "model.a": "net.b"},
            {HEAD: "net.lm_head.weight", HEADER: "net.lm_header", WEIGHT: "net.b.weight"},
        ),
        ({"model": None, "ema": "model"}, {HEAD: None, HEADER: None, WEIGHT: None, AVERAGE: WEIGHT}),
        ({"ema": "", "step": "n"}, {AVERAGE: "a.weight", STEP: "n"}),
        (lambda name: name.replace("lm_", ""), {HEAD: "model.head.weight", HEADER: "model.header"}),
        (lambda name: None if name == "step" else name, {STEP: None}),
    ],
)
def test_renamed(rename: Any, expected: Mapping[str, str | None]) -> None:
    """Names and prefixes up to a dot, the longest first; None leaves an entry out; or a function."""
    wanted = {name: new for name in NAMES if (new := expected.get(name, name)) is not None}
    assert LoadOptions(rename=rename).rename_entries(NAMES)[0] == wanted


@pytest.mark.parametrize(
    ("rename", "details"),
    [
        ({"model.lm_haed": "model.head"}, {"name": "model.lm_haed", "near": f"model.lm_head, {HEADER}, {HEAD}"}),
        ({"ema.module": "model"}, {"name": "ema.module", "near": "ema"}),
        ({"model.lm_he": "x"}, {"name": "model.lm_he", "near": f"model.lm_head, {HEADER}, {HEAD}"}),
        ({"ema": "model"}, {"name": "model.a.weight", "entries": "model.a.weight, ema.a.weight"}),
        ({"ema.a.weight": ""}, {"name": "ema.a.weight"}),
        (lambda name: 1, {"name": "model.lm_head.weight"}),
    ],
)
def test_names_that_cannot_be(rename: Any, details: dict[str, str]) -> None:
    """A name that no entry has comes with similar ones; two entries of one name are both named."""
    with pytest.raises(InvalidArgumentError) as caught:
        LoadOptions(rename=rename).rename_entries(NAMES)
    assert caught.value.details == details


@pytest.mark.parametrize(
    ("rename", "expected"),
    [
        ({"model.a": "model.b"}, "model.b.w model.ab.w optim.state.b.w.m optim.state.ab.w.m ema.module.b.w other.a.w"),
        ({"model.a.w": "model.b.w"}, "model.b.w model.ab.w optim.state.b.w.m optim.state.ab.w.m ema.module.b.w"),
        ({"model.a": None}, "- model.ab.w - optim.state.ab.w.m - other.a.w"),
        ({"model.a": "model.b", "optim": "o"}, "model.b.w model.ab.w o.state.a.w.m o.state.ab.w.m ema.module.b.w"),
        ({"model.a": "model.ab", "model.ab": "model.a"}, "model.ab.w model.a.w optim.state.ab.w.m optim.state.a.w.m"),
        ({"model.a": "model.b", "optim.state.a": "optim.state.c"}, "model.b.w model.ab.w optim.state.c.w.m"),
        ({"model": "net"}, "net.a.w net.ab.w optim.state.a.w.m"),
        ({"other.a": "model.b", "other": "model", "model": None}, "- - optim.state.b.w.m optim.state.ab.w.m"),
        (lambda name: name.replace("model.a.", "model.b."), "model.b.w model.ab.w optim.state.a.w.m"),
    ],
)
def test_copies_of_renamed_parameters(rename: Any, expected: str) -> None:
    """Places that repeat a parameter's name follow a mapping below the model, where the mapping does not name them."""
    names = [
        "model.a.w",
        "model.ab.w",
        "optim.state.a.w.m",
        "optim.state.ab.w.m",
        "ema.module.a.w",
        "other.a.w",
        "other.c",
    ]
    links = [NameLink("model.", "optim.state."), NameLink("model.", "ema.module.")]
    renamed, _ = LoadOptions(rename=rename).rename_entries(names, links)
    wanted = expected.split()
    assert [renamed.get(name, "-") for name in names[: len(wanted)]] == wanted


def test_a_function_that_raises() -> None:
    """Raise in `rename`: the error names the entry, and has the cause."""
    with pytest.raises(InvalidArgumentError, match="rename raised an error") as caught:
        LoadOptions(rename=lambda _: str(1 / 0)).rename_entries(NAMES)
    assert caught.value.details == {"name": NAMES[0], "error": "ZeroDivisionError: division by zero"}
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_chosen() -> None:
    """`exclude` takes precedence over `include`; each pattern that matches nothing is returned."""
    choose = [
        LoadOptions(),
        LoadOptions(include="model.*", exclude=["*weight"]),
        LoadOptions(include=[], exclude="x"),
    ]
    assert [list(one.choose(NAMES)[0]) for one in choose] == [NAMES, ["model.lm_header"], []]
    assert [one.choose(NAMES)[1] for one in choose] == [[], [], ["x"]]
    assert LoadOptions(include=["modle.*", "step"], exclude="*wieght").choose(NAMES)[1] == ["modle.*", "*wieght"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"missing": "ignore"},
        {"unexpected": True},
        {"dtype": "float32"},
        {"include": 3},
        {"exclude": [1]},
        {"rename": "a"},
        {"rename": {"a": 1}},
    ],
)
def test_wrong_options(wrong: dict[str, Any]) -> None:
    """Each is refused by its name."""
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        LoadOptions(**wrong)


@pytest.mark.parametrize(
    ("path", "new", "expected"),
    [
        (("model", "layer.weight"), "model.block.weight", ("model", "block.weight")),
        (("model", "module.layer.weight"), "model.layer.weight", ("model", "layer.weight")),
        (("ema", "model", "w.x"), "model.w.x", ("model", "w.x")),
        (("model", "w.x"), "ema.model.w.x", ("ema", "model", "w.x")),
        (("a", "w"), "b.w", ("b", "w")),
        (("a", "w"), "w", ("w",)),
        (("w",), "model.w", ("model", "w")),
        (("w",), "v", ("v",)),
        (("w",), "model.v", ("model.v",)),
        (("optim", "param_groups", 0, "lr"), "optimizer.param_groups.0.lr", ("optimizer", "param_groups", 0, "lr")),
        (("layers", 0, "w"), "layers.1.w", ("layers", 1, "w")),
        (("per_rank", "0", "random"), "per_rank.0.rng", ("per_rank", "0", "rng")),
    ],
)
def test_paths_of_renamed_entries(path: tuple[str | int, ...], new: str, expected: tuple[str | int, ...]) -> None:
    """Parts that stay are kept whole, with their dots; what lies between replaces one part, or is split."""
    assert rename_path(path, new) == expected
