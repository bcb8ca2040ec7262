"""Boxes of tensors in checkpoints: torch's planners for what ranks hold parts of.

A checkpoint knows whole tensors by name, in chunks with offsets. Ranks save disjoint boxes of them
and load those that they need, however they were saved; so widths, owners and the way in which
optimizer state is split may differ from plan to plan. A state is a flat dict of plain tensors whose
keys say what each is (`key_of`), so that it can be copied to the host like any other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list


class BoxKey(NamedTuple):
    """What a tensor of a state is."""

    name: str
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    """Where it starts in that."""
    shape: tuple[int, ...]
    """Of the whole tensor."""


def key_of(
    name: str, offsets: Sequence[int], shape: Sequence[int], *, number: int | None = None
) -> str:
    """The key of a tensor that belongs at ``offsets`` of a whole one of shape ``shape``.

    Args:
        number: tells keys apart where a rank loads the same box several times.
    """
    parts = (
        ",".join(map(str, offsets)),
        ",".join(map(str, shape)),
        "" if number is None else number,
    )
    return "|".join([name, *map(str, parts)])


def parse_key(key: str) -> BoxKey:
    """What `key_of` made the key of."""
    name, offsets, shape, _ = key.split("|")
    return BoxKey(name, _numbers(offsets), _numbers(shape))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


class BoxSavePlanner(DefaultSavePlanner):
    """Saves a state whose keys are those of `key_of`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._keys: dict[tuple[str, tuple[int, ...]], str] = {}

    def create_local_plan(self) -> SavePlan:
        """What this rank writes."""
        self.plan = SavePlan([self._item(key, t) for key, t in self.state_dict.items()])
        return self.plan

    def _item(self, key: str, tensor: torch.Tensor) -> WriteItem:
        box = parse_key(key)
        self._keys[box.name, box.offsets] = key
        return WriteItem(
            index=MetadataIndex(box.name, torch.Size(box.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=tensor.size()),
                properties=TensorProperties.create_from_tensor(tensor),
                size=torch.Size(box.shape),
            ),
        )

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """The tensor to write for an item of the plan."""
        assert index.offset is not None
        tensor: torch.Tensor = self.state_dict[self._keys[index.fqn, tuple(index.offset)]]
        return tensor


class BoxLoadPlanner(DefaultLoadPlanner):
    """Loads, in place, a state whose keys are those of `key_of`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads. Raises RuntimeError for what the checkpoint lacks."""
        assert self.metadata is not None
        items = []
        for key, tensor in self.state_dict.items():
            box = parse_key(key)
            saved = self.metadata.state_dict_metadata.get(box.name)
            if not isinstance(saved, TensorStorageMetadata):
                raise RuntimeError(f"it has no {box.name}")
            if tuple(saved.size) != box.shape:
                raise RuntimeError(
                    f"{box.name} has shape {tuple(saved.size)} in it, and {box.shape} here"
                )
            chunk = ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=tensor.size())
            items += [
                dataclasses.replace(item, dest_index=MetadataIndex(key))
                for item in create_read_items_for_chunk_list(box.name, saved, [chunk])
            ]
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The tensor to read an item of the plan into."""
        tensor: torch.Tensor = self.state_dict[index.fqn]
        return tensor
