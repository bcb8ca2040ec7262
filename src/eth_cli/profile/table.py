"""The profile: times and memory of blocks on devices, and links. Owns profile.json.

Producers are `profile.analytic`, `profile.compute` and `profile.network`, or a user with his own
timings. What is absent from a profile is not available to the planner; nothing is guessed.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from eth_cli import serde
from eth_cli.errors import ConfigError, Fault
from eth_cli.model import ModelSpec
from eth_cli.plan import Plan
from eth_cli.serde import FieldError, Location, Record

Count = Annotated[int, Field(ge=1, le=10**9)]
# The limits are far beyond any hardware; they keep sums finite and typing errors out.
PositiveSeconds = Annotated[float, Field(ge=1e-12, le=1e6)]
Seconds = Annotated[float, Field(ge=0, le=1e6)]
NumBytes = Annotated[int, Field(ge=0, le=10**12)]
NumParameters = Annotated[int, Field(ge=0, le=10**12)]


Dtype = Literal["bf16", "fp16", "fp32"]


class BlockGroup(Record):
    """``count`` consecutive blocks of one kind."""

    kind: Annotated[str, Field(min_length=1)]
    count: Annotated[int, Field(ge=1, le=100_000)] = 1
    parameters: NumParameters
    """Parameters of one such block, a tied weight included wherever it is used."""


def _one_group(value: object) -> object:
    # [0, 25] is a handy way to write the usual single group, [[0, 25]]. What a validator of this
    # kind returns is checked as Python data, where only a tuple is one.
    if not isinstance(value, list | tuple):
        return value
    if value and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        return (tuple(value),)
    return tuple(tuple(v) if isinstance(v, list) else v for v in value)


class ProfiledModel(Record):
    """The model as the planner sees it: a list of blocks."""

    name: Annotated[str, Field(min_length=1)]
    blocks: Annotated[tuple[BlockGroup, ...], Field(min_length=1)]
    boundary_bytes_per_sample: NumBytes
    """Bytes that cross between two stages for one sample, one direction."""
    tied_blocks: Annotated[tuple[tuple[int, ...], ...], BeforeValidator(_one_group)] = ()
    """Groups of block indices that share one weight, such as [[0, 25]]."""
    given_tied_parameters: NumParameters | None = Field(default=None, alias="tied_parameters")
    """Parameters of the weight that a group shares, where the file says."""
    spec: ModelSpec | None = None
    """The model's shape, where the profiler knew it: what `eth run` builds the blocks from."""

    @model_validator(mode="after")
    def _check(self) -> ProfiledModel:
        faults: list[tuple[Location, str]] = []
        for g, group in enumerate(self.tied_blocks):
            if len(group) < 2 or len(set(group)) != len(group):
                faults.append((("tied_blocks", g), f"{list(group)} must name two or more blocks"))
            faults += [
                (
                    ("tied_blocks", g),
                    f"block {b} does not exist; the model has {self.num_blocks} blocks",
                )
                for b in group
                if not 0 <= b < self.num_blocks
            ]
            faults += [
                (("tied_blocks", g), f"block {b} stands in another group too; join the groups")
                for b in group
                if any(b in other for other in self.tied_blocks[:g])
            ]
        if self.tied_blocks and not faults:
            least = self._least_tied()
            if self.tied_parameters > least:
                faults.append(
                    (
                        ("tied_parameters",),
                        f"{self.tied_parameters} is more than a tied block's {least} parameters",
                    )
                )
        if self.spec is not None and self.spec.num_blocks != self.num_blocks:
            faults.append(
                (
                    ("spec", "num_layers"),
                    f"makes {self.spec.num_blocks} blocks, but blocks count {self.num_blocks}",
                )
            )
        if faults:
            raise FieldError(faults)
        return self

    @cached_property
    def tied_parameters(self) -> int:
        """Parameters of the weight that a group shares.

        Where the file does not say, the weight is all of the smallest tied block: a head is
        little else, and what else there is (a norm) is small beside it.
        """
        if self.given_tied_parameters is not None:
            return self.given_tied_parameters
        return self._least_tied() if self.tied_blocks else 0

    def _least_tied(self) -> int:
        return min(self.parameters[b] for group in self.tied_blocks for b in group)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kind of every block."""
        return tuple(g.kind for g in self.blocks for _ in range(g.count))

    @cached_property
    def parameters(self) -> tuple[int, ...]:
        """The parameters of every block, a tied weight counted in each place."""
        return tuple(g.parameters for g in self.blocks for _ in range(g.count))

    @property
    def num_blocks(self) -> int:
        """Blocks of the model."""
        return sum(g.count for g in self.blocks)

    def stage_parameters(self, start: int, stop: int) -> int:
        """Parameters that a stage holds: a tied weight is stored once, however often used."""
        total = sum(self.parameters[start:stop])
        for group in self.tied_blocks:
            inside = sum(start <= b < stop for b in group)
            total -= max(0, inside - 1) * self.tied_parameters
        return total


class MemoryModel(Record):
    """Memory that does not depend on the block."""

    bytes_per_parameter: Annotated[float, Field(gt=0, le=1000)]
    """Weights, gradients, master weights and optimizer state [bytes]."""
    process_bytes: NumBytes = 0
    """Memory of a process before it holds any block, communication buffers included [bytes]."""
    optimizer_bytes_per_parameter: Annotated[float, Field(ge=0, le=1000)] | None = None
    """The part of bytes_per_parameter that a sharded optimizer splits over a segment's owners."""


class ComputeEntry(Record):
    """Cost of one block of a kind on one tensor-parallel group, for one micro-batch."""

    label_keys = ("device", "block", "tensor_parallel", "micro_batch_size")

    device: Annotated[str, Field(min_length=1)]
    """Device type."""
    block: Annotated[str, Field(min_length=1)]
    """Block kind."""
    tensor_parallel: Count = 1
    micro_batch_size: Count
    """Samples in the micro-batch that the figures are of."""
    forward_s: PositiveSeconds
    """Forward, tensor-parallel collectives included [s]."""
    backward_s: PositiveSeconds
    """Backward, tensor-parallel collectives included [s]."""
    activation_bytes: NumBytes
    """Saved for the backward of this micro-batch, per device [bytes]."""
    recompute_activation_bytes: NumBytes | None = None
    """The same with recomputation: the block's input [bytes]."""
    workspace_bytes: NumBytes | None = None
    """Held only while the block runs, per device: gradients of its activations, buffers of its
    kernels; absent: nothing is known of it [bytes]."""
    source: str = "given"
    """measured, analytic, or where a user's figure comes from."""
    forward_spread_s: Seconds | None = None
    """Interquartile range of the repeated measurement [s]."""
    backward_spread_s: Seconds | None = None
    """Interquartile range of the repeated measurement [s]."""


class DeviceEntry(Record):
    """What depends on the device type only."""

    type: Annotated[str, Field(min_length=1)]
    optimizer_s_per_parameter: Seconds = 0.0
    """Time of the optimizer update per parameter held [s]."""
    process_bytes: NumBytes | None = None
    """This type's own process constant, where it differs from the memory section's [bytes]."""


class LinkEntry(Record):
    """A measured link between two device types."""

    scope: Literal["intra_node", "inter_node"]
    devices: tuple[str, str]
    """Types of the sender and the receiver."""
    flows: Count = 1
    """Device pairs of the same two nodes that transfer at once; figures are of each of them."""
    latency_s: Seconds | None = None
    bandwidth_bytes_per_s: Annotated[float, Field(ge=1)] | None = None
    table: tuple[tuple[Annotated[float, Field(gt=0)], PositiveSeconds], ...] | None = None
    """[bytes, seconds] of one transfer, instead of latency and bandwidth."""

    @model_validator(mode="after")
    def _check(self) -> LinkEntry:
        if self.table is not None:
            if self.latency_s is not None or self.bandwidth_bytes_per_s is not None:
                raise FieldError([(("table",), "stands beside latency and bandwidth; give one")])
            sizes = [size for size, _ in self.table]
            if not sizes or sizes != sorted(set(sizes)):
                raise FieldError([(("table",), "needs rows of rising sizes, at least one")])
        elif self.bandwidth_bytes_per_s is None:
            raise FieldError(
                [(("bandwidth_bytes_per_s",), "is missing; give latency and bandwidth, or a table")]
            )
        return self

    def transfer_s(self, num_bytes: float) -> float:
        """Time of one transfer [s]: latency + bytes / bandwidth, or the table interpolated.

        Between rows a table is linear in bytes; below the first row its time is kept (latency
        dominates); above the last one the rate of the last two rows goes on. More bytes never
        take less time, whatever noise a table holds.
        """
        if self.table is None:
            assert self.bandwidth_bytes_per_s is not None  # checked on construction
            return (self.latency_s or 0.0) + num_bytes / self.bandwidth_bytes_per_s
        rows = self.table
        if num_bytes <= rows[0][0]:
            return rows[0][1]
        if len(rows) == 1:
            return rows[0][1] * num_bytes / rows[0][0]
        above = next((i for i, row in enumerate(rows) if row[0] >= num_bytes), len(rows) - 1)
        (x0, y0), (x1, y1) = rows[above - 1], rows[above]
        return max(y0, y0 + (y1 - y0) * (num_bytes - x0) / (x1 - x0))


class Profile(Record):
    """Everything the planner needs to know of a model on a cluster's device types."""

    schema_version: Literal[1]
    seq_len: Count
    dtype: Dtype
    model: ProfiledModel
    memory: MemoryModel
    compute: Annotated[tuple[ComputeEntry, ...], Field(min_length=1)]
    devices: tuple[DeviceEntry, ...] = ()
    links: tuple[LinkEntry, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Profile:
        faults: list[tuple[Location, str]] = []
        kinds = set(self.model.kinds)
        seen: dict[tuple[str, str, int, int], int] = {}
        for i, entry in enumerate(self.compute):
            if entry.block not in kinds:
                faults.append(
                    (
                        ("compute", i, "block"),
                        f"unknown kind {entry.block!r}; the model has {', '.join(sorted(kinds))}",
                    )
                )
            key = (entry.device, entry.block, entry.tensor_parallel, entry.micro_batch_size)
            if key in seen:
                faults.append((("compute", i), f"repeats compute[{seen[key]}]; keep one"))
            seen.setdefault(key, i)
        types = [d.type for d in self.devices]
        faults += [
            (("devices", i, "type"), f"{name!r} stands twice")
            for i, name in enumerate(types)
            if name in types[:i]
        ]
        covered = {
            (d, t, m) for d, _, t, m in seen if all((d, kind, t, m) in seen for kind in kinds)
        }
        if not covered and not faults:
            device, _, width, size = next(iter(seen))
            absent = sorted(k for k in kinds if (device, k, width, size) not in seen)
            faults.append(
                (
                    ("compute",),
                    f"has no entry of kind {', '.join(absent)} for {device} at tensor_parallel "
                    f"{width}, micro_batch_size {size}; every kind needs one",
                )
            )
        if faults:
            raise FieldError(faults)
        return self

    @cached_property
    def _by_key(self) -> dict[tuple[str, str, int, int], ComputeEntry]:
        return {(e.device, e.block, e.tensor_parallel, e.micro_batch_size): e for e in self.compute}

    @cached_property
    def _device_entries(self) -> dict[str, DeviceEntry]:
        return {entry.type: entry for entry in self.devices}

    def lookup(
        self, device_type: str, kind: str, *, tensor_parallel: int, micro_batch_size: int
    ) -> ComputeEntry | None:
        """The entry of a block kind on a device type; None where the profile has none."""
        return self._by_key.get((device_type, kind, tensor_parallel, micro_batch_size))

    @cached_property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Micro-batch sizes that any entry has, ascending."""
        return tuple(sorted({e.micro_batch_size for e in self.compute}))

    @cached_property
    def device_types(self) -> tuple[str, ...]:
        """Device types that any entry has, by name."""
        return tuple(sorted({e.device for e in self.compute}))

    def widths(self, device_type: str) -> tuple[int, ...]:
        """Tensor-parallel widths that any entry of a device type has, ascending."""
        return tuple(sorted({e.tensor_parallel for e in self.compute if e.device == device_type}))

    def optimizer_s_per_parameter(self, device_type: str) -> float:
        """Optimizer time per parameter held [s]; 0 where the profile gives none."""
        entry = self._device_entries.get(device_type)
        return 0.0 if entry is None else entry.optimizer_s_per_parameter

    def process_bytes(self, device_type: str) -> int:
        """Memory of a process before it holds any block [bytes]."""
        entry = self._device_entries.get(device_type)
        if entry is None or entry.process_bytes is None:
            return self.memory.process_bytes
        return entry.process_bytes

    def check_plan(self, plan: Plan, *, file: str, source: str) -> None:
        """Raise ConfigError unless a plan is for this profile's model and kind of training.

        Args:
            file: what the plan is called in messages.
            source: what this profile is called in messages.
        """
        plan.check_num_blocks(self.model.num_blocks, file=file, source=source)
        faults = [
            Fault(
                file=file,
                field=field,
                message=f"is {own}, but {source} has {other}; profile again or change the plan",
            )
            for field, own, other in (
                ("model", plan.model, self.model.name),
                ("seq_len", plan.seq_len, self.seq_len),
                ("dtype", plan.dtype, self.dtype),
            )
            if own != other
        ]
        if faults:
            raise ConfigError(faults)

    def digest(self) -> str:
        """Digest of everything that a plan depends on."""
        return serde.digest(serde.to_data(self))


def read_profile(path: str | Path) -> Profile:
    """A profile.json file. Raises ConfigError with every fault at once."""
    return serde.read_json(path, Profile)


def write_profile(path: str | Path, profile: Profile) -> None:
    """Write profile.json atomically; the same profile gives the same bytes."""
    serde.write_json(path, profile)
