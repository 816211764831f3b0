"""Column generation where the replica with most micro-batches sets the pace of all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megatron_hetero.planner.columns.bundle_mix import Bundle
from megatron_hetero.planner.columns.site_mixes import Choice, Site, Together
from megatron_hetero.planner.problem import Problem
from tools.referees.search.all_columns import AllColumns
from tools.referees.search.even_mixes import even_choices


def _alike_s(num_micro_batches: int, counted: Mapping[Bundle, int]) -> float:
    each = -(-num_micro_batches // sum(counted.values()))
    return max(bundle.filled.quick_time_s(each) for bundle in counted)


class EvenColumns(AllColumns):
    """All columns, and mixes with as many micro-batches for every replica."""

    pipelines: Together = staticmethod(_alike_s)

    def choices(self, problem: Problem, sites: Sequence[Site], step_s: float) -> Iterator[Choice]:
        """See `Columns`."""
        yield from super().choices(problem, sites, step_s)
        yield from even_choices(problem, sites)
