"""LLaMA-Factory: trainings that `python -m dcp_remote.launch` starts.

    DCP_REMOTE_URL=s3://bucket/run python -m dcp_remote.launch llamafactory-cli train x.yaml

LLaMA-Factory's trainers derive from Transformers' Trainer, so its checkpoints are those of `transformers.py`. This
module refuses what trains by other means, and would save to a local folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from dcp_remote.errors import InvalidArgumentError
from dcp_remote.integrations.wrappers import replaces

_INSTEAD = "Its checkpoints would stay in output_dir. Start it without dcp_remote.launch, or train by Trainer."


def enable() -> None:
    """Refuse the trainings of LLaMA-Factory that cannot be remote, and let its callbacks do without a local checkpoint.

    Called in every process, before the training begins.
    """
    from llamafactory.train import callbacks, tuner

    @replaces(tuner, "get_train_args")
    def get_supported_arguments(get_arguments: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = get_arguments(*args, **kwargs)
        _require_supported(finetuning=arguments[3])
        return arguments

    def refuse_ray(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise InvalidArgumentError(f"dcp_remote does not support LLaMA-Factory with Ray (USE_RAY). {_INSTEAD}")

    tuner._ray_training_function = refuse_ray
    for callback in (callbacks.FixValueHeadModelCallback, callbacks.SaveProcessorCallback):
        replaces(callback, "on_save")(_save_where_the_folder_is)


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


def _save_where_the_folder_is(on_save: Any, self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
    """Let a callback add files to a checkpoint's folder, but make none: a restart would resume there."""
    folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
    return on_save(self, args, state, control, **kwargs) if folder.is_dir() else None
