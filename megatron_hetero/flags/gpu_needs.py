"""Flags of a job that some GPUs cannot follow.

Sources: support matrix of Transformer Engine (fp8 per tensor from compute capability 8.9, block
scaling 9.0, MXFP8 and NVFP4 10.0), FlashAttention-2 (8.0 and up), and `validate_args` of
`megatron.training.arguments` (grouped GEMM from 8.0).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from megatron_hetero.cluster.catalogue import gpu_type, gpu_type_names
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.work.fused_attention import FLASH_CAPABILITY, has_fused_attention
from megatron_hetero.model.flag_table import flag_table, last_of_each
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.plan import Plan, Stage

FP8_CAPABILITY = {"tensorwise": 8.9, "delayed": 8.9, "blockwise": 9.0, "mxfp8": 10.0}
_FP4_CAPABILITY = 10.0
_GROUPED_GEMM_CAPABILITY = 8.0


@dataclass(frozen=True)
class GpuNeed:
    """A flag that needs a compute capability.

    `id` is that of the finding of `doctor`, `what` the subject of a message, `remedy` what to do
    where a GPU has less.
    """

    id: str
    flag: str
    what: str
    capability: float
    remedy: str


def gpu_needs(options: Mapping[str, tuple[str, ...]]) -> Iterator[GpuNeed]:
    """Yield the needs of a job.

    Args:
        options: the longest name of each flag -> its values (empty for a switch).
    """

    def value(flag: str) -> str:
        return options[flag][0] if options.get(flag) else str(flag_table().by_name[flag].default)

    if "--fp8-format" in options:
        # A recipe of the user's own has a need that is not known here.
        recipe = value("--fp8-recipe")
        if recipe in FP8_CAPABILITY:
            yield GpuNeed(
                "fp8-unsupported", "--fp8-format", f"fp8 with recipe {recipe}",
                FP8_CAPABILITY[recipe], "remove --fp8-format, or plan again without these GPUs",
            )  # fmt: skip
    if "--fp4-format" in options:
        yield GpuNeed(
            "fp4-unsupported", "--fp4-format", "fp4", _FP4_CAPABILITY,
            "remove --fp4-format, or plan again without these GPUs",
        )  # fmt: skip
    # An older switch and a newer flag ask for the same kernel.
    asked = "--use-flash-attn" if "--use-flash-attn" in options else "--attention-backend flash"
    if asked == "--use-flash-attn" or value("--attention-backend") == "flash":
        yield GpuNeed(
            "flash-attention-unsupported", asked, "FlashAttention", FLASH_CAPABILITY,
            f"put --attention-backend auto in the place of {asked}: it takes another kernel there",
        )  # fmt: skip
    if "--moe-grouped-gemm" in options:
        yield GpuNeed(
            "grouped-gemm-unsupported", "--moe-grouped-gemm", "grouped GEMM",
            _GROUPED_GEMM_CAPABILITY, "remove --moe-grouped-gemm, or plan without these GPUs",
        )  # fmt: skip


def without_divided_attention(
    stage: Stage, gpus: Iterable[GpuType], workload: Workload | None
) -> Iterator[str]:
    """Yield the GPUs of a stage that cannot divide its sequences with Transformer Engine's layers,
    which do so by a fused kernel alone: each with what it has no kernel for."""
    if stage.shape.context_parallel > 1:
        # A plan without its job is not asked for the size of its heads.
        head = 0 if workload is None else max(workload.model.head_sizes)
        of_heads = f" for heads of {head} channels" if head else ""
        for gpu in gpus:
            if not has_fused_attention(head, gpu):
                yield f"{gpu.name} (compute capability {gpu.capability}) has none{of_heads}"


def unmet_needs(plan: Plan, places: Mapping[str, str] | None = None) -> Iterator[str]:
    """Say which flags of the job GPUs of the plan cannot follow, by the catalogue's types.

    Args:
        places: file and line of a flag, where they are known.
    """
    if plan.workload is None:
        return
    options = last_of_each(flag_table().split(plan.workload.megatron_args))
    names = dict.fromkeys(plan.type_by_device.values())
    # GPUs that only the cluster file describes are left to `doctor`, which has the file.
    types = [gpu_type(name) for name in names if name in set(gpu_type_names())]
    versions = {t.name: t.capability for t in types if t.capability is not None}
    for need in gpu_needs({o.flag.names[0]: o.values for o in options}):
        less = [f"{name} has {v}" for name, v in versions.items() if v < need.capability]
        if less:
            # Places are kept by flag: `--attention-backend flash` loses its value for the look-up.
            place = (places or {}).get(need.flag.partition(" ")[0])
            where = f"{place}: " if place else ""
            yield (
                f"{where}{need.flag} will not run: {need.what} needs compute capability "
                f"{need.capability}, {' and '.join(less)}; {need.remedy}"
            )
