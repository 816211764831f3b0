"""Seconds of a decoder layer, the embedding and the output layer on one GPU of a TP group.

A roofline with two terms.  Matrix products take `flops / (peak * max_efficiency) + overhead` each:
the overhead makes small products inefficient, which is what the operator tables show.  Everything
else is bound by memory and takes `bytes / (bandwidth * memory_efficiency)`.  The formula is the
same for every GPU; its constants are medians over six GPU types (`calibration.json`, made by
`tools/make_calibration.py`), replaced by a type's own where that type was measured.

Backward is twice the forward products (input and weight gradients) plus the accumulation of the
weight gradient into the main gradient.  Times are for one micro-batch, without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron_hetero.cluster.spec import GpuType
from megatron_hetero.cost.parameters import attention_sizes
from megatron_hetero.cost.share import TensorShare, even_share
from megatron_hetero.errors import UnsupportedError
from megatron_hetero.files import read_json
from megatron_hetero.model.spec import ModelSpec, TrainingSpec, Workload

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_MAIN_GRADIENT_BYTES = 4
_BACKWARD_MEMORY_RATIO = 2.0
"""Element-wise backward over forward traffic: saved input and output gradient are both read."""


@dataclass(frozen=True)
class PassTimes:
    """Forward and backward of one micro-batch, seconds."""

    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        """Forward plus backward."""
        return self.forward_s + self.backward_s

    def __add__(self, other: PassTimes) -> PassTimes:
        return PassTimes(self.forward_s + other.forward_s, self.backward_s + other.backward_s)

    def times(self, count: int) -> PassTimes:
        """The times of `count` equal pieces."""
        return PassTimes(self.forward_s * count, self.backward_s * count)


@dataclass(frozen=True)
class GemmEfficiency:
    """Fraction of the peak that a large matrix product reaches, and the fixed cost of each one."""

    max_efficiency: float
    overhead_s: float


@dataclass(frozen=True)
class _Work:
    """What one micro-batch asks of one GPU in the forward pass of a part of a layer."""

    gemm_flops: tuple[float, ...]
    memory_bytes: float
    num_params: int
    attention_flops: float = 0.0
    attention_memory_bytes: float = 0.0


@cache
def _calibration() -> tuple[dict[tuple[str, str], GemmEfficiency], float]:
    data = read_json(Path(__file__).with_name("calibration.json")).data
    curves = {
        (gpu, precision): GemmEfficiency(curve["max_efficiency"], curve["overhead_s"])
        for gpu, by_precision in data["gemm"].items()
        for precision, curve in by_precision.items()
    }
    return curves, data["memory_efficiency"]


def gemm_efficiency(gpu: GpuType, precision: str) -> GemmEfficiency:
    """The calibrated curve of a GPU type, or the median curve where the type was not measured."""
    curves, _ = _calibration()
    kind = "fp32" if precision == "fp32" else "fp16"
    return curves.get((gpu.name, kind), curves["default", kind])


def peak_flops_per_s(gpu: GpuType, precision: str) -> float | None:
    """Dense peak in the job's precision; None where the GPU cannot train in it."""
    return gpu.peak_flops.get(precision)


def uses_flash_attention(training: TrainingSpec, gpu: GpuType) -> bool:
    """Whether attention is fused: wanted by the job and possible on the GPU.

    FlashAttention-2 needs compute capability 8.0, and half precision.
    """
    if not training.flash_attention or training.precision == "fp32":
        return False
    capability = gpu.compute_capability
    return capability is None or float(capability.split(".")[0]) >= 8


def layer_times(workload: Workload, gpu: GpuType, width: int) -> PassTimes:
    """One decoder layer at tensor-parallel width `width`, recomputation included."""
    return group_layer_times(workload, ((gpu, even_share(workload.model, width)),))


def group_layer_times(
    workload: Workload, members: Sequence[tuple[GpuType, TensorShare]]
) -> PassTimes:
    """One decoder layer on a group whose members may differ in GPU and share.

    The group meets after attention and after the MLP, so each part takes as long as on its slowest
    member.
    """
    attention = [_part_times(workload, gpu, share, _attention_work) for gpu, share in members]
    mlp = [_part_times(workload, gpu, share, _mlp_work) for gpu, share in members]
    return slowest(attention) + slowest(mlp)


def slowest(times: Sequence[PassTimes]) -> PassTimes:
    """Both passes of the slowest member."""
    return PassTimes(max(t.forward_s for t in times), max(t.backward_s for t in times))


def _part_times(
    workload: Workload, gpu: GpuType, share: TensorShare, work_of: _WorkOf
) -> PassTimes:
    training = workload.training
    flash = uses_flash_attention(training, gpu)
    work = work_of(workload.model, training, share, flash)
    attention_s = _attention_s(work, training, gpu)
    products_s = _gemms_s(work.gemm_flops, training, gpu)
    elementwise_s = _memory_s(work.memory_bytes, gpu)
    forward_s = products_s + elementwise_s + attention_s
    # Flash attention's backward rebuilds the scores: 2.5 forwards instead of 2.
    backward_s = (
        2 * products_s
        + _BACKWARD_MEMORY_RATIO * elementwise_s
        + (2.5 if flash else 2.0) * attention_s
        + _gradient_accumulation_s(work.num_params, training, gpu)
    )
    if training.recompute == "full":
        backward_s += forward_s
    elif training.recompute == "selective":
        backward_s += attention_s
    return PassTimes(forward_s, backward_s)


def embedding_times(workload: Workload, gpu: GpuType, width: int, vocab_rows: int) -> PassTimes:
    """The embedding: a gather forward, a scatter into a dense gradient backward.

    `vocab_rows`: rows of the padded vocabulary (all of them, not one shard's).
    """
    model, training = workload.model, workload.training
    element = ELEMENT_BYTES[training.precision]
    tokens = training.micro_batch_size * model.seq_length
    forward_s = _memory_s(3.0 * tokens * model.hidden_size * element, gpu)
    rows = vocab_rows * model.hidden_size // width
    return PassTimes(forward_s, 2 * forward_s + _gradient_accumulation_s(rows, training, gpu))


def head_times(workload: Workload, gpu: GpuType, width: int, vocab_rows: int) -> PassTimes:
    """Final norm, output layer and vocabulary-parallel cross entropy."""
    model, training = workload.model, workload.training
    element = ELEMENT_BYTES[training.precision]
    tokens = training.micro_batch_size * model.seq_length
    logits = tokens * vocab_rows / width
    products_s = _gemms_s((2.0 * logits * model.hidden_size,), training, gpu)
    # Cross entropy reads the logits, makes them fp32, then takes a maximum, exp and a sum.
    loss_s = _memory_s(logits * (element + 4 * 4) + 2.0 * tokens * model.hidden_size * element, gpu)
    gradient_s = _memory_s(logits * (2 * 4 + element), gpu)
    rows = vocab_rows * model.hidden_size // width
    return PassTimes(
        products_s + loss_s,
        2 * products_s + gradient_s + _gradient_accumulation_s(rows, training, gpu),
    )


def update_time_s(state_bytes: float, gpu: GpuType) -> float:
    """The optimizer step on one device: each of `state_bytes` is read once and written once."""
    return _memory_s(2.0 * state_bytes, gpu)


_WorkOf = Callable[[ModelSpec, TrainingSpec, TensorShare, bool], _Work]


def _attention_work(
    model: ModelSpec, training: TrainingSpec, share: TensorShare, flash: bool
) -> _Work:
    element = ELEMENT_BYTES[training.precision]
    tokens = training.micro_batch_size * model.seq_length
    query, key_value = attention_sizes(model, share)
    weights = (model.hidden_size * (query + 2 * key_value), query * model.hidden_size)
    scores = training.micro_batch_size * (query // model.kv_channels) * model.seq_length**2
    return _Work(
        tuple(2.0 * tokens * weight for weight in weights),
        _norm_bytes(model, training, share),
        sum(weights),
        # Causal kernels skip half of the square; unfused products do not.
        attention_flops=4.0 * scores * model.kv_channels * (0.5 if flash else 1.0),
        # Softmax and dropout, each a read and a write, plus the mask; fused kernels keep them on
        # chip.
        attention_memory_bytes=0.0 if flash else scores * (6 * element + 1),
    )


def _mlp_work(model: ModelSpec, training: TrainingSpec, share: TensorShare, flash: bool) -> _Work:
    if model.num_experts:
        raise UnsupportedError(
            f"mixture-of-experts models are not planned yet (num_experts={model.num_experts}); "
            "plan a dense model, or run this one with stock Megatron flags"
        )
    tokens = training.micro_batch_size * model.seq_length
    columns = share.mlp_columns
    first = columns * (2 if model.gated_mlp else 1)
    weights = (model.hidden_size * first, columns * model.hidden_size)
    activation_bytes = tokens * (first + columns) * ELEMENT_BYTES[training.precision]
    return _Work(
        tuple(2.0 * tokens * weight for weight in weights),
        _norm_bytes(model, training, share) + activation_bytes,
        sum(weights),
    )


def _norm_bytes(model: ModelSpec, training: TrainingSpec, share: TensorShare) -> float:
    """A norm (read, write) and a bias-dropout-add (two reads, a write, a mask byte)."""
    element = ELEMENT_BYTES[training.precision]
    tokens = training.micro_batch_size * model.seq_length
    own_tokens = tokens / (share.width if training.sequence_parallel else 1)
    return own_tokens * model.hidden_size * (2 * element + 3 * element + 1)


def _gemms_s(gemm_flops: tuple[float, ...], training: TrainingSpec, gpu: GpuType) -> float:
    peak = peak_flops_per_s(gpu, training.precision)
    if peak is None:
        raise UnsupportedError(f"{gpu.name} cannot train in {training.precision}")
    curve = gemm_efficiency(gpu, training.precision)
    return sum(flops / (peak * curve.max_efficiency) + curve.overhead_s for flops in gemm_flops)


def _attention_s(work: _Work, training: TrainingSpec, gpu: GpuType) -> float:
    if not work.attention_flops:
        return 0.0
    return _gemms_s((work.attention_flops / 2,) * 2, training, gpu) + _memory_s(
        work.attention_memory_bytes, gpu
    )


def _memory_s(num_bytes: float, gpu: GpuType) -> float:
    _, memory_efficiency = _calibration()
    return num_bytes / (gpu.memory_bytes_per_s * memory_efficiency)


def _gradient_accumulation_s(num_params: int, training: TrainingSpec, gpu: GpuType) -> float:
    return _memory_s(2.0 * num_params * _MAIN_GRADIENT_BYTES, gpu)
