"""Axolotl: checkpoints of a training in object storage, by lines of its YAML.

plugins:
  - dcp_remote.integrations.axolotl.RemoteCheckpointPlugin
remote_checkpoint_url: s3://bucket/run
auto_resume_from_checkpoints: true
"""

from __future__ import annotations

import difflib
import functools
import json
import logging
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel
from safetensors import safe_open
from transformers import TrainerCallback

from dcp_remote import Run, export_checkpoint, is_remote, open_run
from dcp_remote.errors import DcpRemoteError, InvalidArgumentError
from dcp_remote.integrations.transformers import remote

logger = logging.getLogger(__name__)

# Axolotl drops keys that it does not know, so that training would go on without the setting.
_SIMILARITY_MIN = 0.8

# Options that are credentials: Axolotl prints the YAML, and copies it into the model card.
_SECRET = re.compile("secret|token|password|key$|key_id|connection_string", re.IGNORECASE)

_TOKENS_FILE = "tokens_state.json"


class RemoteCheckpointArgs(BaseModel):
    """Keys of the YAML.

    Attributes:
        remote_checkpoint_url: URL of the run, as for `CheckpointManager`.
        remote_checkpoint_storage_options: Options of the store by the names of boto3 and fsspec, such as
            `endpoint_url`; None leaves them to the environment, to which credentials always belong.
        remote_checkpoint_save_frozen_base: True to save the frozen parameters below an adapter as well.
    """

    remote_checkpoint_url: str | None = None
    remote_checkpoint_storage_options: dict[str, Any] | None = None
    remote_checkpoint_save_frozen_base: bool = False


class RemoteCheckpointPlugin(BasePlugin):
    """Plugin that makes Axolotl's trainer save to a run, and resume from it; see `integrations.transformers.remote`.

    With `auto_resume_from_checkpoints: true` training goes on from the newest checkpoint of the run, if there is one;
    `resume_from_checkpoint:` takes a URL. `save_total_limit` is the retention. `output_dir` stays local: the final
    model, logs and the tokenizer are written there.
    """

    def register(self, cfg: Mapping[str, Any]) -> None:
        """Check the keys of the YAML, before Axolotl validates them, and before it makes a folder; no request.

        Raises:
            InvalidArgumentError: `remote_checkpoint_url` is absent or wrong; a key is nearly that of this plugin;
                `output_dir` is a URL; credentials stand in the YAML; or `relora` is on.
        """
        known = RemoteCheckpointArgs.model_fields
        for key in map(str, cfg):
            near = difflib.get_close_matches(key, known, 1, _SIMILARITY_MIN)
            if key not in known and (near or key.startswith("remote_checkpoint")):
                raise InvalidArgumentError(
                    "The YAML has a key that neither Axolotl nor this plugin knows. Correct the key.",
                    key=key,
                    known=", ".join(near or known),
                )
        url = cfg.get("remote_checkpoint_url")
        if not url:
            raise InvalidArgumentError(
                "The YAML names the plugin, but no run. Add remote_checkpoint_url: s3://bucket/run."
            )
        if "://" not in str(url):
            raise InvalidArgumentError("remote_checkpoint_url must be a URL, such as s3://bucket/run.", url=url)
        options = cfg.get("remote_checkpoint_storage_options") or {}
        secrets = [str(name) for name in options if _SECRET.search(str(name))]
        if secrets:
            raise InvalidArgumentError(
                "Credentials must not stand in the YAML, which Axolotl prints and copies into the model card. Set them "
                "in the environment, as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
                options=", ".join(secrets),
            )
        open_run(url, storage_options=options or None)  # raises where the URL or an option is wrong
        if is_remote(cfg.get("output_dir")):
            raise InvalidArgumentError(
                "output_dir must be a local folder, for logs and the final model: Axolotl would make a local folder "
                "of the name s3:. Checkpoints go to remote_checkpoint_url.",
                output_dir=cfg["output_dir"],
            )
        if cfg.get("relora"):
            raise InvalidArgumentError(
                "ReLoRA changes the frozen base, which it writes to local folders: its checkpoints cannot go to object "
                "storage. Remove relora, or this plugin."
            )
        if cfg.get("save_strategy") in (False, "no"):
            logger.warning("%s: with save_strategy: no, no checkpoint is saved", url)

    def get_input_args(self) -> str:
        """Return the class of this plugin's keys, by its full name."""
        return f"{RemoteCheckpointArgs.__module__}.{RemoteCheckpointArgs.__qualname__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Make the trainer save to the run, and choose what training goes on from; one request per rank at most.

        Raises:
            InvalidArgumentError: The run has checkpoints, and the YAML does not say to go on from them; or `remote`
                does not support the trainer.
        """
        url, options = cfg.remote_checkpoint_url, dict(cfg.remote_checkpoint_storage_options or {}) or None
        remote(
            trainer,
            url,
            resume=bool(cfg.auto_resume_from_checkpoints),
            save_frozen_base=bool(cfg.remote_checkpoint_save_frozen_base),
            storage_options=options,
        )
        trainer.add_callback(_TokenCounts(trainer))
        # Axolotl gathers the adapter of a quantized model under FSDP2 in each save; the run holds the adapter anyway.
        trainer._save_fsdp2_quantized_lora_adapter = lambda *_args: False
        # Axolotl would make the final model from the newest local checkpoint, which is none of this training.
        if _is_final_model_sharded(cfg):
            trainer.save_model = functools.partial(_save_model, trainer, cfg, trainer.save_model)
        _choose_start(cfg, trainer, open_run(url, storage_options=options))


class _TokenCounts(TrainerCallback):
    """Callback that sets the counts of trained tokens; Axolotl reads them from a folder that its YAML names."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the counts of the checkpoint that is resumed, if they were saved."""
        resumed = self._trainer._remote.folder / "resumed" / f"checkpoint-{state.global_step}" / _TOKENS_FILE
        if resumed.exists():
            counts = json.loads(resumed.read_text())
            state.tokens = {name: torch.tensor(count) for name, count in counts.items()}


def _choose_start(cfg: Any, trainer: Any, run: Run) -> None:
    """Let the run's newest checkpoint go before other places from which the YAML, or Axolotl, would start.

    Raises:
        InvalidArgumentError: The run has checkpoints, and the YAML does not say to go on from them.
    """
    start, goes_on = cfg.resume_from_checkpoint, bool(cfg.auto_resume_from_checkpoints)
    if f"{start}/".startswith(f"{run.url}/"):
        return
    if goes_on and start is None and not any(Path(cfg.output_dir).glob("checkpoint-*")):
        return
    newest = run.latest()
    if newest is None:
        return
    if goes_on:
        cfg.resume_from_checkpoint, cfg.auto_resume_from_checkpoints = None, False
    elif trainer.args.save_strategy != "no":
        raise InvalidArgumentError(
            "This run has checkpoints already. Set auto_resume_from_checkpoints: true to go on from the newest; or use "
            "another remote_checkpoint_url.",
            url=run.url,
            newest=newest.step,
        )


def _is_final_model_sharded(cfg: Any) -> bool:
    fsdp = cfg.fsdp_config or {}
    return bool((fsdp.get("final_state_dict_type") or fsdp.get("state_dict_type")) == "SHARDED_STATE_DICT")


def _save_model(
    trainer: Any,
    cfg: Any,
    save_model: Callable[..., None],
    output_dir: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Write the model, as `Trainer.save_model`; the final one from the run, by the first rank."""
    save_model(output_dir, *args, **kwargs)
    if output_dir is None or output_dir != cfg.output_dir:
        return
    options, state = dict(cfg.remote_checkpoint_storage_options or {}) or None, trainer.state
    run = open_run(cfg.remote_checkpoint_url, storage_options=options)
    step = state.best_global_step if trainer.args.load_best_model_at_end else state.global_step
    failure: Exception | None = None
    if trainer.args.process_index == 0:
        try:
            if cfg.adapter or not run.exists(step):
                logger.warning(
                    "%s: %s gets no final model: take it from the run, if step %d is there",
                    *(run.url, output_dir, step),
                )
            else:
                for name in ("model.safetensors", "model.safetensors.index.json"):
                    (Path(output_dir) / name).unlink(missing_ok=True)  # of an earlier training: read in place of these
                # Into a folder of its own, since an export goes to an empty one.
                with tempfile.TemporaryDirectory(dir=output_dir) as draft:
                    for path in export_checkpoint(run.url, draft, step=step, storage_options=options, progress=False):
                        if ".safetensors" in path.name:
                            path.replace(Path(output_dir) / path.name)
                # Without an index, Axolotl would put the newest local checkpoint in place of these weights.
                index = Path(output_dir) / "model.safetensors.index.json"
                if not index.exists():
                    with safe_open(Path(output_dir) / "model.safetensors", "pt") as weights:
                        names = weights.keys()
                    weight_map = dict.fromkeys(names, "model.safetensors")
                    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        except Exception as error:  # noqa: BLE001  # raised below, on all ranks
            failure = error
    # As text, because not every error can be pickled: then the other ranks would wait for ever.
    (text,) = broadcast_object_list([failure and f"{type(failure).__name__}: {failure}"])
    if failure is not None:
        raise failure
    if text is not None:
        raise DcpRemoteError("The first rank could not write the final model.", output_dir=output_dir, cause=text)
