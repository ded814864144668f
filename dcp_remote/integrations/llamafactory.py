"""LLaMA-Factory: trainings that `python -m dcp_remote.launch` starts.

    DCP_REMOTE_URL=s3://bucket/run python -m dcp_remote.launch llamafactory-cli train x.yaml

LLaMA-Factory's trainers derive from Transformers' Trainer, so its checkpoints are those of `transformers.py`. This
module refuses what trains by other means, and would save to a local folder.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from dcp_remote.errors import InvalidArgumentError

_INSTEAD = "Its checkpoints would stay in output_dir. Start it without dcp_remote.launch, or train by Trainer."


def enable() -> None:
    """Refuse the trainings of LLaMA-Factory that cannot be remote, and let its callbacks do without a local checkpoint.

    Called in every process, before the training begins.
    """
    from llamafactory.train import callbacks, tuner

    get_arguments = tuner.get_train_args

    @functools.wraps(get_arguments)
    def get_supported_arguments(*args: Any, **kwargs: Any) -> Any:
        arguments = get_arguments(*args, **kwargs)
        _require_supported(finetuning=arguments[3])
        return arguments

    def refuse_ray(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise InvalidArgumentError(f"dcp_remote does not support LLaMA-Factory with Ray (USE_RAY). {_INSTEAD}")

    tuner.get_train_args = get_supported_arguments
    tuner._ray_training_function = refuse_ray
    for callback in (callbacks.FixValueHeadModelCallback, callbacks.SaveProcessorCallback):
        callback.on_save = _where_the_folder_is(callback.on_save)


def refuse_v1() -> NoReturn:
    """Refuse the second trainer of LLaMA-Factory, whose checkpoints are written by other means than Trainer's.

    Raises:
        InvalidArgumentError: Always.
    """
    raise InvalidArgumentError(
        f"dcp_remote does not support the v1 trainer of LLaMA-Factory. {_INSTEAD} For the latter, unset USE_V1."
    )


def _require_supported(finetuning: Any) -> None:
    """Refuse what does not train by Transformers' Trainer."""
    if finetuning.stage == "ppo":
        raise InvalidArgumentError(f"dcp_remote does not support stage: ppo of LLaMA-Factory. {_INSTEAD}")
    for setting in ("use_mca", "use_hyper_parallel"):
        if getattr(finetuning, setting, False):
            raise InvalidArgumentError(f"dcp_remote does not support {setting} of LLaMA-Factory. {_INSTEAD}")


def _where_the_folder_is(on_save: Callable[..., Any]) -> Callable[..., Any]:
    """Return a callback that adds files to a checkpoint's folder, but makes none: a restart would resume there."""

    @functools.wraps(on_save)
    def call(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        return on_save(self, args, state, control, **kwargs) if folder.is_dir() else None

    return call
