"""RemoteLoadPlanner: torch's load planner, with selection, other names, and one error for all that does not fit."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from dcp_remote.common.text import join_some
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.loading.dcp_metadata import SourceMeta, held_boxes, plan_value
from dcp_remote.loading.load_options import LoadOptions, Patterns, Rename
from dcp_remote.loading.state_check import Comparison, StateCheck, compare_state
from dcp_remote.loading.state_verdict import Verdict, judge
from dcp_remote.serialization.leaves import flatten_state, is_flattened, iterate_leaves, value_at
from dcp_remote.serialization.state_dict import has_nested_shards

logger = logging.getLogger(__name__)


class RemoteLoadPlanner(DefaultLoadPlanner):
    """Planner of a load that compares state and checkpoint as a whole, before a tensor is read.

        planner = RemoteLoadPlanner(exclude="*head.*")  # a resized head, and its optimizer state, stay as they are
        planner = RemoteLoadPlanner(missing="keep")     # an added adapter keeps its first values
        dcp.load(state, storage_reader=RemoteReader(url), planner=planner)

    `CheckpointManager.restore` makes such a planner of its options. All differences are one `StateMismatchError`, on
    all ranks: values that the checkpoint lacks, entries that no rank has a value for, shapes, dtypes, and tensors in
    the place of objects. Entries that another rank has a value for are not unexpected, nor are `PerRank` values of
    other ranks.

    Names are those that `dcp-remote show` lists: keys joined by dots. `rename` applies first; `include` and `exclude`
    take names as the state has them. A pattern is a name or a glob (`fnmatch`), in which `*` also matches dots. Of a
    `Stateful` below which no rank loads a value, `load_state_dict` is not called by `restore`.

    Args:
        include: Names or patterns to load; None is all. The others stay as they are, as with `exclude`.
        exclude: Names or patterns that stay as they are in the state, whether the checkpoint has them or not.
        rename: Dict of names, or of their first parts up to a dot, in the checkpoint to those in the state: with
            `{"model.lm_head": "model.head"}` the entry `model.lm_head.weight` is read into `model.head.weight`. Or a
            function of a name in the checkpoint that returns the name in the state. None in the place of a name leaves
            an entry out. `CheckpointManager.restore` renames a parameter of a module also below the optimizers that
            have the parameter, and below averages of the module (`AveragedModel`s, modules under "ema"), unless the
            dict has names for these; a function is called for their names as well.
        missing: "keep" to keep values of the state that the checkpoint lacks; "error" to refuse.
        unexpected: "ignore" to leave out entries that no rank has a value for; "error" to refuse.
        dtype: "convert" to convert tensors to the dtypes of the state, as `Tensor.copy_` does; not complex numbers to
            real ones, floating-point numbers to integers, or integers to narrower ones. "error" to refuse.

    Raises:
        InvalidArgumentError: An option has a wrong value.
    """

    comparison: Comparison  # of this rank's state with the checkpoint, after `set_up_planner`

    def __init__(
        self,
        *,
        include: Patterns | None = None,
        exclude: Patterns = (),
        rename: Rename | None = None,
        missing: Literal["error", "keep"] = "error",
        unexpected: Literal["error", "ignore"] = "error",
        dtype: Literal["error", "convert"] = "error",
    ) -> None:
        """Check the options."""
        super().__init__()
        self._options = LoadOptions(
            include=include, exclude=exclude, rename=rename, missing=missing, unexpected=unexpected, dtype=dtype
        )
        self._source = SourceMeta()
        self._empty_places: list[str] = []
        self._keys: Mapping[str, tuple[Any, ...]] = {}  # of each value, as the state has them, by its name

    # ---- torch's protocol, in the order in which torch calls it

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002  # torch's signature
    ) -> None:
        """Flatten the state and compare it with the checkpoint.

        Differences are raised when all ranks have sent their checks.

        Raises:
            InvalidArgumentError: `rename` matches nothing, or gives two entries one name; or tensors are on the meta
                device, and there is no process group.
        """
        if metadata is None:
            raise InvalidArgumentError("This planner needs the metadata of the checkpoint. Use it in dcp.load.")
        flat = flatten_state(state_dict)
        self._empty_places = [name.removesuffix(".{}") for name in flat.paths if name not in flat.values]
        leaves = iterate_leaves(state_dict, descends=is_flattened)
        # An empty dict may have the name of a value, whose keys have dots.
        self._keys = {leaf.name: leaf.keys for leaf in leaves if flat.paths.get(leaf.name) == leaf.path}
        # torch's function drops a ShardedTensor of which this rank has nothing, and then takes the checkpoint for one
        # of an older torch.
        self.flatten_sharded_tensors = has_nested_shards(flat.values.values())
        self.flatten_state_dict = False
        tensors = {name: value for name, value in flat.values.items() if isinstance(value, torch.Tensor)}
        on_meta = [name for name, value in tensors.items() if value.device.type == "meta"]
        try:
            # Without objects, since torch makes None of what is of a type that it does not know, also inside of them.
            super().set_up_planner(dict(tensors), metadata, is_coordinator)
        except ValueError as error:
            if not on_meta:
                raise
            raise InvalidArgumentError(
                "Tensors of the state are on the meta device, and there is no process group whose device torch would "
                "allocate them on. Allocate them: torch.empty_like(tensor, device=...), or model.to_empty(device=...).",
                tensors=len(on_meta),
                names=join_some(on_meta),
            ) from error
        left = tensors.keys() - self.state_dict  # parts of which this rank has nothing
        self.state_dict = {n: self.state_dict.get(n, value) for n, value in flat.values.items() if n not in left}
        self.flatten_state_dict, self.mappings, self.original_state_dict = True, flat.paths, state_dict
        for name in on_meta:  # which have memory now, as they should
            self.put(name, self.state_dict[name])
        meta = metadata.storage_meta
        if isinstance(meta, SourceMeta):
            meta.options = self._options
            self._source = meta
        else:
            self._source = SourceMeta(checkpoint_id=meta.checkpoint_id if meta is not None else None)
        renamed, entries = self._source.renamed, metadata.state_dict_metadata
        self.comparison = compare_state(
            self.state_dict,
            self.mappings,
            entries,
            self._options,
            renamed=renamed if renamed is not None else self._options.rename_entries(entries)[0],
            rank=self._source.rank,
            on_meta=set(on_meta) if self._options.given else (),
        )

    def put(self, name: str, value: object) -> None:
        """Put a value into the state, in the place of the value of this name."""
        *keys, last = self._keys[name]
        value_at(self.original_state_dict, keys)[last] = value

    def create_local_plan(self) -> LoadPlan:
        """Plan what this rank loads, with its `StateCheck` as `planner_data`; few objects are built for chunks."""
        check = self.comparison.check
        items: list[ReadItem] = []
        if not check.has_misfits:
            assert self.metadata is not None, "set_up_planner has stored it"
            saved = self.metadata.state_dict_metadata
            for name, source in self.comparison.sources.items():
                items += plan_value(name, self.state_dict[name], source, saved[source])
        return LoadPlan(items, planner_data=check)

    def wanted_boxes(self) -> dict[str, list[tuple[Sequence[int], Sequence[int]]]]:
        """Return the offsets and sizes of the boxes that this rank loads, by the name of the tensor in the checkpoint.

        For the metadata of a manifest in segments, before the chunks are there that `create_local_plan` needs.
        """
        boxes: dict[str, list[tuple[Sequence[int], Sequence[int]]]] = {}
        assert self.metadata is not None, "set_up_planner has stored it"
        saved = self.metadata.state_dict_metadata
        for name, source in self.comparison.sources.items() if not self.comparison.check.has_misfits else ():
            if isinstance(saved[source], TensorStorageMetadata):
                boxes.setdefault(source, []).extend(held_boxes(self.state_dict[name]))
        return boxes

    def find_uncovered(self, plan: LoadPlan) -> str | None:
        """Return the name in the checkpoint of a tensor of which a plan does not read all that this rank loads."""
        left = {name: sum(math.prod(sizes) for _, sizes in boxes) for name, boxes in self.wanted_boxes().items()}
        for item in plan.items:
            if item.type != LoadItemType.BYTE_IO and item.storage_index.fqn in left:
                left[item.storage_index.fqn] -= math.prod(item.lengths)
        return next((name for name, elements in left.items() if elements), None)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Judge the checks of all ranks, and log what is kept or left out; called on the coordinator.

        Raises:
            StateMismatchError: The checkpoint does not fit the state.
            InvalidArgumentError: A pattern matches nothing; or a rank has a planner of another class.
        """
        checks = [plan.planner_data for plan in global_plan]
        if not all(isinstance(check, StateCheck) for check in checks):
            raise InvalidArgumentError("Some ranks have a planner of another class. Give one planner to all ranks.")
        verdict = self.judge(checks)
        if verdict.error is not None:
            raise verdict.error
        if verdict.warning:
            logger.warning("Load of %s: %s", self._source.checkpoint_id, verdict.warning)
        return [replace(plan, planner_data=None) for plan in global_plan]

    def judge(self, checks: Sequence[StateCheck]) -> Verdict:
        """Decide on the checks of all ranks, by rank; called on the coordinator."""
        return judge(
            checks,
            self.comparison,
            self._options,
            empty_places=self._empty_places,
            thinned=self._source.thinned,
            url=self._source.checkpoint_id,
            step=self._source.step,
        )
