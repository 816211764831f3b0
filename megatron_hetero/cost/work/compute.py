"""Seconds of a decoder layer on one GPU of a tensor-parallel group.

Matrix products take what `cost.work.products` says.  Fused attention runs at a part of their rate,
another one in each pass.  Everything else is bound by memory and takes
`bytes / (bandwidth * memory_efficiency)`.  The formula is the same for every GPU; its
constants are in `cost.work.calibration`.

Backward is twice the forward products (input and weight gradients), what its own operators move
(`cost.work.traffic`), five products of fused attention for two, and the accumulation of the weight
gradient into the main gradient.  Times are for one micro-batch, without communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from megatron_hetero.cluster.makers import FACTS
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.share import TensorShare, even_share
from megatron_hetero.cost.work.calibration import Calibration, shipped_calibration
from megatron_hetero.cost.work.fused_attention import uses_flash_attention
from megatron_hetero.cost.work.gradient_sums import gradient_accumulation_s
from megatron_hetero.cost.work.layer_work import (
    Work,
    WorkOf,
    attention_work,
    mlp_work,
)
from megatron_hetero.cost.work.products import GemmEfficiency, Product
from megatron_hetero.cost.work.speed import Speed, speed_of
from megatron_hetero.cost.work.stage_precision import precision_on
from megatron_hetero.hashed import value
from megatron_hetero.model.recompute import recomputed
from megatron_hetero.model.spec import Workload
from megatron_hetero.model.training import CpCommType, Precision, TrainingSpec

_FUSED_BACKWARD_PRODUCTS = 3, 2
"""Products of fused attention's backward pass as large as that of the scores (the scores once more,
and the gradients of queries and keys), and as that of the context (the gradients of softmax and
values)."""
ContextExchange = Literal["ring", "heads", "gather", "gather twice"]
"""Keys and values go round, heads are exchanged for parts of sequences, all keys and values are
gathered and kept, or gathered in either pass."""
_BY_FLAG: Mapping[CpCommType, ContextExchange] = {
    "p2p": "ring", "a2a": "heads", "all_gather": "gather twice",
}  # fmt: skip


@value(frozen=True)
class PassTimes:
    """Forward and backward of one micro-batch, seconds."""

    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        """Return forward plus backward."""
        return self.forward_s + self.backward_s

    def __add__(self, other: PassTimes) -> PassTimes:
        return PassTimes(self.forward_s + other.forward_s, self.backward_s + other.backward_s)

    def times(self, count: int) -> PassTimes:
        """Return the times of `count` equal pieces."""
        return PassTimes(self.forward_s * count, self.backward_s * count)


def gemm_efficiency(gpu: GpuType, precision: Precision) -> GemmEfficiency:
    """Return the calibrated curve of a GPU type, or the median curve where the type was not
    measured."""
    return shipped_calibration().gemm_efficiency(gpu, precision)


def peak_flops_per_s(gpu: GpuType, precision: str) -> float | None:
    """Return the dense peak in the job's precision; None where the GPU cannot train in it."""
    return gpu.peak_flops.get(precision)


def can_train(training: TrainingSpec, gpu: GpuType) -> bool:
    """Return whether the runtime runs on a GPU and the GPU has the job's precision (or a substitute
    for the precision), and fp8 if the job does."""
    # Megatron, and so the runtime, starts only on devices that torch calls "cuda".
    if not FACTS[gpu.library].trains:
        return False
    needed = [precision_on(training, (gpu,)), *(["fp8"] if training.fp8 else [])]
    return all(peak_flops_per_s(gpu, precision) is not None for precision in needed)


def layer_times(
    workload: Workload, gpu: GpuType, width: int, calibration: Calibration | None = None
) -> PassTimes:
    """Time one decoder layer at tensor-parallel width `width`, recomputation included.

    Args:
        width: of the tensor-parallel group, which divides the model evenly.
        calibration: constants of GPUs; None is the shipped ones.
    """
    member = (gpu, even_share(workload.model, width))
    return group_layer_times(workload, (member,), calibration)


def group_layer_times(
    workload: Workload,
    members: Sequence[tuple[GpuType, TensorShare]],
    calibration: Calibration | None = None,
) -> PassTimes:
    """Time a decoder layer on a group of members with unlike GPUs and shares.

    The group meets after attention and after the MLP, so each part takes as long as on its slowest
    member.

    Args:
        members: type and share of each GPU of the group.
        calibration: constants of GPUs; None is the shipped ones.
    """
    parts = [
        [part_seconds(workload, gpu, share, work, calibration).total for gpu, share in members]
        # Shape [part][member]: the group meets between the parts.
        for work in (attention_work, mlp_work)
    ]
    return slowest(parts[0]) + slowest(parts[1])


def slowest(times: Sequence[PassTimes]) -> PassTimes:
    """Return both passes of the slowest member."""
    return PassTimes(max(t.forward_s for t in times), max(t.backward_s for t in times))


class PartSeconds(NamedTuple):
    """Seconds of a part of a layer by cause, each as (forward pass, backward pass): products, what
    lies between the projections of attention, and work bound by memory."""

    products: tuple[float, float]
    attention: tuple[float, float]
    memory: tuple[float, float]

    @property
    def total(self) -> PassTimes:
        """Return the times of the part."""
        (a, b), (c, d), (e, f) = self
        return PassTimes(a + c + e, b + d + f)


def part_seconds(
    workload: Workload,
    gpu: GpuType,
    share: TensorShare,
    work_of: WorkOf,
    calibration: Calibration | None = None,
) -> PartSeconds:
    """Time attention or MLP of one decoder layer on one GPU, recomputation included.

    Args:
        gpu, share: the GPU's type and its part of the group.
        work_of: `attention_work` or `mlp_work`.
        calibration: constants of GPUs; None is the shipped ones.
    """
    # Products, scores and context, then all that memory bounds.
    model, training = workload.model, workload.training
    is_fused = not share.stores_scores(training, uses_flash_attention(model, training, gpu))
    speed = speed_of(training, gpu, calibration)
    work = work_of(model, training, share, is_fused)
    products = _product_times(work.products, speed)
    forward_s, backward_s = map(speed.moved_s, work.moved)
    core = _core_times(workload, (gpu, share), work, speed, is_fused, calibration)
    accumulation_s = gradient_accumulation_s(work.num_params, speed, training)
    # What is recomputed takes its forward pass once more.
    products_again_s = _product_times(work.again.products, speed).forward_s
    core_again_s = core.forward_s if "core_attn" in recomputed(training) else 0.0
    elementwise_again_s = speed.moved_s(work.again.moved)
    return PartSeconds(
        (products.forward_s, products.backward_s + products_again_s),
        (core.forward_s, core.backward_s + core_again_s),
        (forward_s, backward_s + elementwise_again_s + accumulation_s),
    )


def _product_times(products: Sequence[Product], speed: Speed) -> PassTimes:
    """Time the products of a layer in both passes: in fp8, with its casts, where the job has it."""
    # Backward has two products for each: the gradients of input and of weight.
    if speed.fp8 is None:
        once_s = speed.products_s(products)
        return PassTimes(once_s, 2 * once_s)
    once_s = sum(map(speed.fp8.seconds, products))
    # Elements that are cast: what the products read, and the gradients of what they write.
    inputs, outputs = (
        sum(p.number * elements for p, elements in zip(products, sizes, strict=True))
        for sizes in ([p.inputs for p in products], [p.outputs for p in products])
    )
    # What comes in is cast in the forward pass, the gradient of what went out in the backward.
    return PassTimes(
        once_s + speed.memory_s(speed.cast_bytes * inputs),
        2 * once_s + speed.memory_s(speed.cast_bytes * outputs),
    )


def context_exchange(
    workload: Workload, members: Sequence[tuple[GpuType, TensorShare]]
) -> ContextExchange:
    """Return how the parts of sequences meet: with fused attention on all members and equal parts
    as Transformer Engine's `--cp-comm-type` says, else keys and values are gathered
    (`runtime.parallel.context_attention`)."""
    model, training = workload.model, workload.training
    is_fused = all(
        share.context_parallel > 1
        and share.context_shares is None
        and uses_flash_attention(model, training, gpu)
        for gpu, share in members
    )
    if not is_fused:
        return "gather"
    return _BY_FLAG[training.cp_comm_type]


def _core_times(
    workload: Workload,
    member: tuple[GpuType, TensorShare],
    work: Work,
    speed: Speed,
    is_fused: bool,
    calibration: Calibration | None,
) -> PassTimes:
    """Time scores and context: what lies between the QKV and the output projection."""
    # The MLP has no scores.
    if not work.attention_flops:
        return PassTimes(0.0, 0.0)
    gpu, share = member
    if is_fused:
        # A ring has a call for each round, of queries and keys of one part of the sequence; where
        # keys are gathered, each of a rank's two chunks of queries has one, of all keys before it.
        how = context_exchange(workload, (member,))
        rounds = share.context_parallel if how == "ring" else 2 if how == "gather twice" else 1
        # The kernel's own tables: a part of the rate of large products, and a fixed cost a call.
        calibration = calibration or shipped_calibration()
        length = workload.model.seq_length // (rounds if how == "ring" else 1)
        part = calibration.attention_efficiency(gpu, work.head_size, length)
        flops, call_s = work.attention_flops, calibration.attention.call_s
        back = sum(n * f for n, f in zip(_FUSED_BACKWARD_PRODUCTS, flops, strict=True))
        rate = speed.products.flops_per_s
        return PassTimes(
            sum(flops) / (rate * part.forward) + rounds * call_s["forward"],
            back / (rate * part.backward) + rounds * call_s["backward"],
        )
    # Unfused: two batched products, and each score moved through memory several times.
    products_s = speed.batched_s(work.attention_flops)
    dropout_bytes = speed.dropout_slowdown * work.score_dropout_bytes
    forward = speed.scores.forward * work.score_bytes + dropout_bytes
    backward = speed.scores.backward * work.score_bytes + work.score_dropout_bytes
    return PassTimes(
        products_s + speed.memory_s(forward), 2 * products_s + speed.memory_s(backward)
    )


def core_attention_times(
    workload: Workload,
    members: Sequence[tuple[GpuType, TensorShare]],
    calibration: Calibration | None = None,
) -> PassTimes:
    """Time scores and context of one decoder layer, on the slowest member; nothing recomputed.

    Args:
        members: type and share of each GPU of the group.
        calibration: constants of GPUs; None is the shipped ones.
    """
    model, training = workload.model, workload.training
    found = []
    for gpu, share in members:
        is_fused = not share.stores_scores(training, uses_flash_attention(model, training, gpu))
        work = attention_work(model, training, share, is_fused)
        speed = speed_of(training, gpu, calibration)
        found.append(_core_times(workload, (gpu, share), work, speed, is_fused, calibration))
    return slowest(found)
