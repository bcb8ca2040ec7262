"""How long training stands still for a checkpoint, against a plain copy of the same bytes.

    python -m benchmarks.checkpoint_stall [--saves 6] [--dir FOLDER] [--json results.json]

Real training on CPU, one thread a process, with a checkpoint every few steps. At each step that
saves, all ranks first copy what is to be saved themselves, tensor by tensor; then training goes on
and saves. Caches are swept before either, so that neither finds what the other has read. The stall
is all time between steps, of those from the one that saves to the next one that does: the copy, and
the waits for the writing. The longest over ranks counts, of copies as of stalls. The first save
allocates its buffers: it is held against a copy to new memory, the later ones, by their medians,
against one to memory that was used before. The last checkpoint, which nothing goes on after, is
written while everybody waits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import overhead
from eth_cli.events import Span, read_events
from eth_cli.launch.config import RunFolder, RunOptions
from eth_cli.launch.runtime.trainer import Trainer
from eth_cli.model import ModelSpec
from eth_cli.plan import Plan

EVERY = 8
"""Steps between checkpoints: more than one takes to be written."""
MICRO_BATCHES = 2
_SWEPT_BYTES = 2**28
"""More than the caches of a processor hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saves:
    """What one rank measured of its background saves, in order."""

    num_bytes: int
    """That this rank saves each time."""
    copies_s: list[float]
    """Plain ones, each right before a save."""
    stalls_s: list[float]
    waits_s: list[float]
    """What of each stall is a wait for the writing, by the events."""
    write_s: float
    """Of one checkpoint beside the training, the median."""
    waited_write_s: float
    """Of the last one, which everybody waits for."""
    step_s: float
    """Of a step while nothing is written, the median."""
    step_beside_s: float
    """Of a step while a checkpoint is written, the median."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One setting."""

    setting: str
    num_bytes: int
    """Of the whole checkpoint."""
    first_copy_s: float
    first_stall_s: float
    copy_s: float
    stall_s: float
    wait_s: float
    """What of the stall is a wait for the writing."""
    write_s: float
    waited_write_s: float
    step_s: float
    step_beside_s: float

    @property
    def first_ratio(self) -> float:
        """Stall over copy, of the save that allocates."""
        return self.first_stall_s / self.first_copy_s

    @property
    def ratio(self) -> float:
        """Stall over copy, of the later saves."""
        return self.stall_s / self.copy_s


def model(hidden_size: int) -> ModelSpec:
    """The model of `benchmarks.overhead` in another width."""
    sizes = {
        "hidden_size": hidden_size,
        "embedding_size": hidden_size,
        "head_dim": hidden_size // 4,
        "ffn_size": 4 * hidden_size,
    }
    data = overhead.model().model_dump() | sizes
    return ModelSpec.model_validate(data)


class _Copier:
    """Copies what a trainer is about to save, and notes when each step has ended."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None
        self.copies_s: list[float] = []
        self.ends_s: list[float] = []
        """When each step of training had ended, this copy included [s since the epoch]."""
        self.num_bytes = 0
        self._buffers: dict[str, torch.Tensor] = {}
        self._swept = torch.zeros(_SWEPT_BYTES, dtype=torch.uint8)

    def on_step(self, step: int) -> None:
        """After a step of training, before what is done between steps."""
        assert self.trainer is not None
        options = self.trainer.options
        if step % options.checkpoint_every == 0 and step < options.steps:
            state = self.trainer.optimizer.saved_state()
            self.num_bytes = sum(tensor.nbytes for tensor in state.values())
            self._swept.add_(1)
            # The ranks of a machine share the memory that they copy in.
            dist.barrier()
            start_s = time.perf_counter()
            self._copy(state)
            self.copies_s.append(time.perf_counter() - start_s)
            self._swept.add_(1)
            dist.barrier()
        self.ends_s.append(time.time())

    def _copy(self, state: dict[str, torch.Tensor]) -> None:
        if not self._buffers:
            # They stay: given back, they would serve the first save as memory used before.
            self._buffers = {key: tensor.clone() for key, tensor in state.items()}
            return
        for key, tensor in state.items():
            self._buffers[key].copy_(tensor)


def work(rank: int, made: Plan, spec: ModelSpec, options: RunOptions, root: str) -> None:
    """One process; leaves what it measured in ``root``."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/meet", rank=rank, world_size=len(made.ranks)
    )
    copier = _Copier()
    folder = RunFolder(root)
    copier.trainer = Trainer(
        made,
        spec,
        rank=rank,
        options=options,
        folder=folder,
        source=overhead.RandomTokens(),
        on_step=lambda metrics: copier.on_step(metrics.step),
    )
    copier.trainer.train()
    spans = [e for e in read_events(folder.events_of(rank)) if isinstance(e, Span)]
    saves = measured(
        spans,
        copier.ends_s,
        every=options.checkpoint_every,
        copies_s=copier.copies_s,
        num_bytes=copier.num_bytes,
    )
    Path(root, f"saves-{rank}.json").write_text(json.dumps(asdict(saves)))
    dist.destroy_process_group()


def measured(
    spans: Sequence[Span],
    ends_s: Sequence[float],
    *,
    every: int,
    copies_s: Sequence[float],
    num_bytes: int,
) -> Saves:
    """What the events of one rank say.

    Args:
        spans: Of the rank, of a whole run.
        ends_s: When each step had ended for the training loop [s since the epoch].
        every: Steps between checkpoints.
        copies_s: Of the plain copies before the background saves.
        num_bytes: That the rank saves.
    """
    steps = sorted((s for s in spans if s.name == "STEP"), key=lambda s: s.start_s)
    gaps_s = [after.start_s - end_s for after, end_s in zip(steps[1:], ends_s, strict=False)]
    starts = [i * every - 1 for i in range(1, len(copies_s) + 1)]
    writes = [s for s in spans if s.name == "CHECKPOINT_WRITE"]
    waits = [s for s in spans if s.name == "CHECKPOINT_WAIT" and s.step is not None]
    # The first steps allocate what later ones use again.
    beside = [s for s in steps[2:] if any(_overlap(s, write) for write in writes)]
    alone = [s for s in steps[2:] if s not in beside]
    (last,) = [s for s in spans if s.name == "CHECKPOINT" and s.step == steps[-1].step]
    return Saves(
        num_bytes=num_bytes,
        copies_s=list(copies_s),
        stalls_s=[sum(gaps_s[start : start + every]) for start in starts],
        waits_s=[
            sum(w.duration_s for w in waits if start + 1 < (w.step or 0) <= start + 1 + every)
            for start in starts
        ],
        write_s=_median(writes),
        waited_write_s=last.duration_s,
        step_s=_median(alone),
        step_beside_s=_median(beside),
    )


def _overlap(one: Span, other: Span) -> bool:
    return one.start_s < other.stop_s and other.start_s < one.stop_s


def _median(spans: Sequence[Span]) -> float:
    return statistics.median(span.duration_s for span in spans)


def measure(
    setting: str, made: Plan, spec: ModelSpec, *, saves: int, folder: Path | None = None
) -> Row:
    """One setting: a first background save and ``saves`` more.

    Args:
        setting: Its name.
        made: The plan.
        spec: The model.
        saves: Background saves that count, without the first one.
        folder: Where checkpoints go; None: where temporary files do.
    """
    options = RunOptions(steps=EVERY * (saves + 2), checkpoint_every=EVERY, keep=1)
    with tempfile.TemporaryDirectory(dir=folder) as root:
        mp.spawn(work, (made, spec, options, root), nprocs=len(made.ranks))  # type: ignore[attr-defined,no-untyped-call] # torch's has no types
        ranks = [
            Saves(**json.loads(Path(root, f"saves-{rank}.json").read_text()))
            for rank in range(len(made.ranks))
        ]
    copies_s = [max(of_ranks) for of_ranks in zip(*(r.copies_s for r in ranks), strict=True)]
    stalls_s = [max(of_ranks) for of_ranks in zip(*(r.stalls_s for r in ranks), strict=True)]
    waits_s = [max(of_ranks) for of_ranks in zip(*(r.waits_s for r in ranks), strict=True)]
    return Row(
        setting=setting,
        num_bytes=sum(r.num_bytes for r in ranks),
        first_copy_s=copies_s[0],
        first_stall_s=stalls_s[0],
        copy_s=statistics.median(copies_s[1:]),
        stall_s=statistics.median(stalls_s[1:]),
        wait_s=statistics.median(waits_s[1:]),
        write_s=max(r.write_s for r in ranks),
        waited_write_s=max(r.waited_write_s for r in ranks),
        step_s=max(r.step_s for r in ranks),
        step_beside_s=max(r.step_beside_s for r in ranks),
    )


SETTINGS = {
    "1 rank, small": (1, 1, 256),
    "1 rank": (1, 1, 512),
    "2 stages": (1, 2, 512),
    "2 pipelines of 1 stage": (2, 1, 512),
}
"""Pipelines, stages of each, and width of the model."""


COLUMNS = (
    *("setting", "checkpoint", "copy", "stall", "of it wait", "stall / copy"),
    *("first copy", "first stall", "first stall / copy"),
    *("written beside", "written while all wait", "step", "step beside"),
)


def table(rows: Sequence[Row]) -> str:
    """A line for each setting."""
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    lines += [
        (
            *(row.setting, f"{row.num_bytes / 1e6:.0f} MB"),
            *(_ms(row.copy_s), _ms(row.stall_s), _ms(row.wait_s), f"{row.ratio:.2f}"),
            *(_ms(row.first_copy_s), _ms(row.first_stall_s), f"{row.first_ratio:.2f}"),
            *(_ms(row.write_s), _ms(row.waited_write_s), _ms(row.step_s), _ms(row.step_beside_s)),
        )
        for row in rows
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _ms(time_s: float) -> str:
    return f"{time_s * 1e3:.0f} ms"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--saves", type=int, default=6, help="saves that count (6)")
    parser.add_argument("--dir", type=Path, help="folder on the disk that is written to")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for setting, (num_pipelines, num_stages, hidden_size) in SETTINGS.items():
        made = overhead.plan(num_pipelines, num_stages, MICRO_BATCHES)
        row = measure(
            setting, made, model(hidden_size), saves=arguments.saves, folder=arguments.dir
        )
        rows.append(row)
    print(table(rows))
    if arguments.json:
        data = [asdict(r) | {"ratio": r.ratio, "first_ratio": r.first_ratio} for r in rows]
        arguments.json.write_text(json.dumps(data, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
