"""Conversion of a manifest into torch's metadata. The manifests come from saves of simulated ranks."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from dcp_remote.errors import UnsupportedFormatError
from dcp_remote.format import manifest_json
from dcp_remote.loading.dcp_metadata import to_dcp_metadata
from tests.end_to_end.test_resharding import saved_states
from tests.saving.test_manifest_assembly import planned, three_ranks
from tests.support.manifests import decode
from tests.support.properties import examples
from tests.support.strategies import Case, cases


@examples(60)
@given(case=cases())
def test_metadata_survives_the_manifest(case: Case) -> None:
    """The metadata of any sharded state comes back equal from an encoded manifest, and is not modified."""
    plan = planned(saved_states(case))
    before = pickle.dumps(plan.metadata)
    manifest = decode(manifest_json.encode(plan.manifest()))
    found = to_dcp_metadata(manifest)
    assert found.state_dict_metadata == plan.metadata.state_dict_metadata
    assert list(found.state_dict_metadata) == list(plan.metadata.state_dict_metadata)
    assert found.planner_data == plan.metadata.planner_data
    assert pickle.dumps(plan.metadata) == before


@pytest.mark.parametrize(
    "properties",
    [
        TensorProperties(dtype=torch.int8, requires_grad=True),
        TensorProperties(dtype=torch.int8, memory_format=torch.channels_last),
        TensorProperties(dtype=torch.int8, memory_format=torch.preserve_format, pin_memory=True),
        TensorProperties(dtype=torch.int8, layout=torch.sparse_coo),
    ],
)
def test_properties_survive(properties: TensorProperties) -> None:
    """Layouts and memory formats that torch knows are stored by name."""
    good = planned([{"t": torch.zeros(4, dtype=torch.int8)}])
    meta = good.metadata.state_dict_metadata["t"]
    assert isinstance(meta, TensorStorageMetadata)
    changed = replace(good.metadata, state_dict_metadata={"t": replace(meta, properties=properties)})
    manifest = decode(manifest_json.encode(replace(good, metadata=changed).manifest()))
    assert to_dcp_metadata(manifest).state_dict_metadata == changed.state_dict_metadata


@pytest.mark.parametrize("change", [{"layout": "no_layout"}, {"layout": "float32"}, {"memory_format": "round"}])
def test_properties_that_torch_does_not_know(change: dict[str, Any]) -> None:
    """An unknown layout or memory format is refused, also if torch has an attribute of that name."""
    manifest = three_ranks().manifest()
    kinds = tuple(replace(kind, **change) for kind in manifest.tensors.kinds)
    with pytest.raises(UnsupportedFormatError):
        to_dcp_metadata(replace(manifest, tensors=replace(manifest.tensors, kinds=kinds)))


def test_a_state_of_nothing() -> None:
    """Two ranks save no tensors and no objects."""
    manifest = planned([{}, {}]).manifest()
    assert to_dcp_metadata(manifest).state_dict_metadata == {}
    assert manifest.world_size == 2
    assert manifest.shards.keys == ()
