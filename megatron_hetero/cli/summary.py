"""A plan's figures as the JSON object that `plan` and `explain` print."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_hetero.cost.utilization import Utilization
from megatron_hetero.flags.notes import plan_notes
from megatron_hetero.flags.other_objective import other_objective
from megatron_hetero.flags.support.lookup import refused_options
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.stock import is_stock


def plan_summary(
    plan: Plan, path: Path | None, utilization: Utilization | None = None
) -> dict[str, Any]:
    """Return a plan's figures; None where the plan has no estimates, or no cluster is known for the
    utilization.  `plan` is the file, None if not written."""
    estimates = plan.estimates
    return {
        "plan": None if path is None else str(path),
        "layout": format_layout(plan.layout),
        "stock_megatron": is_stock(plan),
        "refused_flags": list(map(str, refused_options(plan))),
        "notes": list(plan_notes(plan)),
        "other_objective": other_objective(plan),
        "step_time_s": estimates and estimates.step_time_s,
        "tokens_per_s": estimates and estimates.tokens_per_s,
        "utilization": utilization and asdict(utilization),
        "price_per_hour": estimates and estimates.price_per_hour,
        "price_per_million_tokens": estimates and estimates.price_per_million_tokens,
        "traffic_price_per_hour": estimates and estimates.traffic_price_per_hour,
        "traffic": [asdict(part) for part in estimates.traffic] if estimates else [],
        "bound_s": estimates and estimates.bound_s,
        "gap": estimates and estimates.gap,
        "bound_relaxes": estimates and estimates.bound_relaxes,
        "bound_with_context_parallel_s": estimates and estimates.bound_with_context_parallel_s,
        "measured": estimates and estimates.measured,
        "idle_devices": list(plan.idle_devices),
        "idle_reasons": dict(plan.idle_reasons),
    }
