"""`eth report`: a run folder -> predicted against measured."""

from __future__ import annotations

from pathlib import Path

from eth_cli import serde
from eth_cli.commands import arguments
from eth_cli.comparison import compare
from eth_cli.launch.config import RunFolder
from eth_cli.plan import read_plan
from eth_cli.render.console import print_json, print_note, print_result
from eth_cli.report import build_report
from eth_cli.stdout import is_stdout


def run_report(
    *,
    run_dir: Path,
    against: Path | None,
    trace: Path | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Show a run's step time, predicted against measured, or two runs side by side.

    Raises:
        ConfigError: a folder is no run folder, or holds no finished step yet.
    """
    from eth_cli.render.report import comparison_view, report_view

    for option, output in (("--trace", trace), ("--html", html)):
        if output is not None:
            arguments.output_file(option, output)
    report = build_report(arguments.input_folder(run_dir))
    comparison = (
        None if against is None else compare(report, build_report(arguments.input_folder(against)))
    )
    if trace is not None:
        from eth_cli.trace import write_trace

        write_trace(
            trace,
            read_plan(RunFolder(run_dir).plan),
            predicted=report.predicted_spans,
            measured=report.measured_spans,
        )
        if is_stdout(trace):
            return
        print_note(f"wrote {trace}")
    if html is not None:
        from eth_cli.render.html.page import report_page

        serde.write_text(html, report_page(report, read_plan(RunFolder(run_dir).plan)))
        if is_stdout(html):
            return
        print_note(f"wrote {html}")
    if as_json:
        print_json(serde.dump_json((comparison or report).as_data()))
    elif comparison is not None:
        print_result(*comparison_view(comparison))
    else:
        print_result(*report_view(report))
