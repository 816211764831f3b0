"""Where a training step stamps its phases: in our programmes, and around stock Megatron's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.utils import get_model_config
from megatron.training import get_args

from megatron_hetero.runtime.faults.progress import PROGRESS, Phase
from megatron_hetero.schedule.programme import Instruction

Function = Callable[..., Any]


def programme_phases(programme: Sequence[Instruction]) -> tuple[tuple[Phase, ...], ...]:
    """[instruction] -> the phase of each of its operations.

    Warm-up lasts to the first backward pass, cool-down begins behind the last forward pass.
    Validation has no backward passes, and is one phase.
    """
    kinds = [operation.kind for instruction in programme for operation in instruction]
    backwards = [i for i, kind in enumerate(kinds) if kind.startswith("backward")]
    if not backwards:
        return tuple((Phase.VALIDATION,) * len(instruction) for instruction in programme)
    first = backwards[0]
    last = max((i for i, kind in enumerate(kinds) if kind == "forward"), default=-1)
    flat = iter(
        Phase.WARM_UP if i < first else Phase.STEADY if i <= last else Phase.COOL_DOWN
        for i in range(len(kinds))
    )
    return tuple(tuple(next(flat) for _ in instruction) for instruction in programme)


def begin_step(forward_only: bool) -> None:
    """Stamp the beginning of a step of training, or of one of validation."""
    if forward_only:
        PROGRESS.enter(Phase.VALIDATION)
    else:
        PROGRESS.begin_step(get_args().curr_iteration + 1, Phase.WARM_UP)


def finishing_gradients(finalize: Function) -> Function:
    """`finalize_model_grads_func` with stamps around it; the optimizer's step comes next."""

    @wraps(finalize)
    def marked(*given: Any, **named: Any) -> Any:
        PROGRESS.enter(Phase.GRADIENT_SYNC)
        result = finalize(*given, **named)
        PROGRESS.enter(Phase.OPTIMIZER_STEP)
        return result

    return marked


def after_a_step(iteration: int, loss_dict: dict[str, Any], grad_norm: Any) -> None:
    """Observe the log: the step is done."""
    PROGRESS.begin_step(iteration, Phase.BETWEEN_STEPS)


def stock_gradients_hook(model: list[Any]) -> list[Any]:
    """Return a `post_wrap_hook` that stamps stock Megatron's work on finished gradients."""
    from megatron.core.distributed import finalize_model_grads

    config = get_model_config(model[0])
    given = config.finalize_model_grads_func or finalize_model_grads
    config.finalize_model_grads_func = finishing_gradients(given)
    PROGRESS.enter(Phase.SETUP)
    return model


def stock_forwards(forward_step: Function) -> Function:
    """Stamp a script's forward step under stock Megatron's schedule, which has no further place for
    stamps.

    The first micro-batches are warm-up until the stage's first backward pass, and what follows the
    last forward pass is cool-down.
    """
    done = 0

    @wraps(forward_step)
    def marked(*given: Any, **named: Any) -> Any:
        nonlocal done
        # Validation runs under no_grad; it has one phase only.
        if not torch.is_grad_enabled():
            PROGRESS.enter(Phase.VALIDATION)
            return forward_step(*given, **named)
        # Forward passes before this stage's first backward pass: the stages behind it.
        due = parallel_state.get_pipeline_model_parallel_world_size()
        due -= parallel_state.get_pipeline_model_parallel_rank() + 1
        # The first forward pass of a step begins the step.
        if done == 0:
            begin_step(forward_only=False)
        else:
            PROGRESS.enter(Phase.WARM_UP if done < due else Phase.STEADY)
        result = forward_step(*given, **named)
        # Behind the last forward pass only backward passes are left.
        done += 1
        if done == get_num_microbatches():
            done = 0
            PROGRESS.enter(Phase.COOL_DOWN)
        return result

    return marked
