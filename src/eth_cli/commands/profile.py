"""`eth profile`: cluster + model -> profile.json."""

from __future__ import annotations

from pathlib import Path

from eth_cli.cluster_file import read_cluster
from eth_cli.commands import arguments
from eth_cli.profile.table import write_profile
from eth_cli.stdout import is_stdout


def run_profile(
    *,
    cluster_path: Path,
    model_source: str,
    seq_len: int,
    dtype: str,
    micro_batch_sizes: tuple[int, ...],
    analytic: bool,
    output: Path,
) -> None:
    """Profile a model on a cluster's device types, write the profile and show it.

    Raises:
        ConfigError: an input is wrong, or the output cannot be written.
        LaunchError: a measuring worker failed.
    """
    from eth_cli.model_sources import load_model
    from eth_cli.render.console import print_note, print_result
    from eth_cli.render.profile import profile_tables
    from eth_cli.render.progress import progress

    arguments.output_file("--output", output, inputs=(cluster_path,))
    cluster = read_cluster(cluster_path)
    spec = load_model(model_source)
    if analytic:
        from eth_cli.profile.analytic import analytic_profile as make_profile
    else:
        from eth_cli.profile.measure import measure_profile as make_profile
    with progress(f"profiling {spec.name}") as report:
        profile = make_profile(
            spec,
            cluster,
            seq_len=seq_len,
            dtype=dtype,
            micro_batch_sizes=micro_batch_sizes,
            progress=report,
        )
    write_profile(output, profile)
    if not is_stdout(output):  # Where the profile itself went, and nothing else goes.
        print_result(*profile_tables(profile))
        print_note(f"wrote {output}")
