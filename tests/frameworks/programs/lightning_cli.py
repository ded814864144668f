"""Train by LightningCLI, whose configuration alone says that checkpoints go to a run; then resume to more steps."""

from __future__ import annotations

import sys
from pathlib import Path

from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from tests.support.rank_programs import leave_process_group, report

# The callback comes before the strategy, which names the integration.
CONFIG = """
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  enable_progress_bar: false
  limit_val_batches: 1
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args:
        dirpath: {url}
        save_last: true
        every_n_train_steps: 2
  strategy:
    class_path: dcp_remote.integrations.lightning.RemoteSingleDeviceStrategy
    init_args:
      device: cpu
      checkpoint_settings: {{arrival_seconds: 20}}
"""


def main() -> None:
    """Run the command line twice, and report the steps at which each training ended."""
    Path("config.yaml").write_text(CONFIG.format(url=sys.argv[1]))
    ended = []
    for arguments in (["--trainer.max_steps=4"], ["--trainer.max_steps=6", "--ckpt_path=last"]):
        cli = LightningCLI(
            BoringModel,
            args=["fit", "--config", "config.yaml", *arguments],
            save_config_kwargs={"overwrite": True, "config_filename": "saved.yaml"},
        )
        ended.append(cli.trainer.global_step)
    report(ended=ended)
    leave_process_group()


if __name__ == "__main__":
    main()
