"""Flags of a verification: those of the job, each treated as the small model needs it.

Which flags are kept, shrunk, without effect, left out or refused is data
(`flags/support/verification.json`); `flag_values` has the values that replace the shrunk ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.flags.emit import check_user_flags, tokens_of
from megatron_hetero.flags.support.lookup import refused_options, support_of
from megatron_hetero.flags.support.verification import FP8, treat
from megatron_hetero.lab.verify.small.flag_values import OFF, SmallValues
from megatron_hetero.lab.verify.small.shrink import RECOMPUTE_FLAGS, Shrunk, decides_recompute
from megatron_hetero.model.flag_table import Option
from megatron_hetero.model.spec import Workload
from megatron_hetero.model.training import Precision
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.model import fp8
from megatron_hetero.runtime.transformer_engine import layers

ADDED = "--eod-mask-loss"
"""Flag that every verification adds: micro-batches then count unlike numbers of tokens."""

PRECISIONS = ("--bf16", "--fp16")
"""Flags of half precision; `Options.precision` decides which of them the runs get."""


@dataclass(frozen=True)
class JobFlags:
    """Arguments of the runs, and the report on the job's flags.

    `both` go to the plan and to the one process, `half` to both where they train in the job's own
    half `precision`, `plan` to the plan only. `learning_rates` are those of the job's own
    optimizer.
    """

    both: tuple[str, ...] = ()
    half: tuple[str, ...] = ()
    plan: tuple[str, ...] = ()
    precision: Precision = "fp32"
    learning_rates: Mapping[str, float] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    shrunk: tuple[str, ...] = ()
    no_effect: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    left_out: tuple[tuple[str, str], ...] = ()
    added: tuple[str, ...] = ()


NO_FLAGS = JobFlags()


def job_flags(plan: Plan, workload: Workload, shrunk: Shrunk, num_steps: int) -> JobFlags:
    """Sort the flags of a job by their treatment.

    Args:
        plan: the plan, with its `workload`.
        workload: the job.
        shrunk: the small model.
        num_steps: number of steps to train.
    Raises:
        UsageError: Megatron does not know a flag, or a value is impossible.
        UnsupportedError: the runtime refuses some flags on this plan, or they cannot be compared.
    """
    # Flags that Megatron knows, and that the runtime takes on this plan.
    options = check_user_flags(workload.megatron_args)
    refused = refused_options(plan)
    if refused:
        raise UnsupportedError(
            "These flags are not supported on an asymmetric plan yet:\n  "
            + "\n  ".join(map(str, refused))
        )
    # Kept as they are, or with the small model's value.
    treated = treat(options)
    values = SmallValues(workload, shrunk, num_steps, options)
    both = [token for o in treated.of("kept") for token in values.kept(o)]
    lines = []
    for option in treated.of("shrunk"):
        tokens, shown = values.instead_of(option)
        both += tokens
        if shown is not None and option.values != (shown,):
            lines.append(f"{option} -> {shown}")
    # Without effect on the comparison, by the reason.
    no_effect: dict[str, tuple[str, ...]] = {}
    for option, entry in treated.options:
        if entry.treatment == "no effect":
            no_effect[entry.note] = (*no_effect.get(entry.note, ()), option.name)
    # What only the plan, or only half precision, has.
    rates: dict[str, float] = {}
    for option in options:
        if option.name == "--lr":
            rates[workload.training.optimizer] = float(option.values[0])
    by_plan = [o for o in treated.of("kept by the plan") if not _is_decided(o)]
    in_half = treated.of("kept in half precision")
    precisions = [o for o in in_half if o.name in PRECISIONS]
    half = [o for o in in_half if o.name not in PRECISIONS]
    lost = [(o, entry) for o, entry in treated.options if entry.treatment == "left out"]
    left_out = [(str(o), entry.note) for o, entry in lost]
    of_fp8 = [o for o, entry in treated.options if entry.note == FP8]
    no_fp8 = _why_no_fp8(of_fp8, workload, shrunk) if of_fp8 else None
    if no_fp8 is not None:
        half = [o for o in half if o not in of_fp8]
        left_out += [(str(o), no_fp8) for o in of_fp8]
    if workload.training.precision == "fp32":
        lines += [f"{option} -> {OFF}, in fp32" for option in half]
        half = []
    return JobFlags(
        both=_without_recompute(shrunk.plan, both),
        half=tokens_of(half),
        plan=tokens_of(by_plan),
        precision=workload.training.precision,
        learning_rates=rates,
        kept=tuple(map(str, (*treated.of("kept"), *by_plan, *precisions, *half))),
        shrunk=tuple(lines),
        no_effect=no_effect,
        left_out=tuple(left_out),
        added=() if any(o.name == ADDED for o in options) else (ADDED,),
    )


def _why_no_fp8(options: Sequence[Option], workload: Workload, shrunk: Shrunk) -> str | None:
    """Return the reason why the small model's products are not in fp8; None if they can be."""
    # The last recipe holds, as in argparse.
    recipes = [o.values[0] for o in options if o.name == "--fp8-recipe"]
    if not any(o.name == "--fp8-format" for o in options):
        return "there is no --fp8-format"
    if not backend.cuda_is_usable():
        reason = layers.why_local(workload.megatron_args)
        if reason is not None:
            return f"fp8 products need Transformer Engine's layers: {reason}"
        if recipes and recipes[-1] not in fp8.ON_A_CPU:
            return f"a CPU has no --fp8-recipe {recipes[-1]}"
    # The small model may have sizes that the real model's do not have.
    try:
        fp8.check_plan(shrunk.plan, replace(workload, model=shrunk.model))
    except UnsupportedError as error:
        return f"the small model has sizes without fp8 products: {error}"
    return None


def without_flags(argv: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Drop some flags and their values from an argument vector."""
    kept, is_kept = [], True
    # Values follow their flag until the next flag.
    for token in argv:
        if token.startswith("--"):
            is_kept = token.partition("=")[0] not in names
        if is_kept:
            kept.append(token)
    return tuple(kept)


def _is_decided(option: Option) -> bool:
    """Tell if the plan itself decides this option."""
    return support_of(option.flag).status == "the plan's"


def _without_recompute(plan: Plan, args: Sequence[str]) -> tuple[str, ...]:
    """Drop the job's recompute flags if the stages of a stock plan have their own."""
    if not decides_recompute(plan):
        return tuple(args)
    return without_flags(args, RECOMPUTE_FLAGS)
