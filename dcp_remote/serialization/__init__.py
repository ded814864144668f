"""Encoding of tensors and Python objects as bytes, and decoding without trusting any pickle.

tensors handles the elements of tensors, and local_boxes tensors that a framework shards itself. objects encodes all
other values, by tags of Python's, user-defined, numpy's and torch's types (*_tags). torch_streams and
restricted_unpickler read `torch.save` streams, which run no code. state_dict prepares state dicts for torch's planner
and takes loaded ones apart, with module_state for models and optimizers, and opaque and files for values that are
stored whole. refused_values and plain_values help with objects that need code.
"""

from __future__ import annotations

import sys

if sys.byteorder != "little":
    raise ImportError(
        "dcp_remote stores memory as it is, in little-endian order, and does not run on a big-endian host."
    )
