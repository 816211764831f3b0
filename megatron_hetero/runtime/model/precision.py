"""Stages of one plan in bf16, fp16 or fp32: what Megatron's arguments say on each rank.

The arguments are those of the job's one optimizer, equal on all ranks: of fp16, with a loss scale
and one decision to skip a step, if any stage computes in fp16; else of bf16, whose main weights are
in fp32. Only the model's configuration has the precision of the rank's own stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from megatron_hetero.cluster.catalogue import gpu_type, gpu_type_names
from megatron_hetero.errors import EnvironmentMismatchError, UnsupportedError
from megatron_hetero.model.training import Precision
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.precision import (
    mixes_precisions,
    narrowest,
    own_precisions,
    stage_precisions,
)
from megatron_hetero.plan.ranks import Position
from megatron_hetero.runtime import backend

DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_BF16_CAPABILITY = (8, 0)

REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("--fp8-format", lambda a: a.fp8 is not None, "leave it out, or plan in one precision"),
    (
        "--grad-reduce-in-bf16",
        lambda a: a.grad_reduce_in_bf16,
        "leave it out; gradients of stages in unlike precisions are summed in fp32",
    ),
    (
        "--fp32-residual-connection",
        lambda a: a.fp32_residual_connection,
        "leave it out; boundaries between unlike precisions carry the narrower one",
    ),
    (
        "--check-weight-hash-across-dp-replicas-interval",
        lambda a: a.check_weight_hash_across_dp_replicas_interval is not None,
        "leave it out; the same weight is rounded otherwise on stages of other precisions",
    ),
    (
        "--qk-clip",
        lambda a: a.qk_clip,
        "leave it out; clipping weights of unlike precisions is not tried yet",
    ),
    ("--main-grads-dtype", lambda a: a.main_grads_dtype != torch.float32, "use fp32"),
    ("--fp16-lm-cross-entropy", lambda a: a.fp16_lm_cross_entropy, "leave it out"),
    (
        "--num-experts",
        lambda a: a.num_experts is not None,
        "plan in one precision; the choice of experts of unlike precisions is not tried yet",
    ),
    (
        "--apply-query-key-layer-scaling",
        lambda a: a.apply_query_key_layer_scaling,
        "leave it out; it is for fp16 alone",
    ),
)
"""Flags that a plan of unlike precisions cannot follow yet."""


def check_devices(plan: Plan) -> None:
    """Refuse stages in a precision absent, by the catalogue, from the stages' GPUs.

    Raises:
        UnsupportedError: the message names every such stage and GPU.
    """
    found = []
    for r, s, precision in own_precisions(plan):
        types = {plan.type_by_device.get(d, "") for d in plan.replicas[r].stages[s].devices}
        # A GPU that the catalogue does not know is asked on its own rank (`check_own_device`).
        for name in sorted(types & set(gpu_type_names())):
            if gpu_type(name).peak_flops.get(precision) is None:
                found.append(f"replica {r}, stage {s}: {precision} on {name}")
    if found:
        raise UnsupportedError(
            "The plan's stages compute in a precision that their GPUs lack:\n  "
            + "\n  ".join(found)
            + "\nCorrect `precision` of these stages (fp16 and fp32 work everywhere, bf16 from "
            "compute capability 8.0), or plan again."
        )


def check_own_device(position: Position, precision: Precision, local_rank: int) -> None:
    """Refuse a stage in bf16 on a GPU without it.

    Raises:
        EnvironmentMismatchError: the message names the place, the GPU and what it lacks.
    """
    if precision != "bf16" or not backend.cuda_is_usable():
        return
    capability = torch.cuda.get_device_capability(local_rank)
    if capability < _BF16_CAPABILITY:
        raise EnvironmentMismatchError(
            f"replica {position.replica}, stage {position.stage} computes in bf16, which "
            f"{torch.cuda.get_device_name(local_rank)} lacks: it has compute capability "
            f"{'.'.join(map(str, capability))}, bf16 needs 8.0. Give the stage `precision` fp16 or "
            "fp32, or plan again for the GPUs that are there."
        )


def follow_optimizer(args: Any, plan: Plan, job: Precision) -> None:
    """Set Megatron's parsed `args`, of a job in precision `job`, for the single optimizer of a plan
    with stages in precisions of their own."""
    precision = narrowest(p for replica in stage_precisions(plan, job) for p in replica)
    args.fp16, args.bf16 = precision == "fp16", precision == "bf16"
    args.params_dtype = DTYPES[precision]
    # As Megatron's parser has it for bf16; unlike precisions are summed in fp32 too.
    if mixes_precisions(plan, job) or precision == "bf16":
        args.accumulate_allreduce_grads_in_fp32 = True
    if precision == "fp16" and not args.loss_scale:
        # As Megatron's parser: an overflow is the loss scale's business.
        args.check_for_nan_in_loss_and_grad = False


def crossings(precisions: Sequence[Precision], chain: Sequence[int]) -> dict[int, torch.dtype]:
    """Return what crosses the boundaries between stages in unlike precisions.

    Args:
        precisions: [stage] of one replica.
        chain: [virtual stage] -> stage; boundary b lies between the virtual stages b and b + 1.
    """
    # Precisions on both sides of every boundary.
    sides = [(precisions[before], precisions[after]) for before, after in pairwise(chain)]
    return {n: DTYPES[narrowest(hop)] for n, hop in enumerate(sides) if hop[0] != hop[1]}


@contextmanager
def in_precision(args: Any, precision: Precision) -> Iterator[None]:
    """Let `args` have the precision in which this rank's model is built."""
    names = ("fp16", "bf16", "params_dtype")
    saved = {name: getattr(args, name) for name in names}
    args.fp16, args.bf16 = precision == "fp16", precision == "bf16"
    args.params_dtype = DTYPES[precision]
    try:
        yield
    finally:
        vars(args).update(saved)
