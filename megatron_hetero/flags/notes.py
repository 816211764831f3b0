"""Lines for people on what a plan leaves out of a job's script, and on changed settings."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from megatron_hetero.flags.environment import exports_left, job_settings, script_exports
from megatron_hetero.flags.gpu_needs import unmet_needs
from megatron_hetero.flags.support.lookup import refused_options
from megatron_hetero.flags.unpriced import unpriced_words
from megatron_hetero.model.spec import Workload
from megatron_hetero.model.unread import Unread
from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.stock import recompute

LOSES_WORK = ("--save", "--load", "--data-path")
"""Flags without which a job starts all the same, and trains something else or keeps nothing."""


def unread_parts(plan: Plan, more: Collection[str] = ()) -> tuple[Unread, ...]:
    """Return the parts that only a running shell knows, without flags given elsewhere.

    Args:
        more: words of a command line, beside those that the plan remembers.
    """
    return () if plan.workload is None else unread_of_job(plan.workload, more)


def unread_of_job(job: Workload, more: Collection[str] = ()) -> tuple[Unread, ...]:
    """Return as `unread_parts`, of a job without a plan."""
    given = {word.partition("=")[0] for word in (*job.megatron_args, *more)}
    return tuple(part for part in job.unread if part.name not in given)


def unread_lines(parts: Collection[Unread], most: int | None = None) -> Iterator[str]:
    """Write one line for each place and reason: first those that may change the model.

    Args:
        most: lines that are written, the others counted; all by default.
    """
    # (place, reason, has a name) -> names, so that each place has one line.
    alike: dict[tuple[str, str, bool], list[str]] = {}
    for part in sorted(parts, key=lambda part: not part.may_change_model):
        alike.setdefault((part.where, part.reason, bool(part.name)), []).append(part.name)
    lines = [
        str(Unread(", ".join(dict.fromkeys(names)), where, reason))
        for (where, reason, _), names in alike.items()
    ]
    # One more line costs no more than the line that counts the rest.
    if most is None or len(lines) <= most + 1:
        yield from lines
        return
    yield from lines[:most]
    yield f"{len(lines) - most} more parts of the script are left out; `doctor` and --json name all"


def plan_notes(
    plan: Plan,
    job: Workload | None = None,
    places: Mapping[str, str] | None = None,
    most_unread: int | None = None,
) -> tuple[str, ...]:
    """Return the notes of a plan, for `plan`, `flags` and their `--json`.

    Args:
        job: the job that was planned, where the plan's own may have other settings (a plan of stock
            Megatron); by default the plan's.
        places: file and line of each flag, where they are known.
        most_unread: lines about parts of the script that are not read, the others counted.
    """
    return tuple(_notes(plan, job or plan.workload, places, most_unread))


def unknown_words(parts: Collection[Unread]) -> str:
    """Say that unknown parts of a script may change the model; empty if there are no such parts."""
    if not any(part.may_change_model for part in parts):
        return ""
    return (
        "NOT ALL OF THE SCRIPT IS KNOWN, and what is not may change the model (the notes above): "
        "say its variables by --model-env NAME=VALUE (NAME= for an empty one) and its arguments by "
        '--model "run.sh ARGUMENT", or write the flags into a file, and plan again.'
    )


def changed_settings(plan: Plan, job: Workload) -> str:
    """Say which settings of a job the plan changed: micro-batches and recompute; empty if there are
    none."""
    training = job.training
    own = training if plan.workload is None else plan.workload.training
    # Sizes and recompute of all replicas beside the job's.
    sizes = sorted({r.micro_batch_size or own.micro_batch_size for r in plan.replicas})
    changed = []
    if sizes != [training.micro_batch_size]:
        shown = " and ".join(map(str, sizes))
        changed.append(f"micro-batches of {shown} (the job: {training.micro_batch_size})")
    kinds = {recompute(plan, stage) for r in plan.replicas for stage in r.stages}
    if kinds != {(training.recompute, None)}:
        granularities = sorted({kind or "" for kind, _ in kinds})
        some = any(num_layers is not None for _, num_layers in kinds)
        words = f"recompute {' and '.join(granularities)}{' of some layers' if some else ''}"
        by_stage = ", by stage" if len(kinds) > 1 else ""
        changed.append(f"{words}{by_stage} (the job: {training.recompute})")
    return " and ".join(changed)


def refused_words(plan: Plan, has_stock: bool = True) -> str:
    """Say which flags of the job are refused at start-up, and the remedy; empty if there are none.

    Args:
        has_stock: some plan of stock Megatron fits, which takes all of its own flags.
    """
    options = refused_options(plan)
    if not options:
        return ""
    them = "them" if options[1:] else "it"
    stock = ", or run the best plan of stock Megatron (plan --stock)" if has_stock else ""
    return (
        f"REFUSED at start-up on this plan: {', '.join(map(str, options))}. Take {them} out of the "
        f"script and plan again{stock} (docs/megatron-flags.md)."
    )


def memory_savers(workload: Workload) -> str:
    """Say which flags of a job save memory without being counted in a plan; empty if there are
    none.

    They are for the error that no plan fits, of which they may be the reason.
    """
    # Flags with and without `=`.
    given = {word.partition("=")[0] for word in workload.megatron_args}
    found = [flag for flag in _MEMORY_SAVERS if flag in given]
    if not found:
        return ""
    verb = "saves" if len(found) == 1 else "save"
    return (
        f"{' and '.join(found)} of the job {verb} memory under stock Megatron, but not here: the "
        "runtime refuses such flags, and no prediction counts them (docs/megatron-flags.md)."
    )


_MEMORY_SAVERS = (
    "--optimizer-cpu-offload",
    "--cpu-offloading-num-layers",
    "--fine-grained-activation-offloading",
)


def _notes(
    plan: Plan, job: Workload | None, places: Mapping[str, str] | None, most_unread: int | None
) -> Iterator[str]:
    # A bare layout leaves nothing out.
    if plan.workload is None or job is None:
        return
    _, bracket, vocabulary = plan.workload.source.partition(" (vocabulary of ")
    if bracket:
        yield f"vocabulary of {vocabulary.removesuffix(')')}"
    changed = changed_settings(plan, job)
    if changed:
        yield f"the plan changes settings of the job: {changed}; `flags` follows the plan"
    unpriced = unpriced_words(plan, job)
    if unpriced:
        yield unpriced
    yield from unmet_needs(plan, places)
    parts = unread_parts(plan)
    yield from unread_lines(parts, most_unread)
    if any(part.name.startswith("--") for part in parts):
        yield "give such flags after --, or write their values into the script, and plan again"
    # Variables of the script that the launch sets to the same value.
    decided = {(setting.name, setting.value) for setting in job_settings(plan)}
    kept = ["=".join(pair) for pair in script_exports(plan) if pair in decided]
    if kept:
        yield f"`flags` and `launch` keep of the script's environment: {', '.join(kept)}"
    yield from exports_left(plan)
