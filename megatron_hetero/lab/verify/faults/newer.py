"""Errors planted in rows of attention, experts over replicas, buckets and resumed checkpoints.

Those of a checkpoint (`ONLY_RESUMED`) do nothing in a job that never loads its optimizer's state:
`verify --resume` finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_hetero.lab.verify.faults.within_rank import _is_last_rank


def sharpen_rows() -> None:
    """Scale the scores of a divided sequence's rows by 1.001."""
    from megatron_hetero.runtime.parallel import masked_attention

    attend = masked_attention.attend
    masked_attention.attend = lambda query, key, value, runs, scale: attend(
        query, key, value, runs, scale * 1.001
    )


def roll_rows() -> None:
    """Hand each row of a divided sequence the attention of the row before."""
    from megatron_hetero.runtime.parallel import masked_attention

    attend = masked_attention.attend
    masked_attention.attend = lambda *given: attend(*given).roll(1, 0)


def shift_the_mask() -> None:
    """Place the rows of a divided sequence one position too late, where the mask is written out."""
    from megatron_hetero.runtime.parallel import masked_attention

    positions_of = masked_attention.positions_of
    masked_attention.positions_of = lambda *given: positions_of(*given) + 1


def forget_experts_elsewhere() -> None:
    """Take experts that other replicas do not have for copies of theirs, in the norm."""
    from megatron_hetero.runtime.model import hooks

    hooks.is_expert = lambda name: False


def start_unequal() -> None:
    """Move the last rank's weights a millionth after holders were made equal."""
    from megatron_hetero.runtime.gradients import weights
    from megatron_hetero.runtime.gradients.memory import data

    equalise = weights.equalise

    def broken(buckets: Any, *given: Any) -> None:
        buckets = list(buckets)
        equalise(buckets, *given)
        for bucket in buckets if _is_last_rank() else ():
            for _, view in bucket.views.views(data):
                view.mul_(1 + 1e-6)

    weights.equalise = broken  # type: ignore[assignment]


def forget_the_last_slice() -> None:
    """Leave the last slice out of every bucket that has several."""
    from megatron_hetero.runtime.gradients.memory import BucketViews
    from megatron_hetero.runtime.gradients.rank_buckets import RankBuckets

    def broken(self: RankBuckets, bucket: Any) -> BucketViews:
        slices = bucket.slices[:-1] if len(bucket.slices) > 1 else bucket.slices
        return BucketViews(slices, self.shards, self.parameters)

    RankBuckets._views = broken  # type: ignore[method-assign]


def drop_alike() -> None:
    """Let all ranks draw dropout of tensor-parallel regions from the state of their copies."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from megatron_hetero.runtime.model import hooks

    make = hooks.random_state_hook

    def broken(groups: Any) -> Any:
        hook = make(groups)

        def same(model: Any) -> Any:
            model = hook(model)
            tracker = get_cuda_rng_tracker()
            state = torch.cuda.get_rng_state()
            tracker.set_states({name: state.clone() for name in tracker.get_states()})
            return model

        return same

    hooks.random_state_hook = broken


def count_more_steps() -> None:
    """Let Adam have counted five steps, whatever a checkpoint that is loaded says."""

    def change(optimizer: dict[str, Any]) -> None:
        optimizer["state"]["common_step"] = torch.tensor(5.0)

    _with_loaded(change)


def forget_moments() -> None:
    """Halve the last rank's first moments of a checkpoint that is loaded."""

    def change(optimizer: dict[str, Any]) -> None:
        for moment in _of_key(optimizer, "exp_avg") if _is_last_rank() else ():
            moment.mul_(0.5)

    _with_loaded(change)


def forget_second_moments() -> None:
    """Double the second moments of a checkpoint that is loaded."""

    def change(optimizer: dict[str, Any]) -> None:
        for moment in _of_key(optimizer, "exp_avg_sq"):
            moment.mul_(2)

    _with_loaded(change)


def _with_loaded(change: Callable[[dict[str, Any]], None]) -> None:
    """Apply `change` to the loaded state of each optimizer."""
    from megatron_hetero.runtime.state import other_layers

    load = other_layers.load

    def broken(*given: Any, **named: Any) -> Any:
        loaded = load(*given, **named)
        state = loaded[0] if isinstance(loaded, tuple) else loaded
        for optimizer in other_layers._optimizers(state):
            change(optimizer)
        return loaded

    other_layers.load = broken


def _of_key(state: Any, key: str) -> Iterator[torch.Tensor]:
    """Yield the tensors of a key, at any depth."""
    if isinstance(state, dict):
        for name, value in state.items():
            if name == key and isinstance(value, torch.Tensor):
                yield value
            else:
                yield from _of_key(value, key)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _of_key(value, key)


NEWER_FAULTS: dict[str, Callable[[], None]] = {
    "rows-sharpened": sharpen_rows,
    "rows-rolled": roll_rows,
    "mask-shifted": shift_the_mask,
    "experts-uncounted": forget_experts_elsewhere,
    "started-unequal": start_unequal,
    "last-slice-forgotten": forget_the_last_slice,
    "regions-drop-alike": drop_alike,
    "steps-miscounted": count_more_steps,
    "moments-forgotten": forget_moments,
    "second-moments-doubled": forget_second_moments,
}
ONLY_RESUMED = ("steps-miscounted", "moments-forgotten", "second-moments-doubled")
"""Errors in what a checkpoint gives back."""
