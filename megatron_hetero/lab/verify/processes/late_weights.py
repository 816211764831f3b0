"""New weights that are not there until they are waited for.

With `--overlap-param-gather` a forward pass waits for each weight before the weight's first use. On
a fast machine the weight has arrived anyway, and a wait that is missing shows nothing. So here each
gather ends at once, its weights are kept aside, and the model has NaN in their place until the pass
waits: a use before the wait makes every loss after it NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from megatron_hetero.runtime.gradients.memory import data
from megatron_hetero.runtime.gradients.reduction import DividedReduction
from megatron_hetero.runtime.gradients.sync import GradientSync


def arrive_late(sync: GradientSync) -> frozenset[str]:
    """Keep new weights away from a rank's model until it waits for them.

    Returns:
        The names of the parameters that travel so; none where a step ends with all weights whole.
    """
    if sync.weights.under_way is None:
        return frozenset()
    # Buckets are in the order of the backward pass, gathers in that of the forward pass.
    travelling = list(reversed(sync.divided))
    sync.weights.under_way.starts[:] = [partial(_start, each) for each in travelling]
    return frozenset(piece.name for each in travelling for piece in each.views.slices)


def _start(reduction: DividedReduction) -> Callable[[], None]:
    """Gather a bucket's weights, hide them, and return the function that shows them."""
    reduction.gather(data)()
    views = [view for _, view in reduction.views.views(data)]
    arrived = [view.clone() for view in views]
    for view in views:
        view.fill_(float("nan"))

    def finish() -> None:
        for view, values in zip(views, arrived, strict=True):
            view.copy_(values)

    return finish
