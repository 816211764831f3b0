"""Parts of a layout of ours that no other system's flags can say."""

from __future__ import annotations

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.plan.plan import Layout


def refuse_our_own(layout: Layout, system: str) -> None:
    """Refuse what a layout of ours has and no other system's flags can say.

    Raises:
        UnsupportedError: uneven shares, context parallelism, sharded layers, or experts dealt out.
    """
    stages = [stage for replica in layout.replicas for stage in replica.stages]
    deals = layout.has_expert_groups or any(s.expert_shares is not None for s in stages)
    # Each with whether the layout has it, and the sign of it in the layout's line.
    parts = (
        (any(s.shares for s in stages), "uneven shares of tensors", "tp(...)"),
        (layout.has_context_parallel, "context parallelism", "cp"),
        (layout.has_sharded_layers, "sharded layers", "z"),
        (deals, "experts dealt out to devices", "ep"),
    )
    for has_it, name, sign in parts:
        if has_it:
            raise UnsupportedError(
                f"{system}: {name} (`{sign}` in a layout) cannot be converted; use a plan without"
            )
