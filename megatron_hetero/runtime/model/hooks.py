"""Changes of Megatron's model between its construction and the optimizer's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training import get_args
from megatron.training.utils import print_rank_0

from megatron_hetero.model.training import Precision
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.gradients.sync import GradientSync, gradient_sync, set_gradient_sync
from megatron_hetero.runtime.model.custom_spec import check_marked, mark_offsets
from megatron_hetero.runtime.model.initial_weights import initialise
from megatron_hetero.runtime.observe.sync_report import gather_sync_plans, sync_lines
from megatron_hetero.runtime.parallel.groups import RankGroups
from megatron_hetero.runtime.parallel.shards import global_parameters, is_expert
from megatron_hetero.runtime.state.checkpoint import carry_random_states, describe_globally
from megatron_hetero.runtime.state.random_states import RandomStates, seed_all

ModelHook = Callable[[list[Any]], list[Any]]


def initial_weights_hook(seed: int) -> ModelHook:
    """Return a `pre_wrap_hook` that draws layout-independent weights (`initial_weights`)."""

    def hook(model: list[Any]) -> list[Any]:
        initialise(model, seed)
        return model

    return hook


def random_state_hook(groups: RankGroups) -> ModelHook:
    """Return a `post_wrap_hook` that leaves random states as meant by Megatron.

    On a CPU the initial weights come from the state that dropout uses later, and ranks with unlike
    shares draw unlike numbers of them, so the state of the group's first rank is taken over. GPUs
    keep the two apart. With `--data-parallel-random-init` each replica has states of its own;
    Megatron knows replicas by the data-parallel rank, which is 0 on every rank of a plan.
    """

    def hook(model: list[Any]) -> list[Any]:
        args = get_args()
        if args.data_parallel_random_init:
            # Megatron's distance between the seeds of data-parallel ranks.
            seed_all(args.seed + 10 * groups.position.replica)
        elif not backend.cuda_is_usable() and groups.tensor.size() > 1:
            state = torch.get_rng_state()
            torch.distributed.broadcast(state, group=groups.tensor, group_src=0)
            torch.set_rng_state(state)
        return model

    return hook


def marks_hook(groups: RankGroups) -> ModelHook:
    """Return a `post_wrap_hook` that refuses layers without marks of the division.

    Those of Megatron that do not are told (`custom_spec.mark_offsets`).
    """

    def hook(model: list[Any]) -> list[Any]:
        # First the marks that Megatron leaves out, then the check for marks.
        mark_offsets(model)
        check_marked(model, groups.tensor.size())
        return model

    return hook


def stock_agreement_hook(model: list[Any]) -> list[Any]:
    """Broadcast the parameters: a `post_wrap_hook` for plans that stock Megatron runs.

    It follows `initial_weights_hook` and makes data-parallel ranks agree to the last bit, which
    random number kernels of unlike processors need not do.
    """
    for chunk in model:
        chunk.broadcast_params()
    return model


def synchronise_hook(
    plan: Plan,
    groups: RankGroups,
    optimizer_weights: Sequence[int] | None = None,
    *,
    overlaps_gathers: bool = False,
    aligned: bool = True,
    precisions: Sequence[Precision] | None = None,
) -> ModelHook:
    """Return a `post_wrap_hook` that installs the gradient sync and marks parameters for the norm.

    Megatron's norm leaves out parameters marked `shared`. The parameters of all copies but the
    first are marked, so every element of the model counts once, whoever holds it. The optimizer
    copies the mark to its fp32 main weights, so the hook runs before it is built.

    Args:
        plan: the plan.
        groups: the groups of this rank.
        optimizer_weights: as in `GradientSync`.
        overlaps_gathers: as in `GradientSync`.
        aligned: as in `GradientSync`.
        precisions: as in `GradientSync`.
    """

    def hook(model: list[Any]) -> list[Any]:
        for name, parameter in global_parameters(model):
            if (groups.expert_copy if is_expert(name) else groups.copy) > 0:
                parameter.shared = True
        sync = GradientSync(
            model,
            groups,
            plan,
            optimizer_weights,
            overlaps_gathers=overlaps_gathers,
            aligned=aligned,
            precisions=precisions,
        )
        # All holders begin with equal weights, to the last bit.
        sync.weights.equalise()
        parts = gather_sync_plans(sync)
        print_rank_0("\n".join(sync_lines(parts)))
        set_gradient_sync(get_model_config(model[0]), sync)
        return model

    return hook


def weights_are_equal(model: Sequence[Any]) -> bool:
    """Tell if all holders of a weight have the same one; collective."""
    sync = gradient_sync(get_model_config(model[0]))
    return sync is None or sync.weights.are_equal()


def checkpoint_hook(
    groups: RankGroups, states: RandomStates, dtype: torch.dtype | None = None
) -> ModelHook:
    """Return a `post_wrap_hook` that gives checkpoints global shapes and random states.

    See `runtime.state.checkpoint`, also for `dtype`, and `runtime.state.random_states`.
    """

    def hook(model: list[Any]) -> list[Any]:
        sync = gradient_sync(get_model_config(model[0]))
        # Weights have to be whole whenever a checkpoint is described.
        before = None if sync is None else sync.weights.finish
        describe_globally(model, groups.copy, groups.expert_copy, before, dtype)
        carry_random_states(unwrap_model(model[0]), states)
        # Whole weights are loaded, of which a rank keeps the rows that it owns.
        if sync is not None and sync.sharded:
            for chunk in unwrap_model(model):
                chunk.load_state_dict = _then(chunk.load_state_dict, sync.sharded.take_weights)
        return model

    return hook


def _then(function: Callable[..., Any], after: Callable[[], None]) -> Callable[..., Any]:
    """Return `function` followed by `after`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        after()
        return result

    return call
