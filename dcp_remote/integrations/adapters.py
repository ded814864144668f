"""Adapters of PEFT: models of which a checkpoint holds what is trained, without the frozen base."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcp_remote import ModelState
from dcp_remote.integrations.wrappers import canonical


class AdapterState(ModelState):
    """State of a PEFT model without its frozen base: adapters, trained parameters and buffers."""

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shards, which share memory with the model."""
        left_out = self._base_names()
        return {name: value for name, value in super().state_dict().items() if name not in left_out}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set what `state_dict` returns; a restore has refused a checkpoint that lacks some."""
        # In place of the values that were read, which share memory with the model.
        self.model.load_state_dict(state_dict, strict=False)

    def _base_names(self) -> set[str]:
        """Return the names of frozen parameters that are no part of an adapter, without those of wrappers."""
        prefixes = _adapter_prefixes(self.model)
        names = set()
        for wrapped_name, parameter in self.model.named_parameters(remove_duplicate=False):
            name = canonical(wrapped_name)
            if not parameter.requires_grad and not any(part.startswith(prefixes) for part in name.split(".")):
                names.add(name)
        return names


def is_peft(model: Any) -> bool:
    """Return whether a model is one of PEFT."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def _adapter_prefixes(model: Any) -> tuple[str, ...]:
    """Return the beginnings of the names of modules that are adapters."""
    tuner = getattr(model, "base_model", None)
    prefix = getattr(tuner, "prefix", None)
    return ("modules_to_save", "prompt_encoder", *((prefix,) if isinstance(prefix, str) and prefix else ()))
