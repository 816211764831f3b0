"""Megatron flags without the promised effect on this plan, or with a late failure.

Each rule follows a line of `megatron.training.arguments.validate_args` or of `megatron.core`, named
beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_hetero.flags.environment import CONNECTIONS_VARIABLE, connections_wanted
from megatron_hetero.flags.growing_batches import undivided_batches
from megatron_hetero.flags.needed import missing_in_job, missing_line
from megatron_hetero.flags.notes import LOSES_WORK, unread_parts
from megatron_hetero.flags.support.lookup import refused_options
from megatron_hetero.preflight.finding import Finding
from megatron_hetero.preflight.job import Job
from megatron_hetero.schedule.stock import is_stock


def connections_are_as_many_as_megatron_asks(job: Job) -> Iterator[Finding]:
    """Check that CUDA_DEVICE_MAX_CONNECTIONS is 1 for tensor and context parallelism on GPUs before
    Blackwell, and is not 1 for FSDP, as `validate_args` requires."""
    wanted = connections_wanted(job.plan)
    for node, value in job.variable(CONNECTIONS_VARIABLE).items():
        if wanted == "several" and value == "1":
            yield Finding(
                "connections-one",
                "error",
                node,
                f"{CONNECTIONS_VARIABLE} is 1; with FSDP Megatron stops at its start",
                f"another value of {CONNECTIONS_VARIABLE} on every machine, or none",
            )
        versions = [island.gpu_type.capability for island in job.cluster.machines[node]]
        # Megatron asks the local GPU alone, so that a machine of Blackwell GPUs needs no variable.
        before_blackwell = any(version is not None and version < 10.0 for version in versions)
        if wanted == "one" and value != "1" and before_blackwell:
            yield Finding(
                "connections-not-one",
                "error",
                node,
                f"{CONNECTIONS_VARIABLE} is {value or 'not set'}; with tensor or context "
                "parallelism Megatron stops at its start",
                f"{CONNECTIONS_VARIABLE}=1 on every machine",
            )


def the_runtime_follows_every_flag(job: Job) -> Iterator[Finding]:
    """Find flags that the runtime refuses before the start (docs/megatron-flags.md)."""
    for option in refused_options(job.plan):
        yield Finding(
            "flag-refused",
            "error",
            str(option),
            "the runtime refuses it on a plan that stock Megatron cannot express",
            "take it out of the script and plan again, or plan with --strategy stock",
        )


def the_job_is_complete(job: Job) -> Iterator[Finding]:
    """Find needed flags that are missing; Megatron reports them one by one, after the start."""
    missing = missing_in_job(job.plan.workload)
    if missing:
        examples = " ".join(needed.example for needed in missing)
        yield Finding(
            "flags-missing",
            "error",
            " ".join(needed.flags[0] for needed in missing),
            f"the job cannot start without {missing_line(missing)}",
            f"add them to the script ({examples}) and plan again, or give them behind `--` to "
            "`doctor` and `launch`; `megatron-hetero init --job` writes a script that has them all",
        )


def the_script_is_read(job: Job) -> Iterator[Finding]:
    """Find parts of the job's script that only a running shell knows; the job starts without these
    parts."""
    for part in unread_parts(job.plan):
        # Lost work or another model is an error; other parts the job does without.
        loses = part.name in LOSES_WORK or part.may_change_model
        what = f"{part.name} is left out" if part.name else "what may hold flags is left out"
        what += ", and the job trains without it" if loses else ""
        yield Finding(
            "flag-left-out",
            "error" if loses else "warning",
            part.where,
            f"{what}: {part.reason}",
            f"give {part.name or 'them'} behind `--` to `plan` or `launch`, say a variable of the "
            "script by `plan --model-env NAME=VALUE`, or write the value into the script",
        )


def growing_batches_divide(job: Job) -> Iterator[Finding]:
    """Find batches of a schedule that a replica cannot run in whole micro-batches.

    Every replica runs the same part of each batch (`runtime.batches`).
    """
    # The plan's own batch divides; a schedule of growing batches has others too.
    batches = undivided_batches(job.plan)
    if batches:
        yield Finding(
            "batches-undivided",
            "error",
            "--step-batch-size-schedule",
            f"{', '.join(map(str, batches))} of its batches leave a replica no whole number of "
            "micro-batches, and the runtime refuses them",
            "choose batches that divide as the plan's, or limits.num_replicas: 1 and plan again",
        )


def local_layers_have_their_kernels(job: Job) -> Iterator[Finding]:
    """Find local layers whose default kernels come from Apex.

    Without Transformer Engine the fused norm and gradient accumulation come from Apex; without
    Apex, `WrappedTorchNorm` and `ColumnParallelLinear` refuse the defaults.
    """
    if job.value("--transformer-impl") != "local":
        return
    wanted = ("--no-persist-layer-norm", "--no-gradient-accumulation-fusion")
    missing = [flag for flag in wanted if not job.has(flag)]
    if missing:
        yield Finding(
            "apex-needed",
            "warning",
            "--transformer-impl local",
            "the defaults of local layers take kernels from NVIDIA's Apex; without it the job "
            "stops while it builds the model",
            f"add {' '.join(missing)}, or make sure that every machine has Apex built",
        )


def flash_attention_is_used(job: Job) -> Iterator[Finding]:
    """Find a request for fused attention on local layers, which ignore the flag.

    Local layers compute attention unfused (`core.transformer.dot_product_attention`).
    """
    # Both the newer flag and the older switch ask for it.
    wants = job.value("--attention-backend") in ("flash", "fused") or job.has("--use-flash-attn")
    if wants and job.value("--transformer-impl") == "local":
        yield Finding(
            "flash-attention-unused",
            "warning",
            "--attention-backend / --use-flash-attn",
            "with --transformer-impl local attention is unfused whatever this flag says: slower, "
            "and it keeps the scores in memory",
            "use --transformer-impl transformer_engine, or remove the flag",
        )


def sequence_parallelism_has_a_width(job: Job) -> Iterator[Finding]:
    """Find sequence parallelism at width 1, where `validate_args` disables it.

    Planning with experts asks for the flag all the same.
    """
    if job.has("--num-experts"):
        return
    if job.has("--sequence-parallel") and job.plan.layout.tensor_parallel_widths == (1,):
        yield Finding(
            "sequence-parallel-unused",
            "warning",
            "--sequence-parallel",
            "every stage has tensor-parallel width 1, where Megatron switches it off",
            "remove --sequence-parallel",
        )


def overlap_has_its_partner(job: Job) -> Iterator[Finding]:
    """Find overlaps that `validate_args` refuses or drops because another flag is missing."""
    # (flag, flags of which one has to be there, reason).
    rules = (
        ("--overlap-param-gather", ("--use-distributed-optimizer", "--use-megatron-fsdp"),
         "parameters are gathered by the distributed optimizer alone"),
        ("--overlap-param-gather", ("--overlap-grad-reduce",),
         "Megatron gathers parameters in the buckets of --overlap-grad-reduce"),
        ("--tp-comm-overlap", ("--sequence-parallel",),
         "it needs sequence parallelism"),
    )  # fmt: skip
    for flag, partners, reason in rules:
        if job.has(flag) and not job.has(*partners):
            yield Finding(
                "overlap-without-partner",
                "error",
                flag,
                reason,
                f"add {' or '.join(partners)}, or remove {flag}",
            )


def no_flag_excludes_another(job: Job) -> Iterator[Finding]:
    """Find pairs of flags at which `validate_args` or `core_transformer_config_from_args` stops."""
    iterations, samples = "a job counts iterations", "a job counts samples"
    # (flag, flags that it excludes unless they are 0, reason).
    rules = (
        ("--train-iters", ("--train-samples", "--lr-decay-samples", "--lr-warmup-samples"),
         iterations),
        ("--train-samples", ("--lr-decay-iters", "--lr-warmup-iters"), samples),
        ("--lr-warmup-fraction", ("--lr-warmup-iters", "--lr-warmup-samples"),
         "a warm-up has one length"),
        ("--squared-relu", ("--swiglu",), "an MLP has one activation"),
        ("--quick-geglu", ("--swiglu",), "an MLP has one activation"),
    )  # fmt: skip
    for flag, others, reason in rules:
        for other in others:
            if job.has(flag) and job.has(other) and job.value(other) != "0":
                yield Finding(
                    "flags-exclude",
                    "error",
                    f"{flag} {other}",
                    f"{reason}, and Megatron stops at its start where both are given",
                    f"remove {flag} or {other}",
                )


def messages_of_warm_up_can_overlap(job: Job) -> Iterator[Finding]:
    """Find an overlap of messages in warm-up and flush on a schedule that overlaps none.

    Without interleaving `validate_args` switches the overlap of messages off, and
    `core.ModelParallelConfig` refuses this part of the overlap alone.  On a plan that stock
    Megatron cannot express the runtime leaves the flag out.
    """
    flag, off = "--overlap-p2p-communication-warmup-flush", "--no-overlap-p2p-communication"
    if not job.has(flag):
        return
    # The plan's chunks decide here, for they become the flags of virtual stages.
    stock = is_stock(job.plan)
    interleaved = any(stage.content.chunks for stage in job.stages)
    if stock and interleaved and not job.has(off):
        return
    why = "only interleaved schedules overlap messages"
    if stock and interleaved:
        why = f"{off} switches off the overlap of which this is a part"
    yield Finding(
        "overlap-without-partner",
        "error" if stock else "warning",
        flag,
        f"{why}; Megatron stops at its start" if stock else "it has no effect on this plan",
        f"remove {flag}",
    )


CHECKS = (
    the_runtime_follows_every_flag,
    the_job_is_complete,
    the_script_is_read,
    growing_batches_divide,
    connections_are_as_many_as_megatron_asks,
    local_layers_have_their_kernels,
    flash_attention_is_used,
    sequence_parallelism_has_a_width,
    overlap_has_its_partner,
    no_flag_excludes_another,
    messages_of_warm_up_can_overlap,
)
