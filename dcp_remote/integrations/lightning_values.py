"""Values of a Lightning checkpoint beside its tensors, as plain values that a run stores."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from dcp_remote import as_plain
from dcp_remote.errors import UnsafeObjectError

logger = logging.getLogger(__name__)

# Hyperparameters of module and data module, by the keys of Lightning.
HYPERPARAMETER_KEYS = ("hyper_parameters", "datamodule_hyper_parameters")
# Class of the hyperparameters, which only code can load.
_TYPE_KEYS = ("hparams_type", "datamodule_hparams_type")

# Hyperparameters of which a warning was logged.
_reported: set[str] = set()


def to_plain(checkpoint: Mapping[str, Any], *, is_strict: bool) -> dict[str, Any]:
    """Return the values of a checkpoint as plain values; each hyperparameter as the closest that can be stored.

    A hyperparameter that is a dataclass, an OmegaConf node or another object with fields becomes a dict or list of
    these; one without fields, such as a function, its text, and a warning names it once.

    Args:
        checkpoint: Values by key, without tensors of model and optimizers.
        is_strict: False to leave all but hyperparameters as they are, for a manager with `allow_pickle`.

    Raises:
        UnsafeObjectError: A value that is no hyperparameter has no fields; see `as_plain`.
    """
    plain: dict[str, Any] = {}
    for key, value in checkpoint.items():
        if key in HYPERPARAMETER_KEYS:
            plain[key] = {str(name): _plain_hyperparameter(f"{key}.{name}", item) for name, item in value.items()}
        elif key not in _TYPE_KEYS:
            plain[key] = as_plain(value) if is_strict else value
    return plain


def _plain_hyperparameter(name: str, value: Any) -> Any:
    try:
        return as_plain(value)
    except UnsafeObjectError as error:
        if isinstance(value, Mapping):
            return {str(key): _plain_hyperparameter(f"{name}.{key}", item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [_plain_hyperparameter(f"{name}.{number}", item) for number, item in enumerate(value)]
        if name not in _reported:
            _reported.add(name)
            logger.warning("Hyperparameter %s is saved as text, because %s", name, error)
        return repr(value)


def metrics_of(trainer: Any) -> dict[str, float]:
    """Return the numbers that were logged, without those that are not finite."""
    logged = trainer.callback_metrics.items()
    numbers = {name: float(value) for name, value in logged if getattr(value, "numel", lambda: 1)() == 1}
    return {name: number for name, number in numbers.items() if math.isfinite(number)}
