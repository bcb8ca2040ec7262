"""A profile as tables: what each block costs on each device type, and what each link gives."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from eth_cli.profile.table import LinkEntry, Profile
from eth_cli.render.tables import new_table, titled
from eth_cli.units import format_bytes, format_bytes_per_s, format_seconds


def profile_tables(profile: Profile) -> Iterator[RenderableType]:
    """The tables of a profile: blocks by device type, then links if it has any."""
    yield _compute_table(profile)
    if profile.links:
        yield _link_table(profile)


def _compute_table(profile: Profile) -> RenderableType:
    model = profile.model
    parameters = sum(model.parameters) - sum(
        (len(group) - 1) * model.tied_parameters for group in model.tied_blocks
    )
    title = (
        f"{model.name}: {model.num_blocks} blocks, {parameters / 1e6:,.2f} M parameters, "
        f"{profile.seq_len} tokens a sample, {profile.dtype}"
    )
    table = new_table(
        left=("device", "block"),
        right=("width", "micro-batch", "forward", "backward", "activations", "recomputed"),
        last=("source",),
        droppable=("recomputed", "width", "activations"),
    )
    order = {kind: i for i, kind in enumerate(dict.fromkeys(model.kinds))}
    entries = sorted(
        profile.compute,
        key=lambda e: (e.device, e.tensor_parallel, e.micro_batch_size, order[e.block]),
    )
    previous = ""
    for entry in entries:
        if previous and entry.device != previous:
            table.add_section()
        previous = entry.device
        recomputed = entry.recompute_activation_bytes
        table.add_row(
            entry.device,
            entry.block,
            str(entry.tensor_parallel),
            str(entry.micro_batch_size),
            format_seconds(entry.forward_s),
            format_seconds(entry.backward_s),
            format_bytes(entry.activation_bytes),
            "-" if recomputed is None else format_bytes(recomputed),
            entry.source,
        )
    return titled(title, table)


def _link_table(profile: Profile) -> RenderableType:
    table = new_table(
        left=("scope", "from", "to"),
        right=("flows", "latency", "bandwidth"),
    )
    for link in profile.links:
        latency_s, rate = _figures(link)
        table.add_row(
            link.scope,
            *link.devices,
            str(link.flows),
            format_seconds(latency_s),
            format_bytes_per_s(rate),
        )
    return titled("links, one direction", table)


def _figures(link: LinkEntry) -> tuple[float, float]:
    """Latency [s] and rate of a long message [bytes/s]; of a table, its first and last row."""
    if link.table is None:
        assert link.bandwidth_bytes_per_s is not None  # checked on construction
        return link.latency_s or 0.0, link.bandwidth_bytes_per_s
    num_bytes, seconds = link.table[-1]
    return link.table[0][1], num_bytes / seconds
