"""Encoding of tensors and Python objects as bytes, and decoding without trusting any pickle.

tensors handles the elements of tensors, and local_boxes tensors that a framework shards itself. objects encodes all
other values, by tags of Python's, user-defined, numpy's and torch's types (*_tags). torch_streams and pickle_validator
read `torch.save` streams without executing them. state_dict prepares state dicts for torch's planner and takes loaded
ones apart.
"""

from __future__ import annotations

__all__ = [
    "class_tags",
    "local_boxes",
    "numpy_tags",
    "objects",
    "pickle_validator",
    "python_tags",
    "state_dict",
    "tensors",
    "torch_streams",
    "torch_tags",
]
