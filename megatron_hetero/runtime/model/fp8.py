"""fp8 products (Transformer Engine) on an asymmetric plan: requirements on the job and its GPUs.

Weights, their gradients, and tensors that cross a boundary stay in bf16; each layer casts the
inputs of its own products. With `--fp8-recipe tensorwise` the scales are those of the tensors at
hand, so replicas need not agree on anything and checkpoints need not keep anything, and nothing
here has to run. Other recipes keep histories or blocks that other shards would cut elsewhere; they
are refused.

Source: Transformer Engine's support matrix, and its check of sizes (`assert_dim_for_fp8_exec`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron_hetero.cluster.catalogue import gpu_type, gpu_type_names
from megatron_hetero.cost.fp8_sizes import FP8_COLUMNS, FP8_ROWS, sizes_without_fp8
from megatron_hetero.cost.share import member_shares
from megatron_hetero.errors import EnvironmentMismatchError, UnsupportedError
from megatron_hetero.flags.gpu_needs import FP8_CAPABILITY
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.plan import Plan, Stage

_RECIPE = "tensorwise"
ON_A_CPU = (_RECIPE, "delayed")
"""Recipes that the CPU's Transformer Engine has: a scale for each tensor."""

REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "--transformer-impl local",
        lambda a: a.transformer_impl != "transformer_engine",
        "install Transformer Engine and use transformer_engine; local layers have no fp8",
    ),
    (
        "--fp8-recipe",
        lambda a: a.fp8_recipe != _RECIPE,
        f"use {_RECIPE}; the others keep histories or blocks that shards of a plan cut elsewhere",
    ),
    ("--fp8-param-gather", lambda a: a.fp8_param_gather, "leave it out; weights stay in bf16"),
    (
        "--first-last-layers-bf16",
        lambda a: a.first_last_layers_bf16,
        "leave it out",
    ),
    (
        "--num-experts",
        lambda a: a.num_experts is not None,
        "train a dense model; an expert's tokens would have to be padded",
    ),
    ("--fp16", lambda a: not a.bf16, "use --bf16"),
)
"""(flag in the user's words, predicate of the parsed arguments that ask for the flag, advice)."""


def check_plan(plan: Plan, workload: Workload) -> None:
    """Refuse GPUs and sizes on which a job with `--fp8-format` would fail.

    A GPU type that the catalogue lacks is not judged.

    Args:
        plan: the plan, with the micro-batch sizes of its replicas.
        workload: the job.
    Raises:
        EnvironmentMismatchError: GPU types lack fp8; the message names them and their stages.
        UnsupportedError: sizes do not divide; the message names them and their stages.
    """
    known = gpu_type_names()
    needed = FP8_CAPABILITY[_RECIPE]
    gpus, sizes = [], []
    for r, replica in enumerate(plan.replicas):
        for s, stage in enumerate(replica.stages):
            where = f"replica {r}, stage {s}"
            for name in sorted({plan.type_by_device[d] for d in stage.devices}):
                capability = gpu_type(name).capability if name in known else None
                if capability is not None and capability < needed:
                    gpus.append(f"{where}: {name} (compute capability {capability})")
            found = _sizes(workload, stage, replica.micro_batch_size or 1)
            sizes += [f"{where}: {words}" for words in found]
    if gpus:
        raise EnvironmentMismatchError(
            f"--fp8-format needs GPUs of compute capability {needed} or more; these have less:\n  "
            + "\n  ".join(gpus)
            + "\nLeave the flag out, or plan again without these GPUs."
        )
    if sizes:
        raise UnsupportedError(
            "--fp8-format: Transformer Engine has no fp8 product of these sizes:\n  "
            + "\n  ".join(sizes)
            + "\nUse other widths or shares, or leave the flag out."
        )


def _sizes(workload: Workload, stage: Stage, micro_batch_size: int) -> Iterator[str]:
    model, shape = workload.model, stage.shape
    tokens = micro_batch_size * model.seq_length // shape.context_parallel
    if tokens % FP8_ROWS:
        yield f"{tokens} tokens of a micro-batch on a rank, no multiple of {FP8_ROWS}"
    for rank, share in enumerate(member_shares(model, shape.tensor_parallel, shape.shares)):
        for what, size in sizes_without_fp8(model, share):
            yield f"tensor rank {rank} has {size} {what}, no multiple of {FP8_COLUMNS}"
