"""The answer of a search: a checked `Plan` with what is known about it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import eth_cli
from eth_cli.plan import Plan, Provenance, SolverInfo, UnusedDevice
from eth_cli.search.cost import CostModel
from eth_cli.search.exhaust import Best
from eth_cli.search.placed import to_plan_pipelines
from eth_cli.search.request import SearchOptions
from eth_cli.search.simulate import Simulation, simulate_with

_PROVED_GAP = 1e-9
"""A smaller gap is rounding: the plan is optimal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """Another plan that was looked at."""

    name: str
    step_time_s: float | None
    """Its predicted step time; None: it has no plan [s]."""
    note: str
    """Why there is none, or what it left out; may be empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchReport:
    """The answer of a search."""

    plan: Plan
    simulation: Simulation
    status: str
    """optimal: proved; feasible: the best found."""
    bound_s: float
    """No plan of the space has a smaller predicted step time [s]."""
    gap: float
    """step time / bound - 1."""
    pruned: dict[str, int]
    """Candidates left out, by rule."""
    num_simulated: int
    """Complete plans simulated."""
    rivals: tuple[Rival, ...]
    """The baselines beside an hpp plan."""
    wall_s: float
    """Search time by the caller's clock; 0 without one [s]."""

    @property
    def step_time_s(self) -> float:
        """Predicted step time of the plan [s]."""
        return self.simulation.step_time_s

    def saying(
        self, reasons: Mapping[str, str], asked: Mapping[str, object] | None = None
    ) -> SearchReport:
        """The report with other reasons why devices are unused, by id, and more that was asked."""
        plan = self.plan
        unused = tuple(
            UnusedDevice(device=u.device, reason=reasons.get(u.device, u.reason))
            for u in plan.unused_devices
        )
        changed: dict[str, object] = {"unused_devices": unused}
        if asked and plan.provenance is not None:
            options = plan.provenance.options | dict(asked)
            changed["provenance"] = plan.provenance.model_copy(update={"options": options})
        return replace(self, plan=plan.model_copy(update=changed))


def make_report(
    model: CostModel,
    options: SearchOptions,
    best: Best,
    *,
    bound_s: float,
    unused_reasons: Mapping[str, str],
    rivals: tuple[Rival, ...],
    wall_s: float,
) -> SearchReport:
    """The best plan as an answer, checked. ``unused_reasons`` are by device type."""
    profile, cluster = model.profile, model.cluster
    assert best.pipelines is not None
    position = {device: i for i, device in enumerate(cluster.devices)}
    pipelines = sorted(best.pipelines, key=lambda p: position[p.stages[0].devices[0].id])
    used = {d.id for p in pipelines for s in p.stages for d in s.devices}
    plan = Plan(
        schema_version=1,
        model=profile.model.name,
        seq_len=profile.seq_len,
        dtype=profile.dtype,
        global_batch_size=options.global_batch_size,
        pipelines=to_plan_pipelines(pipelines),
        unused_devices=tuple(
            UnusedDevice(
                device=device.id,
                reason="excluded" if device.id in options.excluded else unused_reasons[device.type],
            )
            for device in cluster.devices.values()
            if device.id not in used
        ),
        provenance=Provenance(
            digests={"cluster": cluster.digest(), "profile": profile.digest()},
            options=_given(options),
            version=eth_cli.__version__,
        ),
    )
    simulation = simulate_with(model, plan, with_spans=False)
    _check(simulation, best)
    bound_s = min(bound_s, simulation.step_time_s)
    gap = simulation.step_time_s / bound_s - 1
    status = "optimal" if gap <= _PROVED_GAP else "feasible"
    plan = plan.model_copy(
        update={
            "predicted": simulation.prediction(),
            "solver": SolverInfo(
                status="optimal" if status == "optimal" else "feasible",
                bound_s=bound_s,
                gap=gap,
                wall_s=float(math.ceil(wall_s)),
                pruned=dict(sorted(best.pruned.items())),
            ),
        }
    )
    return SearchReport(
        plan=plan,
        simulation=simulation,
        status=status,
        bound_s=bound_s,
        gap=gap,
        pruned=dict(sorted(best.pruned.items())),
        num_simulated=best.num_simulated,
        rivals=rivals,
        wall_s=wall_s,
    )


def _given(options: SearchOptions) -> dict[str, object]:
    """What was asked for: options that are not their defaults, and three that are always told."""
    usual = asdict(SearchOptions(global_batch_size=options.global_batch_size))
    return {
        name: sorted(value) if isinstance(value, frozenset) else value
        for name, value in asdict(options).items()
        if name in ("global_batch_size", "strategy", "budget") or value != usual[name]
    }


def _check(simulation: Simulation, best: Best) -> None:
    """The search and the plan must agree; nothing that a solver said is taken on trust.

    Raises:
        RuntimeError: they do not, which is a defect of the search.
    """
    if not math.isclose(simulation.step_time_s, best.time_s, rel_tol=1e-9):
        raise RuntimeError(
            f"the search counted {best.time_s!r} s a step for its plan, the simulator takes "
            f"{simulation.step_time_s!r} s"
        )
    if simulation.excesses:
        raise RuntimeError(f"the search's plan does not fit: {simulation.excesses[0]}")
