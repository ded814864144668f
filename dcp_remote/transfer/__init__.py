"""Checkpoints of other formats: into a run, and out of one.

source opens a checkpoint of torch, Hugging Face or `torch.save` as a state whose tensors are read piece by piece;
importing saves such a state to a run; exporting writes a checkpoint as safetensors or as a folder of torch.
"""

from __future__ import annotations

from dcp_remote.transfer.exporting import export_checkpoint
from dcp_remote.transfer.importing import import_checkpoint

__all__ = ["export_checkpoint", "import_checkpoint"]
