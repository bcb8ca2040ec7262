"""One line on ranks that could not keep their pace, read from the end of long event files."""

from __future__ import annotations

from pathlib import Path

from eth_cli.events import Scalar, Span, write_events
from eth_cli.launch.paces import MISSED, WORST, last_scalars, missed_paces


def scalars(rank: int, count: int, worst_s: float, *, step: int = 9) -> list[Scalar]:
    return [
        Scalar(rank=rank, name=MISSED, value=count, step=step),
        Scalar(rank=rank, name=WORST, value=worst_s, step=step),
    ]


def test_ranks_in_time_are_not_mentioned() -> None:
    assert missed_paces([]) is None
    assert missed_paces(scalars(1, 0, 0.0)) is None


def test_how_often_and_how_much_at_worst() -> None:
    line = missed_paces(scalars(1, 3, 0.0021))
    assert line is not None
    assert line.startswith("rank 1 could not keep its pace 3 times, at worst by 2.1 ms: this")
    line = missed_paces(scalars(1, 1, 0.0021))
    assert line is not None
    assert "could not keep its pace once, at worst by 2.1 ms" in line
    line = missed_paces([*scalars(1, 3, 0.0021), *scalars(4, 8, 0.0502)])
    assert line is not None
    assert (
        "2 ranks could not keep their pace, 11 times in all, at worst by 50.2 ms (rank 4)" in line
    )


def test_only_what_this_run_wrote_last_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-1.jsonl"
    spans = [Span(rank=1, name="F", start_s=float(i), stop_s=i + 0.5, step=6) for i in range(3000)]
    write_events(path, [*scalars(1, 70, 0.7, step=5), *spans, *scalars(1, 3, 0.1)])
    assert path.stat().st_size > 2**16
    assert last_scalars(path, after_step=5) == scalars(1, 3, 0.1)
    assert last_scalars(path, after_step=9) == []
    assert last_scalars(tmp_path / "absent", after_step=0) == []
