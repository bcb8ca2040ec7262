"""Measured mode of `eth profile`: starts workers on this machine and gathers what they find.

Device types marked emulated are played by CPU processes that keep to given times, so their times
are the analytic ones; the links between them are real, and measured. All other devices must be of
one type and in one node, which this machine then stands for. Profiles of several machines are to be
measured on each. No torch in this process, except for the analytic part.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

from eth_cli import serde, torchrun
from eth_cli.cluster import Cluster
from eth_cli.errors import ConfigError, LaunchError
from eth_cli.model import ModelSpec
from eth_cli.profile import analytic
from eth_cli.profile.analytic import Progress
from eth_cli.profile.measurement import (
    MESSAGE_BYTES,
    BlockMeasurement,
    Folder,
    RankMeasurement,
    Request,
)
from eth_cli.profile.table import ComputeEntry, DeviceEntry, Dtype, LinkEntry, Profile

STALL_TIMEOUT_S = 300.0
"""Workers that finish no measurement for so long have hung [s]."""
STOP_GRACE_S = 5.0
"""Workers are killed so long after they were asked to stop [s]."""
POLL_S = 0.05
NUM_LINK_RANKS = 2
"""Ranks between which the links are measured."""
NUM_LOG_LINES = 8
"""Last lines of a failed rank's log that the error shows."""
_WORKER = "eth_cli.profile.worker"


def measure_profile(
    spec: ModelSpec,
    cluster: Cluster,
    *,
    seq_len: int,
    dtype: str,
    micro_batch_sizes: Sequence[int],
    progress: Progress | None = None,
) -> Profile:
    """The profile of a model on a cluster that this machine plays, see the module.

    Args:
        seq_len: tokens of a sample.
        dtype: one of `catalogue.DTYPES`.
        micro_batch_sizes: samples of a micro-batch, each to be profiled.
        progress: told of each step.

    Raises:
        ConfigError: bad request, or devices that this machine cannot stand for.
        LaunchError: a worker failed or hung.
    """
    analytic.check_request(spec, seq_len=seq_len, dtype=dtype, micro_batch_sizes=micro_batch_sizes)
    types = analytic.used_types(cluster)
    real = [name for name in types if not cluster.device_types[name].emulated]
    emulated = [name for name in types if name not in real]
    device = _check_real_types(cluster, real)
    sizes = sorted(set(micro_batch_sizes))
    # A CPU computes in any dtype, and its type needs no figures.
    described = types if device == "cuda" else emulated
    rooflines = analytic.rooflines_of(cluster, described, dtype=dtype)

    num_real = sum(d.type in real for d in cluster.devices.values())
    num_ranks = num_real
    if device == "cpu":
        num_ranks = max(num_real, min(NUM_LINK_RANKS, len(cluster.devices)))
    request = Request(
        spec=spec,
        seq_len=seq_len,
        dtype=cast(Dtype, dtype),
        micro_batch_sizes=tuple(sizes),
        device=device,
        num_compute_ranks=num_real,
    )
    num_analytic = len(analytic.distinct_blocks(spec)) * len(sizes) if emulated else 0
    num_steps = num_analytic + _num_steps(request, num_ranks)

    compute: tuple[ComputeEntry, ...] = ()
    devices: tuple[DeviceEntry, ...] = ()
    memory = analytic.memory_model(cluster, types, dtype=dtype)
    if emulated:
        traces = analytic.trace_blocks(
            spec,
            seq_len=seq_len,
            dtype=dtype,
            micro_batch_sizes=sizes,
            progress=_part(progress, first=0, num_steps=num_steps),
        )
        played = {name: rooflines[name] for name in emulated}
        compute += analytic.compute_entries(played, traces)
        devices += analytic.device_entries(cluster, played, dtype=dtype)
    results: tuple[RankMeasurement, ...] = ()
    if num_real or num_ranks > 1:
        results = run_workers(
            request,
            num_ranks=num_ranks,
            progress=_part(progress, first=num_analytic, num_steps=num_steps),
        )
    if real:
        measured = results[:num_real]
        compute += _compute_entries(real[0], measured)
        devices += (_device_entry(real[0], measured),)
        most = max(result.process_bytes for result in measured)
        memory = memory.model_copy(update={"process_bytes": most})
    return Profile(
        schema_version=1,
        seq_len=seq_len,
        dtype=cast(Dtype, dtype),
        model=analytic.profiled_model(spec, seq_len=seq_len, dtype=dtype),
        memory=memory,
        compute=compute,
        devices=devices,
        links=_link_entries(cluster, results[0].link_table if results else None),
    )


def _part(progress: Progress | None, *, first: int, num_steps: int) -> Progress | None:
    """Tell the progress of a part of the work as that of the whole."""
    if progress is None:
        return None
    return lambda done, _, what: progress(first + done, num_steps, what)


def _check_real_types(cluster: Cluster, real: Sequence[str]) -> Literal["cpu", "cuda"]:
    """What this machine measures on; ConfigError where it cannot stand for the devices."""
    file = f"cluster {cluster.name}"
    otherwise = "profile without hardware by --analytic, or mark types as emulated: true"
    if real and (len(real) > 1 or len(cluster.nodes) > 1):
        raise ConfigError.single(
            file,
            "nodes",
            f"hold {len(real)} types that are not emulated ({', '.join(real)}) in "
            f"{len(cluster.nodes)} nodes; this machine can be measured as one node of one type: "
            + otherwise,
        )
    if not real or cluster.device_types[real[0]].compute_capability is None:
        return "cpu"
    import torch

    wanted = cluster.device_types[real[0]].compute_capability
    num_wanted = sum(device.type == real[0] for device in cluster.devices.values())
    num_gpus = torch.cuda.device_count()
    if num_gpus < num_wanted:
        raise ConfigError.single(
            file,
            "nodes[0].devices",
            f"has {num_wanted} GPUs of type {real[0]}, this machine {num_gpus}; {otherwise}",
        )
    major, minor = torch.cuda.get_device_capability(0)
    if f"{wanted:.1f}" != f"{major}.{minor}":
        raise ConfigError.single(
            file,
            f"device_types.{real[0]}.compute_capability",
            f"is {wanted}, but this machine's GPU ({torch.cuda.get_device_name(0)}) has "
            f"{major}.{minor}; name the type that it is, or {otherwise}",
        )
    return "cuda"


# --- Workers --------------------------------------------------------------------------------------


def run_workers(
    request: Request,
    *,
    num_ranks: int,
    progress: Progress | None = None,
    stall_timeout_s: float = STALL_TIMEOUT_S,
) -> tuple[RankMeasurement, ...]:
    """Have ranks on this machine measure what is asked for; their answers, by rank.

    Raises:
        LaunchError: a rank failed, or nothing was finished for ``stall_timeout_s``.
    """
    with tempfile.TemporaryDirectory(prefix="eth-profile-") as root:
        folder = Folder(root)
        folder.logs.mkdir()
        serde.write_json(folder.request, request)
        process = torchrun.start(
            torchrun.argv(num_ranks=num_ranks, module=_WORKER, args=[root], log_dir=folder.logs),
            env=torchrun.worker_env(),
            output=folder.launcher_log,
        )
        try:
            code = _wait(process, folder, _num_steps(request, num_ranks), progress, stall_timeout_s)
        finally:
            torchrun.stop_process_tree(process, grace_s=STOP_GRACE_S)
        if code != 0:
            raise _failure(folder, code)
        return tuple(
            serde.read_json(folder.result_of(rank), RankMeasurement) for rank in range(num_ranks)
        )


def _num_steps(request: Request, num_ranks: int) -> int:
    num_kinds = len(analytic.distinct_blocks(request.spec))
    num_entries = num_kinds * len(request.micro_batch_sizes)
    num_compute = num_entries + 1 if request.num_compute_ranks else 0
    return num_compute + (len(MESSAGE_BYTES) if num_ranks > 1 else 0)


def _wait(
    process: torchrun.ProcessTree,
    folder: Folder,
    num_steps: int,
    progress: Progress | None,
    stall_timeout_s: float,
) -> int:
    """Exit code of the workers; passes their progress on and bounds the wait for each step."""
    done = 0
    deadline = time.monotonic() + stall_timeout_s
    if progress is not None:
        progress(0, num_steps, "starting workers")
    while (code := process.poll()) is None:
        lines = folder.progress.read_text().splitlines() if folder.progress.exists() else []
        if len(lines) > done:
            done = len(lines)
            deadline = time.monotonic() + stall_timeout_s
            if progress is not None:
                progress(min(done, num_steps), num_steps, lines[-1])
        if time.monotonic() > deadline:
            last = f"after {lines[-1]}" if lines else "at the start"
            raise LaunchError(
                f"profile: no measurement was finished for {stall_timeout_s:g} s, {last}"
                + _last_lines(folder.log_of(0)),
                rank=0,
                operation="measure",
            )
        time.sleep(POLL_S)
    if progress is not None and code == 0:
        progress(num_steps, num_steps, "done")
    return code


def _failure(folder: Folder, code: int) -> LaunchError:
    """The error of the rank that failed first."""
    exits = sorted(torchrun.read_exits(folder.logs), key=lambda e: (e.code == -15, e.time_s or 0.0))
    if not exits:
        return LaunchError(
            f"profile: the workers' launcher ended with code {code}"
            + _last_lines(folder.launcher_log),
            operation="measure",
        )
    first = exits[0]
    how = first.error or (f"killed by signal {-first.code}" if first.code < 0 else "")
    return LaunchError(
        f"profile: rank {first.rank} failed while measuring (exit code {first.code})"
        + (f": {how}" if how else "")
        + _last_lines(folder.log_of(first.rank)),
        rank=first.rank,
        operation="measure",
    )


def _last_lines(log: Path) -> str:
    """The end of a log, indented, to stand below a message; empty where there is none."""
    if not log.exists():
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-NUM_LOG_LINES:]
    return "".join(f"\n  | {line}" for line in lines)


# --- From measurements to the profile -------------------------------------------------------------


def _compute_entries(name: str, ranks: Sequence[RankMeasurement]) -> tuple[ComputeEntry, ...]:
    """Entries of the one real type: of times the median over its ranks, of all else the most."""
    entries = []
    for same in zip(*(rank.blocks for rank in ranks), strict=True):
        blocks = cast(tuple[BlockMeasurement, ...], same)
        entries.append(
            ComputeEntry(
                device=name,
                block=blocks[0].block,
                micro_batch_size=blocks[0].micro_batch_size,
                forward_s=statistics.median(b.forward_s for b in blocks),
                backward_s=statistics.median(b.backward_s for b in blocks),
                activation_bytes=max(b.activation_bytes for b in blocks),
                recompute_activation_bytes=max(b.recompute_activation_bytes for b in blocks),
                source="measured",
                forward_spread_s=max(b.forward_spread_s for b in blocks),
                backward_spread_s=max(b.backward_spread_s for b in blocks),
            )
        )
    return tuple(entries)


def _device_entry(name: str, ranks: Sequence[RankMeasurement]) -> DeviceEntry:
    times = [r.optimizer_s_per_parameter for r in ranks if r.optimizer_s_per_parameter is not None]
    return DeviceEntry(
        type=name,
        optimizer_s_per_parameter=statistics.median(times),
        process_bytes=max(rank.process_bytes for rank in ranks),
    )


def _link_entries(
    cluster: Cluster, table: tuple[tuple[float, float], ...] | None
) -> tuple[LinkEntry, ...]:
    """The measured link for every pair of types and scope that the cluster has: all its devices
    are played on this machine, so one link is all of them."""
    if table is None:
        return ()
    found: set[tuple[Literal["intra_node", "inter_node"], str, str]] = set()
    num_alike: Counter[frozenset[str]] = Counter()
    for node in cluster.nodes:
        counts: Counter[str] = Counter()
        for group in node.devices:
            counts[group.type] += group.count
        num_alike[frozenset(counts)] += 1
        found |= {
            ("intra_node", a, b)
            for a, b in itertools.product(counts, repeat=2)
            if a != b or counts[a] > 1
        }
    for one, other in itertools.product(num_alike, repeat=2):
        if one != other or num_alike[one] > 1:
            found |= {("inter_node", a, b) for a, b in itertools.product(one, other)}
    return tuple(
        LinkEntry(scope=scope, devices=(a, b), table=table) for scope, a, b in sorted(found)
    )
