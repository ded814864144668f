"""Compile the extension that DeepSpeed's communication on CPU needs, for a minute or two; nothing without DeepSpeed."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("deepspeed"):
    from deepspeed.accelerator import get_accelerator

    get_accelerator().create_op_builder("ShareMemCommBuilder").load()
