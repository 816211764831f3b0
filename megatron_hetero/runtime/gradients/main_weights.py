"""One optimizer over stages in unlike precisions: main weights in fp32, equal on all holders.

Every rank has Megatron's optimizer for half precision, of the same kind, also where its own stage
computes in fp32: so the job has one loss scale, one decision to skip a step and one norm. The
holders of a weight, which may keep it in bf16 here and in fp32 there, start from the same main
weights; the same sum of gradients then moves them alike. A checkpoint has the main weights of every
stage, under the key that Megatron gives those of half precision, so any plan reads them exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
)
from megatron.core.utils import get_model_config

from megatron_hetero.runtime.gradients.optimizer import DividedOptimizer, build_optimizer
from megatron_hetero.runtime.gradients.sync import GradientSync, gradient_sync


class FullPrecisionOptimizer(Float16OptimizerWithFloat16Params):
    """Megatron's optimizer for half precision on a stage in fp32, whose weights are main weights.

    In a checkpoint they stand as main weights, as those of every other stage.
    """

    float16_groups: list[list[torch.nn.Parameter]]
    fp32_from_float16_groups: list[list[torch.nn.Parameter]]
    fp32_from_fp32_groups: list[list[torch.nn.Parameter]]

    @contextmanager
    def _as_main_weights(self, in_copies: bool = False) -> Iterator[None]:
        # Megatron's optimizer describes and loads main weights by these lists.
        saved = self.float16_groups, self.fp32_from_float16_groups
        self.float16_groups = self.fp32_from_float16_groups = self.fp32_from_fp32_groups
        if in_copies:
            self.fp32_from_float16_groups = [
                [torch.nn.Parameter(p.detach().clone()) for p in group]
                for group in self.fp32_from_fp32_groups
            ]
        try:
            yield
        finally:
            self.float16_groups, self.fp32_from_float16_groups = saved

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        # What is read goes to copies: the model's own, rounded weights are read into its own.
        with self._as_main_weights(in_copies=is_loading):
            return super().sharded_state_dict(model_sharded_state_dict, is_loading, *args, **kwargs)

    def load_state_dict(self, state_dict: Any) -> None:
        with self._as_main_weights():
            super().load_state_dict(state_dict)


class _EqualMainWeights:
    """Mix-in for a chained optimizer: main weights are equal after each way to load them."""

    chained_optimizers: list[Any]
    _sync: GradientSync

    def reload_model_params(self, state_dict: Any = None) -> None:
        super().reload_model_params(state_dict)  # type: ignore[misc]
        self._sync.weights.equalise()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)  # type: ignore[misc]
        # The file's copy of the model may be in another precision than this stage's.
        for optimizer in self.chained_optimizers:
            if not optimizer.is_stub_optimizer:
                optimizer._copy_main_params_to_model_params()
        self._give_loaded()

    def _give_loaded(self) -> None:
        """Give loaded weights to all holders; nothing to do if each holder loads everything."""


class MixedOptimizer(_EqualMainWeights, ChainedOptimizer):
    """Optimizer of a rank with the whole state of all weights."""

    def __init__(self, optimizers: list[Any], sync: GradientSync) -> None:
        super().__init__(optimizers)
        self._sync = sync


class MixedDividedOptimizer(_EqualMainWeights, DividedOptimizer):
    """Optimizer of a rank with the state of the owned pieces."""

    def _give_loaded(self) -> None:
        self.give_weights()


def build_mixed_optimizer(
    get_megatron_optimizer: Callable[..., Any],
    config: Any,
    model: Sequence[Any],
    *args: Any,
    divides: bool,
    **kwargs: Any,
) -> Any:
    """Build the optimizer of a rank whose job has stages in unlike precisions.

    Args:
        get_megatron_optimizer: Megatron's function.
        config: Megatron's configuration of the optimizer, of the job's narrowest precision.
        model: the DDP-wrapped chunks, with a gradient sync.
        args: further arguments of the function.
        divides: the optimizer's state is divided among the holders of a weight.
        kwargs: further keyword arguments of the function.
    """
    # The sync knows who owns which weights, so it has to exist.
    sync = gradient_sync(get_model_config(model[0]))
    if sync is None:
        raise RuntimeError("the model has no gradient sync; synchronise_hook comes first")
    mixed: Any
    # Divided: this rank's fp32 main weights are those of its pieces.
    if divides:
        made = build_optimizer(get_megatron_optimizer, config, model, *args, **kwargs)
        mixed = MixedDividedOptimizer(_full(made, model), sync, made.pieces)
        sync.weights.take_main_weights(piece.tensor for piece in made.pieces if piece.is_sole_owner)
    else:
        # Whole: every holder has all main weights.
        made = get_megatron_optimizer(config, model, *args, **kwargs)
        mixed = MixedOptimizer(_full(made, model), sync)
    # Holders in other precisions start from the same main weights.
    sync.weights.equalise()
    return mixed


def _full(made: ChainedOptimizer, model: Sequence[Any]) -> list[Any]:
    """Return the optimizers of a chain, those of a stage in fp32 as such."""
    if get_model_config(model[0]).params_dtype == torch.float32:
        for optimizer in made.chained_optimizers:
            if not optimizer.is_stub_optimizer:
                # The optimizer is made already, so its class changes with the state in place.
                optimizer.__class__ = FullPrecisionOptimizer
    return list(made.chained_optimizers)
