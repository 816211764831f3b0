"""The search for a plan.  Importing it loads neither torch nor megatron."""

from __future__ import annotations

from megatron_hetero.planner.search import plan_and_explain, plan_cluster

__all__ = ["plan_and_explain", "plan_cluster"]
