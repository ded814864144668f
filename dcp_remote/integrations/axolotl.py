"""Axolotl: checkpoints of a training in object storage, by lines of its YAML.

plugins:
  - dcp_remote.integrations.axolotl.RemoteCheckpointPlugin
remote_checkpoint_url: s3://bucket/run
auto_resume_from_checkpoints: true
"""

from __future__ import annotations

import logging
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from dcp_remote.errors import InvalidArgumentError
from dcp_remote.integrations.transformers import remote

logger = logging.getLogger(__name__)


class RemoteCheckpointArgs(BaseModel):
    """Keys of the YAML.

    Attributes:
        remote_checkpoint_url: URL of the run, as for `CheckpointManager`.
        remote_checkpoint_storage_options: Options of the store by the names of boto3 and fsspec, such as
            `endpoint_url`; None leaves them to the environment.
        remote_checkpoint_save_frozen_base: True to save the frozen parameters below an adapter as well.
    """

    remote_checkpoint_url: str | None = None
    remote_checkpoint_storage_options: dict[str, Any] | None = None
    remote_checkpoint_save_frozen_base: bool = False


class RemoteCheckpointPlugin(BasePlugin):  # type: ignore[misc]  # Axolotl may not be installed
    """Plugin that makes Axolotl's trainer save to a run, and resume from it; see `integrations.transformers.remote`.

    With `auto_resume_from_checkpoints: true` training goes on from the newest checkpoint, if there is one;
    `resume_from_checkpoint:` takes a URL. `save_total_limit` is the retention. `output_dir` stays local: the final
    model, logs and the tokenizer are written there.
    """

    def get_input_args(self) -> str:
        """Return the class of this plugin's keys, by its full name."""
        return f"{RemoteCheckpointArgs.__module__}.{RemoteCheckpointArgs.__qualname__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Make the trainer save to the run.

        Raises:
            InvalidArgumentError: The YAML has no `remote_checkpoint_url`, or a wrong one.
        """
        if not cfg.remote_checkpoint_url:
            raise InvalidArgumentError(
                "The YAML names the plugin, but no run. Add remote_checkpoint_url: s3://bucket/run."
            )
        options = cfg.remote_checkpoint_storage_options
        remote(
            trainer,
            cfg.remote_checkpoint_url,
            resume=bool(cfg.auto_resume_from_checkpoints),
            save_frozen_base=bool(cfg.remote_checkpoint_save_frozen_base),
            storage_options=dict(options) if options else None,
        )
        fsdp = cfg.fsdp_config or {}
        if (fsdp.get("final_state_dict_type") or fsdp.get("state_dict_type")) == "SHARDED_STATE_DICT":
            logger.warning(
                "%s: Axolotl makes its final model from a local sharded checkpoint, which is not written here. Set "
                "fsdp_config.final_state_dict_type: FULL_STATE_DICT for a final model in output_dir.",
                cfg.remote_checkpoint_url,
            )
