"""FlagScale's recompute of each stage and micro-batch, as the recompute of a plan's stages.

Each flag has a list for every run of equal stages: `[1, 30, 0, 2, 1]` is one stage whose first 30
micro-batches have the value 0 and whose next two have 1.  Granularity: 0 none, 1 full.  Method: 0
uniform, 1 block (help of its `--recompute-*-per-stage-micro-batch`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_hetero.convert.given import GivenFlags, StageRecompute
from megatron_hetero.errors import UsageError

_GRANULARITY = "--recompute-granularity-per-stage-micro-batch"
_METHOD = "--recompute-method-per-stage-micro-batch"
_NUM_LAYERS = "--recompute-num-layers-per-stage-micro-batch"
_FLAGS = (_GRANULARITY, _METHOD, _NUM_LAYERS)
_LISTS = re.compile(r"(?:\s*\[\s*\d+(?:\s*,\s*\d+)*\s*\])+\s*")


def stage_recompute(
    flags: GivenFlags, layers: Sequence[int], num_micro_batches: int, notes: list[str]
) -> tuple[StageRecompute, ...]:
    """Read the recompute of every stage; empty if no flag gives it for each, or a stage changes it.

    Args:
        layers: of each stage.
        num_micro_batches: of a replica, which the lists have to count.
        notes: extended by what a plan cannot say.
    Raises:
        UsageError: a list that is none, or does not count the stages or micro-batches.
    """
    if not any(flags.has(flag) for flag in _FLAGS):
        return ()
    # Values of each flag by stage; None where a stage changes within a step.
    values: dict[str, list[int | None]] = {}
    for flag in _FLAGS:
        if flags.has(flag):
            values[flag] = _of_each_stage(flags, flag, len(layers), num_micro_batches)
        else:
            values[flag] = [_of_the_job(flags, flag)] * len(layers)
    changing = [flag for flag in _FLAGS if None in values[flag]]
    if changing:
        notes.append(
            f"{', '.join(changing)}: not the same for all micro-batches of a stage, or not given "
            "for the job; not converted: put `recompute` into the stages of plan.json"
        )
        return ()
    # FlagScale's codes: granularity 0 is none, 1 full; method 0 uniform, 1 block.
    found = []
    for stage, num_layers in enumerate(layers):
        granularity, method, count = (values[flag][stage] or 0 for flag in _FLAGS)
        if granularity == 0 or count == 0:
            found.append(StageRecompute("none"))
            continue
        # Uniform recomputes `count` layers from one input; a plan recomputes each from its own.
        if method == 0 and count > 1:
            notes.append(
                f"stage {stage} recomputes {count} layers as one; here each by itself, which "
                "keeps more inputs and computes the same"
            )
        # Only `block` leaves layers of a stage out.
        some = method == 1 and count < num_layers
        found.append(StageRecompute("full", count if some else None))
    return tuple(found)


def _of_each_stage(
    flags: GivenFlags, flag: str, num_stages: int, num_micro_batches: int
) -> list[int | None]:
    """Read a value for each stage; None where its micro-batches have several."""
    text = flags.text(flag)
    if not _LISTS.fullmatch(text):
        raise UsageError(f"{flags.where(flag)}: {flag} {text}: lists such as [1, 30, 0, 2, 1]")
    found: list[int | None] = []
    for inner in re.findall(r"\[([^\]]*)\]", text):
        # Number of stages, then pairs of (micro-batches, value).
        stages, *runs = (int(number) for number in inner.split(","))
        if len(runs) % 2 or not runs or sum(runs[::2]) != num_micro_batches:
            raise UsageError(
                f"{flags.where(flag)}: {flag} [{inner}]: after the number of stages, pairs of a "
                f"number of micro-batches and a value, for {num_micro_batches} micro-batches in all"
            )
        if stages > num_stages - len(found):
            break
        # A run of no micro-batches says nothing.
        kinds = {value for count, value in zip(runs[::2], runs[1::2], strict=True) if count}
        found += [kinds.pop() if len(kinds) == 1 else None] * stages
    else:
        if len(found) == num_stages:
            return found
    raise UsageError(f"{flags.where(flag)}: {flag} {text}: lists for {num_stages} stages")


def _of_the_job(flags: GivenFlags, flag: str) -> int | None:
    """Read the job's own value of a setting that is not given for each stage; None where it has
    none."""
    job = flag.removesuffix("-per-stage-micro-batch")
    if not flags.has(job):
        return None
    # The codes of the lists, for the job's words.
    if flag == _NUM_LAYERS:
        return flags.integer(job)
    names = {"full": 1} if flag == _GRANULARITY else {"uniform": 0, "block": 1}
    return names.get(flags.text(job))
