"""Reads the reference's tables and makes links, compute entries and device entries of them."""

from __future__ import annotations

import itertools
import json
import math
from functools import cached_property
from pathlib import Path
from typing import Any

from eth_cli.errors import ConfigError
from eth_cli.profile.table import ComputeEntry, LinkEntry

DEFAULT_PATH = Path(__file__).resolve().parents[3] / "shared" / "reference"
SIZES = tuple(2.0**k for k in range(16, 31))
"""Message sizes that the fits of the reference were made on [bytes]."""
SHORTEST_S = 1e-9
"""Stands for a time that the reference gives as 0 (the embedding's backward) [s]."""


class Reference:
    """The files of a reference folder. Raises ConfigError where one is absent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self.folder / name).read_text())
        except OSError as error:
            raise ConfigError.single(
                str(self.folder / name), "", f"cannot be read ({error.strerror}); give --reference"
            ) from error

    @cached_property
    def profiles(self) -> Any:
        """profiles.json."""
        return self._read("profiles.json")

    @cached_property
    def network(self) -> Any:
        """network.json."""
        return self._read("network.json")

    @cached_property
    def measured(self) -> Any:
        """measured_runs.json."""
        return self._read("measured_runs.json")

    @cached_property
    def planners(self) -> Any:
        """planners.json."""
        return self._read("planners.json")

    def rows(self, scope: str, gpu: str, flows: int) -> tuple[tuple[float, float], ...]:
        """[bytes, seconds] of each of ``flows`` transfers at once between GPUs of one type.

        The fitted bandwidth is the sum over the flows. A fit is a parabola in log2(bytes), which
        turns down (even negative) at small sizes: from where a smaller message would take longer
        than a larger one, the rows end and latency rules.
        """
        found = {
            entry["gpus"]: entry["poly_coeffs"]
            for entry in self.network["homogeneous_summary"]["entries"]
            if entry["scope"] == scope and entry["gpu"] == gpu
        }
        measured = max((k for k in found if k <= flows), default=min(found))
        rows: list[tuple[float, float]] = []
        for size in reversed(SIZES):
            bandwidth = _bandwidth(found[measured], size)
            # More flows than were measured share what these had; fewer have no less than each.
            time_s = size * max(flows, measured) / bandwidth if bandwidth > 0 else float("inf")
            if rows and time_s >= rows[-1][1]:
                break
            rows.append((size, time_s))
        return tuple(reversed(rows))

    def flows(self, scope: str, gpu: str) -> tuple[int, ...]:
        """Numbers of flows that were measured, ascending."""
        return tuple(
            sorted(
                entry["gpus"]
                for entry in self.network["homogeneous_summary"]["entries"]
                if entry["scope"] == scope and entry["gpu"] == gpu
            )
        )

    def link(self, scope: str, source: str, target: str, flows: int) -> LinkEntry:
        """A link between two types: that of the slower end.

        Each end has one NIC, measured between nodes of its own type. The table's entries between
        types are left aside: some are copies of others (0.11 GB/s for 1 and 8 flows between two
        types whose own nodes, and 2 and 4 flows between them, show 2.9).
        """
        ends = [self.rows(scope, gpu, flows) for gpu in (source, target)]
        rows = max(ends, key=lambda rows: rows[-1][1])
        return LinkEntry(scope=_SCOPES[scope], devices=(source, target), flows=flows, table=rows)

    def links(self, gpus: list[str]) -> tuple[LinkEntry, ...]:
        """Links between all pairs of types, for every number of flows that either measured."""
        found = []
        for source, target in itertools.product(gpus, gpus):
            counts = set(self.flows("inter", source)) | set(self.flows("inter", target))
            found += [self.link("inter", source, target, k) for k in sorted(counts)]
        return (*found, *(self._inside(gpu) for gpu in gpus))

    def _inside(self, gpu: str) -> LinkEntry:
        """A pair of GPUs of one node while all of its GPUs transfer."""
        most = max(self.flows("intra", gpu))
        rows = self.rows("intra", gpu, most)
        return LinkEntry(scope="intra_node", devices=(gpu, gpu), table=rows)

    def times(self, model: str, gpu: str, width: int, size: int, *, planner: bool = False) -> Any:
        """The profile entry of a combination; None where there is none.

        Args:
            planner: take the planner's own file where it differs and can be used.
        """
        data = self.profiles["models"][model]
        entry = data["times_by_gpu_tp_mbs"].get(gpu, {}).get(str(width), {}).get(str(size))
        other = data.get("planner_profile_where_it_differs", {}).get(gpu)
        if planner and other is not None and "SUSPECT" not in other.get("note", ""):
            entry = other["times_by_tp_mbs"].get(str(width), {}).get(str(size), entry)
        return entry

    def monotone_times(self, model: str, gpu: str, width: int, size: int) -> Any:
        """The same, with no layer slower than at a larger micro-batch size.

        Less work on the same kernels takes no more time; where the table says so (GH200, width 4,
        sizes 1 and 2: the head 2.4 and 1.6 ms), the excess is the profiler's and not the layer's.
        """
        entry = self.times(model, gpu, width, size)
        if entry is None:
            return None
        sizes = self.profiles["models"][model]["times_by_gpu_tp_mbs"][gpu][str(width)]
        larger = [times for b, times in sizes.items() if int(b) >= size]
        return entry | {
            key: [min(values) for values in zip(*(times[key] for times in larger), strict=True)]
            for key in ("fwd_s", "bwd_s")
        }

    def memory(self, model: str, width: int) -> Any:
        """Sizes of every layer at a tensor-parallel width."""
        return self.profiles["models"][model]["memory_by_tp"][str(width)]

    def workspace_bytes(self, model: str, layer: int, width: int) -> int:
        """Held for one sample while a layer runs backward, beside what its forward saved.

        A transformer block's attention: the gradient of the probabilities and that of the scores,
        heads/t x seq x seq each, in fp32. The head: the gradient of the logits, its output.
        """
        data = self.profiles["models"][model]
        num_blocks = data["num_transformer_layers"]
        if 1 <= layer <= num_blocks:
            return int(2 * data["heads"] / width * data["sequence_length"] ** 2 * 4)
        if layer > num_blocks:
            return int(self.memory(model, width)["act_output_bytes"][layer])
        return 0

    def optimizer_s_per_parameter(self, model: str, width: int, entry: Any) -> float:
        """Update of the profiled model (embedding, two blocks, head) per parameter of it [s]."""
        parameters = self.memory(model, width)["params_floats"]
        profiled = sum(parameters[:3]) + sum(
            parameters[1 + self.profiles["models"][model]["num_transformer_layers"] :]
        )
        return float(entry["update_s"] / profiled)

    def compute(
        self, model: str, layer: int, kind: str, gpu: str, width: int, size: int, entry: Any
    ) -> ComputeEntry:
        """The compute entry of one layer."""
        sizes = self.memory(model, width)
        return ComputeEntry(
            device=gpu,
            block=kind,
            tensor_parallel=width,
            micro_batch_size=size,
            forward_s=max(SHORTEST_S, entry["fwd_s"][layer]),
            backward_s=max(SHORTEST_S, entry["bwd_s"][layer]),
            activation_bytes=sizes["act_mem_bytes"][layer] * size,
            workspace_bytes=self.workspace_bytes(model, layer, width) * size,
            source="reference",
        )


_SCOPES: Any = {"inter": "inter_node", "intra": "intra_node"}


def _bandwidth(coefficients: list[float], num_bytes: float) -> float:
    """The reference's fit: a L^2 + b L + c GB/s, L = log2(bytes / 1e6) [bytes/s]."""
    a, b, c = coefficients
    level = math.log2(num_bytes / 1e6)
    return (a * level**2 + b * level + c) * 1e9
