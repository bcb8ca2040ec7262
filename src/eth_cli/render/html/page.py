"""The page of a run's report: `report_page`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from eth_cli import __version__
from eth_cli.plan import Plan
from eth_cli.render.html import planned
from eth_cli.render.html.curves import Curve, Point, chart
from eth_cli.render.html.style import STYLE
from eth_cli.render.html.timeline import CLASSES, MAX_RANKS, WORDS, timeline
from eth_cli.render.plan import TERM_WORDS
from eth_cli.render.report import slowest_line
from eth_cli.render.tables import join_devices
from eth_cli.report import Report, StepShares
from eth_cli.units import format_seconds

NOTHING = "–"  # noqa: RUF001 # an en dash, as tables have it
_CLOSE = 0.05
"""Error of a prediction up to which it is shown as good."""
_SHARES = {
    "compute": "computes",
    "bubble": "waits for neighbours",
    "sync": "waits for gradients and slower pipelines",
    "optimizer": "updates",
    "other": "everything else",
}


def report_page(report: Report, plan: Plan) -> str:
    """The report as one HTML page, which needs no other file and no network."""
    name = f"{report.model}: {report.run_dir.name}"
    parts = [
        _header(report, plan),
        _tiles(report),
        _notes(report.notes),
        _timeline(report, plan),
        _curves(report, plan),
        _terms(report),
        _stages(report, plan),
        _plan(plan),
        _memory(report),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # A browser looks for an icon by itself; this one is empty and asks nobody.
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(name)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + f"\n<footer>eth {escape(__version__)}</footer>\n</main>\n</body>\n</html>\n"
    )


def _section(name: str, content: str, *, about: str = "", id_: str = "") -> str:
    identity = f' id="{id_}"' if id_ else ""
    told = f"<p>{escape(about)}</p>" if about else ""
    return f"<section{identity}><h2>{escape(name)}</h2>{told}{content}</section>"


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    parts = (f'<span><i class="{class_}"></i>{escape(words)}</span>' for class_, words in entries)
    return f'<div class="legend">{"".join(parts)}</div>'


def _header(report: Report, plan: Plan) -> str:
    pipelines = len(plan.pipelines)
    facts = [
        str(report.run_dir),
        f"{len(plan.ranks)} devices in {pipelines} pipeline{'s' if pipelines > 1 else ''}",
        f"batch of {plan.global_batch_size} x {plan.seq_len} tokens",
        plan.dtype,
    ]
    if plan.cluster is not None:
        facts.insert(1, f"cluster {plan.cluster.name}")
    return f"<header><h1>{escape(report.model)}</h1><p>{escape(' · '.join(facts))}</p></header>"


def _tiles(report: Report) -> str:
    loss = NOTHING if report.last_loss is None else f"{report.last_loss:.4f}"
    exposed = report.exposed_sync
    tiles = [
        (
            "step time",
            format_seconds(report.measured_step_time_s),
            f"predicted {_seconds(report.predicted_step_time_s)}",
        ),
        (
            "prediction",
            NOTHING if report.error is None else f"{100 * report.error:+.1f} %",
            f"of the median of {report.num_steps} steps",
        ),
        (
            "tokens a second",
            f"{report.measured_tokens_per_s:,.0f}",
            "predicted "
            + (
                NOTHING
                if report.predicted_tokens_per_s is None
                else f"{report.predicted_tokens_per_s:,.0f}"
            ),
        ),
        (
            "gradient sync not hidden",
            format_seconds(exposed.measured_s),
            f"predicted {_seconds(exposed.predicted_s)}",
        ),
        (
            "loss",
            loss,
            "" if report.first_loss is None else f"from {report.first_loss:.4f}",
        ),
    ]
    parts = (
        f'<div class="tile"><div class="name">{escape(name)}</div>'
        f'<div class="value">{escape(value)}</div><div class="beside">{escape(beside)}</div></div>'
        for name, value, beside in tiles
    )
    return f'<div class="tiles">{"".join(parts)}</div>'


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<section class="notes"><ul>{items}</ul></section>'


def _timeline(report: Report, plan: Plan) -> str:
    about = f"Step {report.typical_step}, whose time is nearest to the median."
    if report.predicted_spans:
        about += " The pale bar under each row is what was predicted."
    if len(plan.ranks) > MAX_RANKS:
        about += f" The first {MAX_RANKS} of {len(plan.ranks)} ranks."
    legend = _legend((CLASSES[name], WORDS[name]) for name in CLASSES)
    content = legend + timeline(plan, report.measured_spans, report.predicted_spans)
    return _section("Timeline", content, about=about, id_="timeline")


def _curves(report: Report, plan: Plan) -> str:
    def points(name: str) -> list[Point]:
        found = ((r.step, getattr(r, name)) for r in report.records)
        return [(step, value) for step, value in found if value is not None]

    speed = [
        (r.step, plan.global_batch_size * plan.seq_len / r.step_time_s)
        for r in report.records[report.num_dropped :]
        if r.step_time_s > 0
    ]
    loss = Curve(name="loss", points=points("loss"), text=_three_digits, is_smoothed=True)
    small = (
        (
            "Tokens a second",
            Curve(
                name="tokens a second",
                points=speed,
                text=lambda value: f"{value:,.0f}",
                from_zero=True,
                expected=report.predicted_tokens_per_s,
            ),
            "Dashed: predicted." if report.predicted_tokens_per_s is not None else "",
        ),
        (
            "Gradient norm",
            Curve(name="norm", points=points("grad_norm"), text=_three_digits, from_zero=True),
            "Before clipping.",
        ),
        (
            "Learning rate",
            Curve(name="rate", points=points("lr"), text=lambda v: f"{v:.2g}", from_zero=True),
            "",
        ),
    )
    sections = [
        _section(name, chart(curve, width=350, height=190), about=about, id_=curve.name.split()[0])
        for name, curve, about in small
    ]
    return (
        _section("Loss", chart(loss, width=1080, height=260), id_="loss")
        + f'<div class="pair">{"".join(sections)}</div>'
    )


def _terms(report: Report) -> str:
    rows = [
        (TERM_WORDS.get(term.name, "everything else"), term.predicted_s, term.measured_s, "")
        for term in report.terms
    ]
    rows.append(("step", report.predicted_step_time_s, report.measured_step_time_s, "total"))
    body = ""
    for name, predicted_s, measured_s, class_ in rows:
        difference_s = None if predicted_s is None else predicted_s - measured_s
        body += (
            f'<tr class="{class_}"><td>{escape(name)}</td>'
            f'<td class="number">{_seconds(predicted_s)}</td>'
            f'<td class="number">{format_seconds(measured_s)}</td>'
            f"{_difference(difference_s, report.measured_step_time_s)}</tr>"
        )
    head = (
        '<tr><th>part of the step</th><th class="number">predicted</th>'
        '<th class="number">measured</th><th class="number">difference, of the step</th></tr>'
    )
    about = "" if report.source is None else f"Prediction: {report.source}."
    return _section("Where the step time goes", f"<table>{head}{body}</table>", about=about)


def _difference(difference_s: float | None, step_time_s: float) -> str:
    if difference_s is None:
        return f'<td class="number">{NOTHING}</td>'
    share = difference_s / step_time_s
    class_ = "good" if abs(share) <= _CLOSE else "bad"
    return f'<td class="number {class_}">{round(100 * share, 1) + 0.0:+.1f} %</td>'


def _stages(report: Report, plan: Plan) -> str:
    head = (
        "<tr><th>stage</th><th>device</th>"
        '<th class="number">forward</th><th class="number">predicted</th>'
        '<th class="number">backward</th><th class="number">predicted</th><th>of the step</th></tr>'
    )
    body = ""
    for stage in report.stages:
        name = planned.type_of(plan, plan.pipelines[stage.pipeline].stages[stage.stage])
        body += (
            f"<tr><td>p{stage.pipeline} s{stage.stage}</td>"
            f"<td>{escape(join_devices(stage.devices))} <span class=soft>{escape(name)}</span></td>"
            f'<td class="number">{format_seconds(stage.measured_forward_s)}</td>'
            f'<td class="number soft">{_seconds(stage.predicted_forward_s)}</td>'
            f'<td class="number">{format_seconds(stage.measured_backward_s)}</td>'
            f'<td class="number soft">{_seconds(stage.predicted_backward_s)}</td>'
            f'<td class="wide">{_share_bar(stage.measured_shares)}</td></tr>'
        )
    legend = _legend(_SHARES.items())
    line = slowest_line(report).plain
    about = f"{line[0].upper()}{line[1:]}. Times are of one micro-batch."
    return _section("Stages", f"{legend}<table>{head}{body}</table>", about=about)


def _share_bar(shares: StepShares) -> str:
    values = {name: max(0.0, getattr(shares, name)) for name in _SHARES}
    whole = sum(values.values())
    parts = (
        f'<span class="{name}" style="width:{100 * value / whole:.2f}%" '
        f'title="{escape(words)}: {100 * value:.1f} %"></span>'
        for (name, value), words in zip(values.items(), _SHARES.values(), strict=True)
        if value > 0
    )
    return f'<div class="shares">{"".join(parts)}</div>'


def _plan(plan: Plan) -> str:
    about = f"{len(plan.pipelines)} pipelines, each with cuts and a share of the batch of its own."
    if len(plan.pipelines) == 1:
        about = "One pipeline."
    if plan.unused_devices:
        left_out = ", ".join(unused.device for unused in plan.unused_devices)
        about += f" Left out: {left_out}."
    return _section("Plan", planned.plan_drawing(plan), about=about, id_="plan")


def _memory(report: Report) -> str:
    legend = _legend(
        (("measured", "measured"), ("predicted", "predicted"), ("capacity", "capacity"))
    )
    bars = planned.memory_bars(report.memory, limit=MAX_RANKS)
    return _section("Peak memory", legend + bars, id_="memory")


def _seconds(value: float | None) -> str:
    return NOTHING if value is None else format_seconds(value)


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
