"""Precisions, formats and kernels that the GPUs of a plan lack."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_hetero.cost.work.fused_attention import FLASH_CAPABILITY
from megatron_hetero.flags.gpu_needs import GpuNeed, gpu_needs, without_divided_attention
from megatron_hetero.preflight.finding import Finding
from megatron_hetero.preflight.job import Job

_FIRST_UNTESTED_CAPABILITY = 12.0


def precision_is_supported(job: Job) -> Iterator[Finding]:
    """Find GPUs that cannot compute in the precision of the job or stage."""
    for stage in job.stages:
        job_precision = None if job.plan.workload is None else job.plan.workload.training.precision
        # A stage's own precision wins over the job's; without a workload nobody says one.
        precision = stage.content.precision or job_precision
        if precision is not None and stage.gpu.peak_flops.get(precision) is None:
            yield Finding(
                "precision-unsupported",
                "error",
                stage.where,
                f"{stage.gpu.name} cannot compute in {precision}"
                + (" (it needs compute capability 8.0)" if precision == "bf16" else ""),
                "use --fp16 for the whole job, or plan again without these GPUs",
            )


def old_gpus_are_worth_their_cost(job: Job) -> Iterator[Finding]:
    """Find GPUs before Ampere in a plan with newer GPUs, which lose bf16 and fused attention."""
    versions = {gpu.name: gpu.capability for gpu in job.gpu_types}
    # A type that the user describes may have no compute capability, and stands on neither side.
    known = {name: version for name, version in versions.items() if version is not None}
    old = [f"{name} ({v})" for name, v in known.items() if v < FLASH_CAPABILITY]
    new = [f"{name} ({v})" for name, v in known.items() if v >= FLASH_CAPABILITY]
    if old and new:
        yield Finding(
            "compute-capabilities-differ",
            "warning",
            f"{', '.join(old)} beside {', '.join(new)}",
            "compute capability 8.0 brings bf16, FlashAttention and fused attention: the whole job "
            "keeps to fp16 with loss scaling (or fp32), and the older GPUs compute attention "
            "unfused, which stores its scores",
            "watch the loss scale, keep sequences short, and install a torch built for both; or "
            "see what a plan without the older GPUs in bf16 would do (limits.idle)",
        )


def formats_and_kernels_are_supported(job: Job) -> Iterator[Finding]:
    """Find GPUs that lack a format or kernel of the job: fp8 with the job's recipe, fp4,
    FlashAttention, the grouped GEMM."""
    for need in gpu_needs(job.options):
        yield from _needs(job, need)


def divided_sequences_have_a_kernel(job: Job) -> Iterator[Finding]:
    """Find stages that divide sequences on GPUs where Transformer Engine has no kernel for it."""
    if job.value("--transformer-impl") == "local":
        return
    for stage in job.stages:
        for lacking in without_divided_attention(stage.content, [stage.gpu], job.plan.workload):
            yield Finding(
                "context-parallel-unsupported",
                "error",
                stage.where,
                f"Transformer Engine divides sequences by a fused kernel alone: {lacking}",
                "plan again, or use --transformer-impl local",
            )


def flash_attention_is_tested(job: Job) -> Iterator[Finding]:
    """Find GPUs on which FlashAttention was not tested."""
    # Without a request Transformer Engine chooses, and skips what a GPU lacks.
    if job.value("--attention-backend") != "flash" and not job.has("--use-flash-attn"):
        return
    for gpu in job.gpu_types:
        version = gpu.capability
        if version is not None and version >= _FIRST_UNTESTED_CAPABILITY:
            yield Finding(
                "flash-attention-untested",
                "warning",
                f"--attention-backend, {gpu.name}",
                f"FlashAttention did not cover compute capability {version} for long, and its "
                "builds still differ",
                "use --attention-backend auto, or check that your build has the kernels",
            )


def arguments_do_not_depend_on_the_gpu(job: Job) -> Iterator[Finding]:
    """Find flags whose effect depends on the local GPU 0: unlike nodes get unlike arguments.

    Megatron's `validate_args` reads the architecture of that GPU.
    """
    flags = ("--use-megatron-fsdp", "--use-torch-fsdp2", "--tensor-parallel-num-weight-shards")
    given = [flag for flag in flags if job.has(flag)]
    versions = {gpu.capability or 0.0 for gpu in job.gpu_types}
    # Arguments differ only where GPUs stand on both sides of Blackwell (10.0).
    if given and min(versions) < 10.0 <= max(versions):
        yield Finding(
            "arguments-depend-on-gpu",
            "warning",
            given[0],
            "Megatron reads the architecture of the local GPU here, and raises the priority of "
            "communication streams on Blackwell alone: the ranks get unlike arguments",
            f"remove {given[0]}, or plan for GPUs of one side",
        )


def _needs(job: Job, need: GpuNeed) -> Iterator[Finding]:
    """Yield one finding for each type of GPU below a compute capability."""
    for gpu in job.gpu_types:
        version = gpu.capability
        # Without a known version nothing can be said.
        if version is not None and version < need.capability:
            yield Finding(
                need.id,
                "error",
                ", ".join(f"{n.machine} ({gpu.name})" for n in job.nodes if n.gpu_type == gpu),
                f"{need.flag}: {need.what} needs compute capability {need.capability}; {gpu.name} "
                f"has {version}",
                need.remedy,
            )


def maker_is_tested(job: Job) -> Iterator[Finding]:
    """Find GPUs of a maker on whose machines this project has not run."""
    names = ", ".join(gpu.name for gpu in job.gpu_types if gpu.library == "RCCL")
    if names:
        yield Finding(
            "maker-untested",
            "warning",
            names,
            "this project has not been run on AMD's GPUs yet: the plan's figures are of the "
            "catalogue, and Megatron, kernels and RCCL are those that you install",
            "install the ROCm builds of torch and Transformer Engine (or use --transformer-impl "
            "local), and train a few steps first",
        )


CHECKS = (
    maker_is_tested,
    precision_is_supported,
    old_gpus_are_worth_their_cost,
    formats_and_kernels_are_supported,
    divided_sequences_have_a_kernel,
    flash_attention_is_tested,
    arguments_do_not_depend_on_the_gpu,
)
