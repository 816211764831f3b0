"""Operators launched by the host for the pieces of a model, and the seconds of the launches.

The host (Python, PyTorch's dispatcher and autograd, the driver) launches one operator after the
other and runs ahead of the GPU, so a single small operator costs nothing: what counts is a whole
pass of a piece, which ends no sooner than its last operator is launched.  Layers follow each other
and are alike, so a pass of many layers is bound as one layer is, and times stay sums of pieces.  At
the ends of the model that is an upper limit: a head that takes long lets the host run ahead of the
layers' backward pass, and the time that the host wins there is not credited.  Between
pipeline stages nothing is gained: Megatron waits for the GPU after each exchange with a neighbour
(`batch_p2p_sync`).

Counted are calls of PyTorch's dispatcher that reach the GPU, of Megatron-core 0.19
(`tests/cost/work/test_launches.py` counts its local layer on a CPU).  A narrower shard, a smaller
micro-batch or a shorter sequence needs as many.  Transformer Engine's layers fuse norms, biases and
activation with what these stand beside, but run more Python for each kernel: `host_work` has how
many operators that Python is worth, and so has the work of experts and of gradients' hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.parameters import attention_matrices
from megatron_hetero.cost.share import TensorShare
from megatron_hetero.cost.work import host_work
from megatron_hetero.cost.work.compute import PassTimes, slowest
from megatron_hetero.cost.work.fused_attention import uses_flash_attention
from megatron_hetero.cost.work.profile import Piece, Profile
from megatron_hetero.model.recompute import norms_again, recomputed
from megatron_hetero.model.spec import ModelSpec, Workload
from megatron_hetero.model.training import TrainingSpec

_EAGER_ROTATION = 7
"""Cosine, sine, negation, concatenation, two products and a sum, of queries and of keys each."""
_CASTS = 2
"""Casts of scores to fp32 and back, where torch computes the softmax of 16-bit scores."""
_ACTIVATION = (1, 1)
_HEAD = (20, 11)
"""Final norm, output layer and vocabulary-parallel cross entropy."""


class Launches(NamedTuple):
    """Operators of the forward and of the backward pass; other work of the host in their unit."""

    forward: float
    backward: float

    def plus(self, forward: float, backward: float) -> Launches:
        """Return so many more."""
        return Launches(self.forward + forward, self.backward + backward)


def layer_launches(
    model: ModelSpec, training: TrainingSpec, share: TensorShare, *, flash: bool, fused: bool = True
) -> Launches:
    """Count the operators of a decoder layer, recomputation included.

    Args:
        share: the GPU's part of its tensor-parallel group.
        flash: attention is fused.
        fused: Megatron's own fusions are on (softmax with its mask; bias, dropout and sum; bias and
            activation), as they are on GPUs, and the layer is what the job names; False is for
            layers of plain torch, with layer norm and GELU.
    """
    # Attention, MLP, then collectives; recompute launches its parts of the forward pass again.
    engine = fused and not training.local_layers
    core = _core(training, flash, engine, fused)
    given = model, training, share, engine, fused
    residual, norm = _residual(model, training, engine, fused), _mlp_norm(model, engine)
    both = core.plus(*_attention(*given))
    for part in (residual, norm, _mlp(*given)):
        both = both.plus(*part)
    if share.width > 1:
        both = both.plus(*_communication(training.sequence_parallel))
    if training.recompute == "full":
        return both.plus(0, both.forward)
    return both.plus(0, _launched_again(*given, core.forward))


def _launched_again(
    model: ModelSpec,
    training: TrainingSpec,
    share: TensorShare,
    engine: bool,
    fused: bool,
    core: float,
) -> float:
    """Count the operators of the modules that are recomputed, without exchanges."""
    modules = recomputed(training)
    again = core if "core_attn" in modules else 0.0
    again += sum(norms_again(model, training, modules)) * (host_work.NORM if engine else (1, 1))[0]
    if "mla_up_proj" in modules:
        again += 2 * (host_work.LINEAR.forward if engine else 1)
    if ("moe" if model.num_experts else "mlp") in modules:
        return again + _mlp(model, training, share, engine, fused).forward
    if "shared_experts" in modules and model.num_experts:
        again += _shared_expert(model, training, share, engine, fused).forward
    return again + (1 if "moe_act" in modules and model.num_experts else 0)


def _core(training: TrainingSpec, flash: bool, engine: bool, fused: bool) -> Launches:
    """Count scores, softmax, dropout and context."""
    chosen = Launches(*host_work.ATTENTION) if engine else Launches(0, 0)
    if flash:
        return chosen if engine else Launches(1, 1)
    # Two products, softmax, a copy in the layout of the projection; backward four products, two
    # scalings, softmax.
    core = chosen.plus(4, 7)
    if not fused:  # the mask; of fp32 scores torch also copies the gradient of a view
        # Scores in 16 bits are cast for the softmax; each cast has a gradient.
        casts = 0 if training.precision == "fp32" else _CASTS
        core = core.plus(1 + casts, 1 + (casts or 5))
    return core.plus(1, 1) if training.attention_dropout else core


def _attention(
    model: ModelSpec, training: TrainingSpec, share: TensorShare, engine: bool, fused: bool
) -> Launches:
    """Count norm, projections, rotation and the sum with what went in."""
    products = len(attention_matrices(model, share))
    norms = 2 if model.qk_layernorm else 0
    if engine:
        # The first projection has the norm in its module.
        found = Launches(*host_work.NORM_LINEAR)
        found = _times(found, host_work.LINEAR, products - 1)
        found = _times(found, host_work.NORM, norms)
    else:
        # A norm and every projection, backward two products each.
        found = Launches(1 + products + norms, 1 + 2 * products + norms)
    # Backward the parts of the projection are put together again.
    found = found.plus(0, 1)
    if model.is_rotary:
        # Queries and keys: one fused kernel each, or torch's own operations.
        each = 2 * (_EAGER_ROTATION if not fused else 1)
        found = found.plus(each, each)
    # Transformer Engine fuses the projection's bias with the product.
    if not engine and (model.add_bias_linear or model.add_qkv_bias):
        found = found.plus(1, 1)
    return found.plus(*_residual(model, training, engine, fused))


def _times(found: Launches, each: tuple[float, float], number: float) -> Launches:
    """Add the work of so many."""
    forward, backward = each
    return found.plus(number * forward, number * backward)


def _residual(model: ModelSpec, training: TrainingSpec, engine: bool, fused: bool) -> Launches:
    """Count bias, dropout and the sum with the input of the part, and the bias's gradient."""
    # Megatron fuses bias, dropout and sum into one kernel; its bias still has a gradient.
    bias = 1 if model.add_bias_linear else 0
    if fused:
        return Launches(1, 1 + (0 if engine else bias))
    dropout = 1 if training.hidden_dropout else 0
    return Launches(1 + bias + dropout, 1 + bias + dropout)


def _mlp_norm(model: ModelSpec, engine: bool) -> tuple[float, float]:
    """Count the norm before the MLP; Transformer Engine's first product has it in its module."""
    if not engine:
        return 1, 1
    return host_work.NORM if model.num_experts else (0, 0)


def _mlp_products(model: ModelSpec, engine: bool, fused: bool) -> Launches:
    """Count both products; backward also the first bias's gradient."""
    if engine:
        return _times(Launches(0, 0), host_work.LINEAR, 2)
    bias = 1 if model.add_bias_linear else 0
    return Launches(2 + (0 if fused else bias), 4 + bias)


def _shared_expert(
    model: ModelSpec, training: TrainingSpec, share: TensorShare, engine: bool, fused: bool
) -> Launches:
    """Count the work of the expert of all tokens: one MLP more, and a sum with the result."""
    if not share.shared_columns:
        return Launches(0, 0)
    return _mlp_products(model, engine, fused).plus(1, 1).plus(*_ACTIVATION)


def _mlp(
    model: ModelSpec, training: TrainingSpec, share: TensorShare, engine: bool, fused: bool
) -> Launches:
    """Count products and activation, or router and experts."""
    products = _mlp_products(model, engine, fused)
    if not model.num_experts:
        if engine:
            products = Launches(*host_work.NORM_LINEAR).plus(*host_work.LINEAR)
        return products.plus(*_ACTIVATION)
    found = Launches(*host_work.ROUTING)
    single = Launches(*host_work.SINGLE_EXPERT) if engine else products
    number = share.num_experts(model)
    if training.grouped_experts:
        # One call for all, which has work for each.
        found = _times(found.plus(*_ACTIVATION), host_work.GROUPED_LINEAR, 2)
        found = _times(found, host_work.GROUPED_EXPERT, 2 * number)
    else:
        found = _times(found, single.plus(*_ACTIVATION), number)
    return found.plus(*_shared_expert(model, training, share, engine, fused))


def hook_launches(model: ModelSpec, training: TrainingSpec, share: TensorShare) -> float:
    """Count the work of the hooks of a layer's weights in data parallelism: each adds its gradient,
    or finds it added by the product.  Norms' and biases' are few, and as long."""
    matrices = len(attention_matrices(model, share)) + 2 * max(1, share.num_experts(model))
    if model.num_experts:
        # The router's, and the shared expert's.
        matrices += 1 + (2 if share.shared_columns else 0)
    norms = 2 + (2 if model.qk_layernorm else 0)
    added = matrices if training.unfused_gradients else 0
    return (matrices + norms) * host_work.HOOK + (added + norms) * host_work.KERNEL


def _communication(sequence_parallel: bool) -> Launches:
    """Count collectives of a layer: two all-reduces in each pass, or their two halves, and what
    the backward pass gathers again."""
    return Launches(4, 6) if sequence_parallel else Launches(2, 2)


def embedding_launches(model: ModelSpec, training: TrainingSpec, width: int) -> Launches:
    """Count the look-up of words and positions, their sum, and dropout.

    Args:
        width: of the tensor-parallel group.
    """
    # Words alone, or words, positions and their sum.
    found = Launches(1, 1)
    if model.position_embedding == "learned_absolute":
        found = Launches(3, 2)
    if width > 1:
        found = found.plus(1, 1 if training.sequence_parallel else 0)
    return found.plus(1, 1) if training.hidden_dropout else found


def head_launches(training: TrainingSpec, width: int) -> Launches:
    """Count final norm, output layer and loss.

    Args:
        width: of the tensor-parallel group, in which the loss takes three sums.
    """
    found = Launches(*_HEAD)
    if width > 1:
        found = found.plus(3 + training.sequence_parallel, 1 + training.sequence_parallel)
    return found


def launching_times(
    workload: Workload,
    profile: Profile | None,
    piece: Piece,
    members: Sequence[tuple[GpuType, TensorShare]],
) -> PassTimes:
    """Time the host's launches of a piece, on the member whose host takes longest.

    Args:
        workload: model and training.
        profile: may have measured the time of an operator.
        piece: of the model.
        members: type and share of each GPU of the group.
    """
    model, training = workload.model, workload.training
    found = []
    for gpu, share in members:
        if piece == "embedding":
            launches = embedding_launches(model, training, share.width)
        elif piece == "head":
            launches = head_launches(training, share.width)
        else:
            flash = uses_flash_attention(model, training, gpu)
            launches = layer_launches(model, training, share, flash=flash)
            launches = launches.plus(0, hook_launches(model, training, share))
        # A profile may have measured the launches of this type's host.
        launch_s = gpu.launch_s if profile is None else profile.launch_s(gpu)
        found.append(PassTimes(launches.forward * launch_s, launches.backward * launch_s))
    return slowest(found)
