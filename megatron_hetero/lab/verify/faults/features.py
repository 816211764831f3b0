"""Errors planted in single features: exchange groups, experts, latent attention, context, logs.

Each needs a job that has the feature (`tests/lab/verify/faults/jobs.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_hetero.lab.verify.faults.within_rank import _is_last_rank


def use_weights_early() -> None:
    """Skip the waits of a forward pass for new weights that are under way."""
    from megatron_hetero.runtime.gradients.sharding.parameter_gather import ParameterGather

    ParameterGather._wait_for = lambda self, parameters: lambda *given: None  # type: ignore[method-assign]


def move_the_last_bit() -> None:
    """Move the last rank's sums of gradients by one unit in the last place."""
    from megatron_hetero.runtime.gradients.memory import main_grad
    from megatron_hetero.runtime.gradients.reduction import Reduction

    finish = Reduction.finish

    def broken(self: Reduction) -> None:
        finish(self)
        for _, view in self.views.views(main_grad) if _is_last_rank() else ():
            view.mul_(1 + 2.0**-23)

    Reduction.finish = broken  # type: ignore[method-assign]


def shift_later_gradients() -> None:
    """Move the gradients of a bucket by one element, on all its holders, from the second step."""
    from megatron_hetero.runtime.gradients.memory import main_grad
    from megatron_hetero.runtime.gradients.reduction import Reduction

    finish = Reduction.finish
    steps: dict[Reduction, int] = {}

    def broken(self: Reduction) -> None:
        finish(self)
        steps[self] = steps.get(self, 0) + 1
        for piece, view in self.views.views(main_grad):
            if steps[self] > 1 and piece.name.startswith("decoder.layers.3."):
                view.copy_(view.roll(1, 0))

    Reduction.finish = broken  # type: ignore[method-assign]


def draw_outputs_unscaled() -> None:
    """Draw output layers as all others, in every run."""
    from megatron_hetero.runtime.model import initial_weights

    initial_weights._OUTPUT_LAYERS = ("none",)  # type: ignore[assignment]


def draw_layers_alike() -> None:
    """Draw all layers from one seed, in every run."""
    from megatron_hetero.runtime.model import initial_weights

    seed_of = initial_weights._seed_of
    initial_weights._seed_of = lambda name, seed: seed_of(name.split(".")[-2], seed)


def log_wrong_further_losses() -> None:
    """Count the last stages' losses of further tokens 1 % too much in the log."""
    from megatron_hetero.runtime.megatron import mtp_losses

    apply = mtp_losses.apply

    def broken(last_stages: Any, width: float, size: int) -> None:
        apply(last_stages, width / 1.01, size)

    mtp_losses.apply = broken


def log_balance_of_one_stage() -> None:
    """Log losses of balance without summing them over the job."""
    from megatron_hetero.runtime.model.moe.experts import JobMoEMetrics

    def broken(self: JobMoEMetrics, metric_names: list[str], pg_collection: Any = None) -> None:
        pass

    JobMoEMetrics._sync_metrics = broken  # type: ignore[method-assign]


def swap_expert_slots() -> None:
    """Send tokens to the next slot than the one of their expert."""
    from megatron_hetero.runtime.model.moe.dealt_experts import DealtMoELayer

    in_slots = DealtMoELayer._in_slots
    DealtMoELayer._in_slots = lambda self, columns: in_slots(self, columns.roll(1, 1))  # type: ignore[method-assign]


def forget_expert_weights() -> None:
    """Weigh all experts of a token alike, where they are dealt out unequally."""
    from megatron_hetero.runtime.model.moe.dealt_experts import DealtMoELayer

    in_slots = DealtMoELayer._in_slots

    def broken(self: DealtMoELayer, columns: torch.Tensor) -> torch.Tensor:
        placed = in_slots(self, columns)
        return placed if placed.dtype == torch.bool else (placed > 0).to(placed) * 0.5

    DealtMoELayer._in_slots = broken  # type: ignore[method-assign]


def keep_own_heads_gradient() -> None:
    """Leave the gradient of latent attention's shared keys unsummed: Megatron 0.19's own error."""
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from megatron_hetero.runtime.model.attention.latent_attention import LatentSelfAttention

    LatentSelfAttention._qkv_down_projection = MLASelfAttention._qkv_down_projection  # type: ignore[method-assign]


def forget_a_piece() -> None:
    """Leave one holder's piece out of a sum within a group of machines."""
    from megatron_hetero.runtime.gradients.groups import rounds

    def broken(pieces: Any, total: torch.Tensor) -> None:
        total.copy_(pieces[0])

    rounds.add_in_order = broken


def skip_pair_sums() -> None:
    """Skip the sum of two holders on their own communicator."""
    from megatron_hetero.runtime.gradients.groups.pair_group import Turn

    Turn.sum = lambda self, part, group: self.end()  # type: ignore[method-assign]


def send_zero_rounds() -> None:
    """Send zeros in the place of every bucket that crosses groups of machines."""
    from megatron_hetero.runtime.gradients.groups.grouped import GroupedReduction

    start = GroupedReduction._start

    def broken(self: GroupedReduction, flat: torch.Tensor) -> Any:
        if _is_last_rank():
            flat.zero_()
        return start(self, flat)

    GroupedReduction._start = broken  # type: ignore[method-assign]


def forget_a_divided_holder() -> None:
    """Leave the last holder out of the sums that an owner of optimizer state makes."""
    from megatron_hetero.runtime.gradients.reduction import DividedReduction

    keep = DividedReduction._keep

    def broken(self: DividedReduction, flat: torch.Tensor) -> None:
        self._received.view(len(self.division.sizes), -1)[-1].zero_()
        keep(self, flat)

    DividedReduction._keep = broken  # type: ignore[method-assign]


def shift_owned_rows() -> None:
    """Give the optimizer the sums of the next element of its rows."""
    from megatron_hetero.runtime.gradients import reduction

    scatter = reduction.scatter
    reduction.scatter = lambda flat, targets: scatter(flat.roll(1), targets)


def reverse_context_pieces() -> None:
    """Gather keys and values of a sequence's parts from last rank to first."""
    from megatron_hetero.runtime.parallel import context_attention

    gathered = context_attention.gathered_pieces

    def broken(part: torch.Tensor, num_tokens: int, group: Any) -> torch.Tensor:
        return torch.cat(gathered(part, num_tokens, group).split(num_tokens)[::-1])

    context_attention.gathered_pieces = broken


def see_the_next_token() -> None:
    """Let a query see one key after its own."""
    from megatron_hetero.runtime.parallel import fused_rows

    mask = fused_rows._mask
    fused_rows._mask = lambda first, stop: mask(first + 1, stop + 1)[..., :stop]


def count_more_tokens() -> None:
    """Divide by 0.1 % more tokens than the job has."""
    from megatron_hetero.runtime.gradients.sync import GradientSync

    count = GradientSync.count_tokens

    def broken(self: GradientSync, num_tokens: torch.Tensor) -> int:
        return round(count(self, num_tokens) * 1.001) + 1

    GradientSync.count_tokens = broken  # type: ignore[method-assign]


def keep_old_gradients() -> None:
    """Begin the last rank's steps with half of the gradients of the one before."""
    from megatron.core.distributed import DistributedDataParallel

    zero = DistributedDataParallel.zero_grad_buffer

    def broken(self: Any) -> None:
        kept = [b.grad_data.clone() for b in self.buffers] if _is_last_rank() else []
        zero(self)
        for buffer, old in zip(self.buffers, kept, strict=False):
            buffer.grad_data.copy_(old * 0.5)

    DistributedDataParallel.zero_grad_buffer = broken


def shift_vocabulary() -> None:
    """Look up each token's neighbour in the embedding of a stage."""
    from megatron_hetero.runtime.model import gpt

    _with_batch(gpt, "tokens", lambda tokens: (tokens + 1) % 257)


def shift_labels() -> None:
    """Train on each sequence's labels in the order of another micro-batch position."""
    from megatron_hetero.runtime.model import gpt

    _with_batch(gpt, "labels", lambda labels: labels.roll(1, -1))


def shift_positions() -> None:
    """Begin positions at one."""
    from megatron_hetero.runtime.model import gpt

    _with_batch(gpt, "position_ids", lambda places: places.roll(-1, -1))


def _with_batch(gpt: Any, key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    batch = gpt._batch

    def broken(*given: Any) -> Any:
        found = batch(*given)
        if found.get(key) is not None:
            found[key] = change(found[key])
        return found

    gpt._batch = broken


def decay_more_on_one_rank() -> None:
    """Decay the last rank's weights twice as much."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    get_wd = OptimizerParamScheduler.get_wd
    OptimizerParamScheduler.get_wd = lambda self, *given: (
        get_wd(self, *given) * (1 + _is_last_rank())
    )


def weigh_further_tokens_more() -> None:
    """Weigh the losses of further tokens twice as much."""
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    set_scale = MTPLossAutoScaler.set_loss_scale
    MTPLossAutoScaler.set_loss_scale = staticmethod(lambda scale: set_scale(scale * 2))


def balance_experts_more() -> None:
    """Weigh the loss that balances experts twice as much."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    set_scale = MoEAuxLossAutoScaler.set_loss_scale
    MoEAuxLossAutoScaler.set_loss_scale = staticmethod(lambda scale: set_scale(scale * 2))


def scale_boundary_gradients() -> None:
    """Scale what the last rank sends to other stages by 1.0001."""
    from megatron_hetero.runtime.parallel.boundary import Boundary

    send_ops = Boundary.send_ops

    def broken(self: Boundary, tensor: torch.Tensor, sequence_parallel: bool) -> Any:
        factor = 1.0001 if _is_last_rank() else 1.0
        return send_ops(self, tensor * factor, sequence_parallel)

    Boundary.send_ops = broken  # type: ignore[method-assign]


FEATURE_FAULTS: dict[str, Callable[[], None]] = {
    "weights-used-early": use_weights_early,
    "last-bit-moved": move_the_last_bit,
    "later-gradients-shifted": shift_later_gradients,
    "outputs-drawn-unscaled": draw_outputs_unscaled,
    "layers-drawn-alike": draw_layers_alike,
    "further-losses-logged-wrong": log_wrong_further_losses,
    "balance-logged-by-stage": log_balance_of_one_stage,
    "expert-slots-swapped": swap_expert_slots,
    "expert-weights-forgotten": forget_expert_weights,
    "own-heads-gradient": keep_own_heads_gradient,
    "exchange-piece-forgotten": forget_a_piece,
    "pair-sum-skipped": skip_pair_sums,
    "exchange-of-zeros": send_zero_rounds,
    "divided-holder-forgotten": forget_a_divided_holder,
    "owned-rows-shifted": shift_owned_rows,
    "context-pieces-reversed": reverse_context_pieces,
    "next-token-seen": see_the_next_token,
    "more-tokens-counted": count_more_tokens,
    "old-gradients-kept": keep_old_gradients,
    "vocabulary-shifted": shift_vocabulary,
    "labels-shifted": shift_labels,
    "positions-shifted": shift_positions,
    "decays-more-alone": decay_more_on_one_rank,
    "further-tokens-weigh-more": weigh_further_tokens_more,
    "balance-weighs-more": balance_experts_more,
    "boundary-gradients-scaled": scale_boundary_gradients,
}
IN_EVERY_RUN = ("outputs-drawn-unscaled", "layers-drawn-alike")
"""Errors in code that the one process uses too: the drawing of initial weights."""
