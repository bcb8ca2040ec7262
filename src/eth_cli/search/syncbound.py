"""Lower bounds on the gradient sync of a set of templates, before any device is chosen.

Every bucket is taken to run alone over the fastest links that its owners' kinds have; nothing else
of the order in `gradsync` is given up, and starting or ending a bucket sooner never delays another.
"""

from __future__ import annotations

from collections.abc import Sequence

from eth_cli.buckets import GRADIENT_BYTES
from eth_cli.search.gradsync import Bucket, Owner, buckets
from eth_cli.search.place import Share
from eth_cli.search.templates import Problem, Template
from eth_cli.search.timeline import run_pipeline


class SyncBound:
    """Bounds for one problem; remembers what it computed."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._buckets: dict[object, tuple[Bucket, ...]] = {}
        self._rings: dict[tuple[tuple[int, ...], int, int], float] = {}

    def exposed_s(self, templates: Sequence[Template]) -> list[float]:
        """By pipeline: time from the end of its last backward to that of its first stage's sync.

        The first stage's last backward ends the pipeline. Its buckets go out one by one, the
        first of them when only the blocks below it are left to do.
        """
        found = self._find(templates)
        exposed = []
        for i, template in enumerate(templates):
            longest = rest = 0.0
            for bucket in reversed(found):
                if (i, 0) in bucket.owners:
                    lowest = bucket.lowest_block[bucket.owners.index((i, 0))]
                    rest += self._ring_s(bucket, templates)
                    longest = max(longest, rest - self._below_s(template, 0, lowest))
            exposed.append(longest)
        return exposed

    def end_s(self, shares: Sequence[Share]) -> float:
        """When the last bucket and the last backward end, at best [s]."""
        templates = [share.template for share in shares]
        runs = [run_pipeline(self.problem.times(t), m) for t, m in shares]
        end = max(run.end_s for run in runs)
        free: dict[Owner, float] = {}
        for bucket in self._find(templates):
            start = 0.0
            for (i, s), lowest in zip(bucket.owners, bucket.lowest_block, strict=True):
                ready = runs[i].stage_end_s[s] - self._below_s(templates[i], s, lowest)
                start = max(start, ready, free.get((i, s), 0.0))
            stop = start + self._ring_s(bucket, templates)
            free |= dict.fromkeys(bucket.owners, stop)
            end = max(end, stop)
        return end

    def _find(self, templates: Sequence[Template]) -> tuple[Bucket, ...]:
        cuts = tuple(tuple((s.start, s.stop) for s in t.stages) for t in templates)
        found = self._buckets.get(cuts)
        if found is None:
            found = self._buckets[cuts] = buckets(self.problem.model.profile.model, cuts)
        return found

    def _below_s(self, template: Template, s: int, lowest: int) -> float:
        """Backward of a stage's blocks below a bucket [s]."""
        stage = template.stages[s]
        if lowest <= stage.start:
            return 0.0
        table = self.problem.model.tables.table(
            self.problem.kinds[stage.kind].device_type,
            stage.tensor_parallel,
            template.micro_batch_size,
        )
        return table.times_s(stage.start, lowest, recompute=stage.recompute)[1]

    def _ring_s(self, bucket: Bucket, templates: Sequence[Template]) -> float:
        """All-reduce of a bucket: no ring is faster than each owner's fastest link to another."""
        stages = [templates[i].stages[s] for i, s in bucket.owners]
        kinds = tuple(sorted(stage.kind for stage in stages))
        width = max(stage.tensor_parallel for stage in stages)
        key = (kinds, width, bucket.num_parameters)
        time_s = self._rings.get(key)
        if time_s is None:
            problem = self.problem
            num_bytes = bucket.num_parameters * GRADIENT_BYTES
            # As many rings side by side as the widest group has devices.
            chunk = num_bytes / (width * len(kinds))
            names = [problem.kinds[k].device_type for k in kinds]
            slowest = 0.0
            for at, name in enumerate(names):
                others = {*names[:at], *names[at + 1 :]}
                hops = [
                    problem.network.best_transfer_s(name, other, chunk, flows=width)
                    for other in others
                ]
                slowest = max(slowest, min((h for h in hops if h is not None), default=0.0))
            time_s = self._rings[key] = 2 * (len(kinds) - 1) * slowest
        return time_s
