"""`megatron.training.training.get_megatron_optimizer`: an optimizer over the pieces a rank owns.

With `--use-distributed-optimizer` each holder of a weight keeps the optimizer's state of a part of
it.  Megatron's own distributed optimizer divides buffers that are laid out alike on all ranks of
one data-parallel group, which unlike replicas have not.  So Megatron's ordinary optimizer is built
over the pieces that this rank owns (`runtime.gradients.optimizer`).  Any optimizer reads what
stock's distributed one wrote (`runtime.state.stock_optimizer`).  The loop has no argument for
either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

REPLACEMENT = Replacement(
    module="megatron.training.training",
    name="get_megatron_optimizer",
    reason="the optimizer's state is divided among unlike replicas, and read in stock's form",
    known={"b473223298c43430": TESTED},
    is_stock=True,
)


def as_megatron(get_megatron_optimizer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build Megatron's own optimizer: a `build` of `apply`."""
    return get_megatron_optimizer(*args, **kwargs)


def apply(build: Callable[..., Any]) -> None:
    """Build the loop's optimizer by `build(Megatron's function, config, model, ...)`."""

    def get_megatron_optimizer(config: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        return build(REPLACEMENT.original(), config, model, *args, **kwargs)

    REPLACEMENT.apply(get_megatron_optimizer)
