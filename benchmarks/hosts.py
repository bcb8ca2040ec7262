"""Several hosts on one Linux machine: network namespaces, their links shaped to a bandwidth.

Needs root and iproute2 (``ip``, ``tc``). Each host has its own network stack, loopback included;
they meet on a bridge in a namespace of its own, so nothing of the machine's network is touched.
Traffic inside a host is not shaped, as inside a real one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from eth_cli import torchrun
from eth_cli.launch.config import RunFolder, RunOptions
from eth_cli.launch.folder import prepare_folder
from eth_cli.launch.job import WORKER
from eth_cli.plan import Plan

FRAME_OVERHEAD = 1514 / 1448
"""Bytes on the wire for each byte that TCP carries in full frames, which are what is shaped."""
_BURST_BYTES = 128 * 1024
"""The most that leaves at once: segments of TCP offload are up to 64 KiB."""
PORT = 29400


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One of the namespaces."""

    namespace: str
    address: str

    def command(self, argv: Sequence[str]) -> list[str]:
        """What runs a command on it."""
        return ["ip", "netns", "exec", self.namespace, *argv]


def lacking() -> str | None:
    """Why this machine cannot have hosts; None: it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"{' and '.join(missing)} is missing; install iproute2" if missing else None


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def hosts(count: int, *, bytes_per_s: float) -> Iterator[tuple[Host, ...]]:
    """Hosts whose uplinks carry ``bytes_per_s`` of TCP payload each; gone at the end."""
    mark = uuid.uuid4().hex[:6]
    hub = f"eth-{mark}-hub"
    made = [hub]
    try:
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        found = []
        for i in range(count):
            host = Host(namespace=f"eth-{mark}-{i}", address=f"10.77.0.{i + 1}")
            _ip("netns", "add", host.namespace)
            made.append(host.namespace)
            _ip(
                *("link", "add", "uplink", "netns", host.namespace, "type", "veth"),
                *("peer", "name", f"port{i}", "netns", hub),
            )
            _ip("-n", hub, "link", "set", f"port{i}", "master", "bridge", "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "uplink")
            _ip("-n", host.namespace, "link", "set", "uplink", "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            shape(host, bytes_per_s=bytes_per_s)
            found.append(host)
        yield tuple(found)
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def shape(host: Host, *, bytes_per_s: float) -> None:
    """Shape what a host sends from now on."""
    rate = f"{round(8 * bytes_per_s * FRAME_OVERHEAD)}bit"
    subprocess.run(
        host.command(
            [
                *("tc", "qdisc", "replace", "dev", "uplink", "root"),
                *("tbf", "rate", rate, "burst", str(_BURST_BYTES), "latency", "200ms"),
            ]
        ),
        check=True,
        capture_output=True,
    )


def ranks_by_node(plan: Plan) -> Counter[str]:
    """How many ranks each node of a plan has, in the order of ranks."""
    return Counter(place.device.rpartition(":")[0] for place in plan.ranks)


def train(
    plan: Plan, options: RunOptions, root: Path, on: Sequence[Host], *, timeout_s: float = 600
) -> RunFolder:
    """Train a plan, each of its nodes on the host of the same place. Raises RuntimeError."""
    folder = RunFolder(root)
    root.mkdir(parents=True)
    prepare_folder(folder, plan, options, profile=None, first_step=0)
    counts = ranks_by_node(plan)
    processes = []
    for i, (host, num_ranks) in enumerate(zip(on, counts.values(), strict=True)):
        argv = [
            *(sys.executable, "-m", "eth_cli.torchrun"),
            *(f"--nnodes={len(on)}", f"--node-rank={i}", f"--nproc-per-node={num_ranks}"),
            *(f"--master-addr={on[0].address}", f"--master-port={PORT}", "--max-restarts=0"),
            f"--log-dir={folder.logs / f'torchrun-{i}'}",
            *("--module", "eth_cli.worker_entry", f"--log-dir={folder.logs}", WORKER, str(root)),
        ]
        env = os.environ | torchrun.worker_env() | {"GLOO_SOCKET_IFNAME": "uplink"}
        with open(folder.logs / f"launcher-{i}.log", "wb") as log:
            processes.append(
                subprocess.Popen(host.command(argv), env=env, stdout=log, stderr=subprocess.STDOUT)
            )
    try:
        codes = [process.wait(timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        logs = [path.read_text(errors="replace")[-2000:] for path in folder.logs.glob("*.log")]
        raise RuntimeError("\n".join([f"torchrun ended with {codes}", *logs]))
    return folder
