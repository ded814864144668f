"""NameLink: places of a state where the names of a model's parameters are repeated, as below its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim.swa_utils import AveragedModel

from dcp_remote.serialization.module_state import ModelState, OptimizerState, names_of
from dcp_remote.serialization.state_dict import iterate_stateful

# Top-level key that `training_state` gives to averages.
_AVERAGES_KEY = "ema"


@dataclass(frozen=True, slots=True)
class NameLink:
    """Model of a state, and a place of the state that repeats the names of its parameters; beginnings of names."""

    model: str  # `model.`
    copy: str  # `optim.state.`, `optim.state.generator.`, `ema.module.`


def find_links(state: Mapping[str, Any]) -> list[NameLink]:
    """Return the places of a state that repeat the names of its models: states of optimizers, and averages.

    Averages are modules below the top-level key `ema`, and torch's `AveragedModel`s anywhere. An average belongs to the
    model whose parameters have the same names; of several such models, to that with the same last part of its name.
    """
    found = {leaf.name: leaf.value for leaf in iterate_stateful(state)}
    modules = {name: value.model for name, value in found.items() if isinstance(value, ModelState)}
    averages = {
        name: module
        for name, module in modules.items()
        if isinstance(module, AveragedModel) or name.partition(".")[0] == _AVERAGES_KEY
    }
    names = {name: names_of(module) for name, module in modules.items() if name not in averages}
    links: list[NameLink] = []
    for name, value in found.items():
        if isinstance(value, OptimizerState):
            theirs = value.parameter_names()
            for model, own in names.items():
                shared = next((key for key in own if key in theirs), None)
                if shared is not None and theirs[shared].endswith(own[shared]):
                    links.append(NameLink(f"{model}.", f"{name}.state.{theirs[shared].removesuffix(own[shared])}"))
    for name, module in averages.items():
        inner, prefix = (module.module, "module.") if isinstance(module, AveragedModel) else (module, "")
        theirs = names_of(inner)
        alike = [model for model, own in names.items() if set(own.values()) == set(theirs.values())]
        if len(alike) > 1:
            alike = [model for model in alike if model.rpartition(".")[2] == name.rpartition(".")[2]]
        links += [NameLink(f"{model}.", f"{name}.{prefix}") for model in alike[:1]]
    return links
