"""Bytes of a parameter's weight, gradient and states, and who divides the states."""

from __future__ import annotations

from megatron_hetero.hashed import value
from megatron_hetero.model.training import TrainingSpec


@value(frozen=True)
class StateBytes:
    """Bytes per parameter: weight, gradient buffer, what the optimizer keeps beside them, and the
    fp32 copy of its gradient that lives during the update alone."""

    weight: int
    gradient: int
    optimizer: int
    update: int = 0


def state_bytes(training: TrainingSpec) -> StateBytes:
    """Return the bytes per parameter that Megatron keeps.

    bf16 accumulates gradients in fp32 (2 + 4 + 12), and so does fp16 beside other precisions; fp16
    otherwise, and bf16 with --grad-reduce-in-bf16, in their own (2 + 2 + 12), with an fp32 copy
    during the update (4 more; `_copy_model_grads_to_main_grads` makes it, `zero_grad` drops it
    before the next forward pass); fp32 has no second copy of the weights (4 + 4 + 8). SGD keeps one
    moment (Megatron's default momentum is 0.9).  Under --use-precision-aware-optimizer Adam takes
    gradients as they are (`decoupled_grad`) wherever it keeps the main weights, in 2 bytes.
    """
    moments = 8 if training.optimizer == "adam" else 4
    gradient = training.gradient_bytes
    if training.precision == "fp32":
        return StateBytes(4, gradient, moments)
    if training.state_widths:
        main, both = training.state_widths
        copied = 4 if gradient < 4 and not training.updates_in_place else 0
        return StateBytes(2, gradient, main + both, update=copied)
    # Gradients in 16 bits are copied to fp32 for the update.
    return StateBytes(2, gradient, 4 + moments, update=4 if gradient < 4 else 0)


def new_weight_bytes(training: TrainingSpec, num_params: int, num_in_matrices: int) -> int:
    """Return the bytes of so many new weights as stock Megatron gathers them.

    Args:
        num_in_matrices: those of them that are elements of layers' matrices.
    """
    weight = state_bytes(training).weight
    lacking = num_in_matrices * (weight - 1) if training.gathers_fp8 else 0
    return num_params * weight - lacking


def bytes_each_way(
    training: TrainingSpec, num_params: int = 1, num_in_matrices: int = 0
) -> float:
    """Return the bytes of parameters that a step exchanges, half of what goes there and back: their
    gradients both ways or, under the distributed optimizer, there, and the new weights back, unless
    forward passes hide these (`TrainingSpec.hides_gathers`).

    Args:
        num_in_matrices: as of `new_weight_bytes`; without, for our runtime, which refuses weights
            in fp8.
    """
    gradients = num_params * state_bytes(training).gradient
    if not training.use_distributed_optimizer:
        return float(gradients)
    if training.hides_gathers:
        return gradients / 2
    return (gradients + new_weight_bytes(training, num_params, num_in_matrices)) / 2


@value(frozen=True)
class StateHolders:
    """Number of devices that divide the optimizer states of a parameter, under the distributed
    optimizer: for a layer, all devices that hold a layer, over all replicas; for a tied embedding
    all holders of the embedding (a device with more than others counts them as fewer). `embedding`
    and `head`, where they are not tied, have those that hold these; None is as many as of the
    layers.  `experts`: of a layer's experts, where stages deal them out over replicas unlike each
    other; None is as many as the stage's own groups make of `layers`.

    Without `--use-distributed-optimizer` each device keeps all states of its parameters.
    """

    layers: float = 1
    tied_embedding: float = 1
    embedding: float | None = None
    head: float | None = None
    experts: float | None = None


EVERY_DEVICE = StateHolders()
"""Every device keeps the states of all of its parameters."""
