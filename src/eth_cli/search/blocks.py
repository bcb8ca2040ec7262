"""Costs of runs of blocks on one device type: what the profile says, summed over a stage.

The planner's and the simulator's only way to times and activation bytes, so that both add the same
numbers in the same way. A combination that the profile lacks is an error here, never a guess.
"""

from __future__ import annotations

import math

from eth_cli.errors import ConfigError
from eth_cli.profile.table import ComputeEntry, Profile


class BlockTable:
    """Every block's cost at one (device type, tensor-parallel width, micro-batch size).

    Sums are exact (`math.fsum`) and remembered: the same stage costs the same bits wherever it is
    asked for.

    Raises:
        ConfigError: the profile has no entry for one of the model's block kinds.
    """

    def __init__(
        self, profile: Profile, device_type: str, *, tensor_parallel: int, micro_batch_size: int
    ) -> None:
        entries: dict[str, ComputeEntry] = {}
        for kind in dict.fromkeys(profile.model.kinds):
            entry = profile.lookup(
                device_type,
                kind,
                tensor_parallel=tensor_parallel,
                micro_batch_size=micro_batch_size,
            )
            if entry is None:
                raise missing_entry(
                    profile,
                    device_type,
                    kind,
                    tensor_parallel=tensor_parallel,
                    micro_batch_size=micro_batch_size,
                )
            entries[kind] = entry
        self.device_type = device_type
        self.tensor_parallel = tensor_parallel
        self.micro_batch_size = micro_batch_size
        blocks = [entries[kind] for kind in profile.model.kinds]
        self._forward_s = [e.forward_s for e in blocks]
        self._backward_s = [e.backward_s for e in blocks]
        self._activation_bytes = [e.activation_bytes for e in blocks]
        self._recompute_bytes = [e.recompute_activation_bytes for e in blocks]
        self._workspace_bytes = [e.workspace_bytes or 0 for e in blocks]
        self._times: dict[tuple[int, int, bool], tuple[float, float]] = {}
        self._activations: dict[tuple[int, int], int] = {}

    def times_s(self, start: int, stop: int, *, recompute: bool = False) -> tuple[float, float]:
        """Forward and backward of blocks ``[start, stop)`` for one micro-batch [s].

        With recomputation the backward grows by one forward.
        """
        key = (start, stop, recompute)
        times = self._times.get(key)
        if times is None:
            forward = self._forward_s[start:stop]
            backward = self._backward_s[start:stop] + (forward if recompute else [])
            times = self._times[key] = (math.fsum(forward), math.fsum(backward))
        return times

    def activation_bytes(self, start: int, stop: int) -> int:
        """Saved for the backward of one micro-batch, per device [bytes]."""
        key = (start, stop)
        total = self._activations.get(key)
        if total is None:
            total = self._activations[key] = sum(self._activation_bytes[start:stop])
        return total

    def largest_activation_bytes(self, start: int, stop: int) -> int:
        """Saved by the block of the stage that saves most [bytes]."""
        return max(self._activation_bytes[start:stop])

    def largest_workspace_bytes(self, start: int, stop: int) -> int:
        """Held by the block of the stage that needs most while it runs [bytes]."""
        return max(self._workspace_bytes[start:stop])

    @property
    def can_recompute(self) -> bool:
        """Whether the profile says what every block keeps under recomputation."""
        return None not in self._recompute_bytes

    def recompute_bytes(self, start: int, stop: int) -> int:
        """Kept of one micro-batch under recomputation: the inputs of the blocks [bytes].

        Raises:
            ConfigError: the profile does not say.
        """
        kept = [b for b in self._recompute_bytes[start:stop] if b is not None]
        if len(kept) != stop - start:
            raise ConfigError.single(
                "profile",
                "compute",
                f"has no recompute_activation_bytes for {self.device_type} at micro_batch_size "
                f"{self.micro_batch_size}, which blocks {start} to {stop - 1} need to recompute; "
                "add them or plan without recomputation",
            )
        return sum(kept)


def missing_entry(
    profile: Profile, device_type: str, kind: str, *, tensor_parallel: int, micro_batch_size: int
) -> ConfigError:
    """What the profile lacks, and what it has instead."""
    have = sorted(
        {
            (e.tensor_parallel, e.micro_batch_size)
            for e in profile.compute
            if e.device == device_type and e.block == kind
        }
    )
    if have:
        exists = "it has " + ", ".join(
            f"tensor_parallel {t} with micro_batch_size {b}" for t, b in have
        )
    else:
        types = sorted({e.device for e in profile.compute if e.block == kind})
        exists = f"it has block {kind} of {', '.join(types) or 'no device'}"
    return ConfigError.single(
        "profile",
        "compute",
        f"has no entry for device {device_type}, block {kind}, tensor_parallel {tensor_parallel}, "
        f"micro_batch_size {micro_batch_size}; {exists}; profile it or plan without it",
    )


class BlockTables:
    """The tables of a profile, each built when it is first asked for."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._tables: dict[tuple[str, int, int], BlockTable] = {}

    def table(self, device_type: str, tensor_parallel: int, micro_batch_size: int) -> BlockTable:
        """The table of a combination. Raises ConfigError where the profile lacks an entry."""
        key = (device_type, tensor_parallel, micro_batch_size)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = BlockTable(
                self.profile,
                device_type,
                tensor_parallel=tensor_parallel,
                micro_batch_size=micro_batch_size,
            )
        return table

    def has(self, device_type: str, tensor_parallel: int, micro_batch_size: int) -> bool:
        """Whether the profile has every block kind at a combination."""
        return all(
            self.profile.lookup(
                device_type,
                kind,
                tensor_parallel=tensor_parallel,
                micro_batch_size=micro_batch_size,
            )
            is not None
            for kind in set(self.profile.model.kinds)
        )
