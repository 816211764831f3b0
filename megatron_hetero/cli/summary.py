"""A plan's figures as the JSON object that `plan` and `explain` print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_hetero.flags.support import refused_options
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.stock import is_stock


def plan_summary(plan: Plan, path: Path | None) -> dict[str, Any]:
    """Figures are None where the plan has no estimates; `plan` is the file, None if not written."""
    estimates = plan.estimates
    return {
        "plan": None if path is None else str(path),
        "layout": format_layout(plan.layout),
        "stock_megatron": is_stock(plan),
        "refused_flags": list(map(str, refused_options(plan))),
        "step_time_s": estimates and estimates.step_time_s,
        "tokens_per_s": estimates and estimates.tokens_per_s,
        "price_per_hour": estimates and estimates.price_per_hour,
        "price_per_million_tokens": estimates and estimates.price_per_million_tokens,
        "bound_s": estimates and estimates.bound_s,
        "gap": estimates and estimates.gap,
        "bound_relaxes": estimates and estimates.bound_relaxes,
        "measured": estimates and estimates.measured,
        "idle_devices": list(plan.idle_devices),
        "idle_reasons": dict(plan.idle_reasons),
    }
