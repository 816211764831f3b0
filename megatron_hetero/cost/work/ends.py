"""Seconds of a model's ends: the embedding, the output layer with the loss, and the projection of
multi-token prediction (Megatron's `eh_proj`, `--mtp-num-layers`).

Products and memory-bound work are priced as in a layer (`cost.work.compute`).  Times are for one
micro-batch on one GPU of a tensor-parallel group, without communication.
"""

from __future__ import annotations

from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.work.calibration import Calibration
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.cost.work.gradient_sums import added_gradient_s, gradient_accumulation_s
from megatron_hetero.cost.work.products import Product
from megatron_hetero.cost.work.speed import Speed, speed_of
from megatron_hetero.model.blocks import joining_params
from megatron_hetero.model.spec import ModelSpec, Workload
from megatron_hetero.model.training import FusedLoss

_FP32_BYTES, _HALF_BYTES = 4, 2


def embedding_times(
    workload: Workload,
    gpu: GpuType,
    width: int,
    vocab_rows: int,
    calibration: Calibration | None = None,
    num_tokens: int | None = None,
) -> PassTimes:
    """Time the embedding: a gather forward, a scatter into a dense gradient backward, which starts
    from zero and is then added to the main gradient.

    `vocab_rows` counts the rows of the padded vocabulary, all of them, not one shard's.

    Args:
        width: of the tensor-parallel group.
        calibration: constants of GPUs; None is the shipped ones.
        num_tokens: of a micro-batch; None is all of them.
    """
    model, training = workload.model, workload.training
    element = training.element_bytes
    tokens = num_tokens or training.micro_batch_size * model.seq_length
    speed = speed_of(training, gpu, calibration)
    # A token's row moves three times forward and six times backward; every row has a gradient.
    forward_s = speed.memory_s(3.0 * tokens * model.hidden_size * element)
    weights = vocab_rows * model.hidden_size // width
    gradient_s = speed.memory_s(weights * element) + added_gradient_s(weights, speed, training)
    return PassTimes(forward_s, 2 * forward_s + gradient_s)


def tied_gradient_s(
    workload: Workload, gpu: GpuType, width: int, vocab_rows: int, calibration: Calibration | None
) -> float:
    """Time what the backward pass does more where a stage uses a tied weight at both ends.

    With gradient accumulation fusion the output layer's product has added its gradient, and hands
    on zeros in its place (`zero_out_wgrad`), to which the embedding's gradient is added.

    Args:
        width: of the tensor-parallel group.
        vocab_rows: rows of the padded vocabulary, not of one shard.
        calibration: constants of GPUs; None is the shipped ones.
    """
    model, training = workload.model, workload.training
    if not model.tied_embeddings or training.unfused_gradients:
        return 0.0
    # Zeros are written; both are read and the sum is written.
    weights = vocab_rows * model.hidden_size // width
    return speed_of(training, gpu, calibration).memory_s(4.0 * weights * training.element_bytes)


def head_times(
    workload: Workload,
    gpu: GpuType,
    width: int,
    vocab_rows: int,
    calibration: Calibration | None = None,
    num_tokens: int | None = None,
) -> PassTimes:
    """Time the final norm, the output layer and the vocabulary-parallel cross entropy.

    Args:
        width: of the tensor-parallel group.
        vocab_rows: rows of the padded vocabulary, not of one shard.
        calibration: constants of GPUs; None is the shipped ones.
        num_tokens: of a micro-batch; None is all of them.
    """
    model, training = workload.model, workload.training
    element = training.element_bytes
    tokens = num_tokens or training.micro_batch_size * model.seq_length
    # Logits of the member's rows.
    logits = tokens * vocab_rows / width
    speed = speed_of(training, gpu, calibration)
    products_s = speed.products_s((head_product(model, width, vocab_rows, tokens),))
    norm_s = speed.memory_s(2.0 * tokens * model.hidden_size * element)
    loss = cross_entropy_times(logits, speed, element, training.fused_loss)
    weights = vocab_rows * model.hidden_size // width
    added_s = gradient_accumulation_s(weights, speed, training)
    # Backward the norm reads its input beside the gradient.
    return PassTimes(
        products_s + norm_s + loss.forward_s,
        2 * products_s + 1.5 * norm_s + loss.backward_s + added_s,
    )


def cross_entropy_times(
    logits: float, speed: Speed, element_bytes: int, fused: FusedLoss = ""
) -> PassTimes:
    """Time the vocabulary-parallel cross entropy.

    Unfused, counted from `VocabParallelCrossEntropy` of Megatron-core 0.19: it makes the logits
    fp32, and then works on them in place.  `native`: each compiled function of
    `fusions/fused_cross_entropy.py` is one kernel.  `te`: the kernels of Transformer Engine 2.20
    (`common/triton/cross_entropy.py`) copy the logits, and write the gradient over the copy.

    Args:
        logits: their number.
        speed: of the GPU.
        element_bytes: of a logit.
        fused: whose kernels.
    """
    if fused == "te":
        each_s = speed.memory_s(logits * 2 * element_bytes)
        return PassTimes(each_s, each_s)
    # The logits in fp32, and their gradient as they are; fp32 ones are neither copied.
    cast_bytes = element_bytes + _FP32_BYTES if element_bytes < _FP32_BYTES else 0
    if fused == "native":
        # The maximum, with the cast; the exponential, with its sum; the division: but for the
        # maximum each reads and writes.  Backward all is one kernel, whose result is in 16 bits.
        forward_bytes = (cast_bytes or _FP32_BYTES) + 4 * _FP32_BYTES
        return PassTimes(
            speed.memory_s(logits * forward_bytes),
            speed.memory_s(logits * (_FP32_BYTES + _HALF_BYTES)),
        )
    # A maximum and a sum read each; the exponential reads and writes; the maximum is subtracted,
    # and the sum divides.  Backward the gradient of the loss multiplies.
    return PassTimes(
        speed.mixed_s(logits * (cast_bytes + 8 * _FP32_BYTES)),
        speed.mixed_s(logits * (cast_bytes + 2 * _FP32_BYTES)),
    )


def head_product(model: ModelSpec, width: int, vocab_rows: int, num_tokens: int) -> Product:
    """Return the product of the output layer in the forward pass; arguments as of `head_times`."""
    return Product(num_tokens, vocab_rows / width, model.hidden_size)


def joining_product(model: ModelSpec, width: int, num_tokens: int) -> Product:
    """Return the projection of multi-token prediction (`eh_proj`) in the forward pass."""
    return Product.with_weights(num_tokens, joining_params(model) // width, 2 * model.hidden_size)


def joining_times(
    workload: Workload,
    gpu: GpuType,
    width: int,
    calibration: Calibration | None = None,
    num_tokens: int | None = None,
) -> PassTimes:
    """Time the parts before a layer of multi-token prediction: two norms, and the projection
    (`eh_proj`) of a token's hidden state beside the embedding of a further token.

    Args:
        width: of the tensor-parallel group.
        calibration: constants of GPUs; None is the shipped ones.
        num_tokens: of a micro-batch; None is all of them.
    """
    model, training = workload.model, workload.training
    tokens = num_tokens or training.micro_batch_size * model.seq_length
    speed = speed_of(training, gpu, calibration)
    weights = joining_params(model) // width
    products_s = speed.products_s((joining_product(model, width, tokens),))
    # Two norms, whose results are put side by side; backward these are parted.
    element_s = speed.memory_s(float(tokens * model.hidden_size * training.element_bytes))
    added_s = gradient_accumulation_s(weights, speed, training)
    return PassTimes(
        products_s + (4 + 4) * element_s, 2 * products_s + (6 + 4) * element_s + added_s
    )
