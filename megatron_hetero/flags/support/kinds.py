"""Kinds of treatment that an asymmetric plan gives to Megatron flags, for `flags.support.table`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_hetero.model.megatron_release import MEGATRON

Status = Literal["proved", "passed on", "the plan's", "refused", "no effect", "elsewhere"]

Neutral = Literal["log", "kernels", "GPU", "reading", "writing", "end", "unread"]

NEUTRAL: dict[Neutral, str] = {
    "log": "says what is printed, logged or watched, not what is trained",
    "kernels": "chooses how something is computed, or when memory is freed: the same numbers to "
    "rounding",
    "GPU": "acts on a GPU or through its libraries alone, where nothing of this package has been "
    "compared yet",
    "reading": "names or reads files of data and tokenizers, which every rank does as one process",
    "writing": "decides how fast or by whom a checkpoint is written and read; its form stays",
    "end": "decides when a job ends, or hurts it on purpose to see whether it does",
    "unread": f"an old name, or one that {MEGATRON} reads nowhere in pre-training",
}
"""Reasons why a flag, passed on, cannot make a plan differ from a single process."""

MEANING: dict[Status, str] = {
    "proved": "followed; a test compares with stock Megatron",
    "passed on": "followed by Megatron's own code; its class says why a plan cannot differ by it",
    "the plan's": "decided by the plan; a flag that says otherwise is refused",
    "refused": "refused by name before anything starts",
    "no effect": "accepted with a warning, and changes nothing: the plan's own way takes its place",
    "elsewhere": "of another kind of job, or a detail of a feature named here; GPT pre-training on "
    "a plan never reads it",
}


@dataclass(frozen=True)
class Support:
    """Treatment of some flags: `names` are flags and patterns (`*`), divided by spaces.

    `neutral` gives, for flags that are passed on, the class of reasons why a plan trains the same
    as one process. `by_presence` flags are refused wherever they are given; other refusals depend
    on the value (`runtime.job.checks.support`). `asked_by` limits a refusal to jobs that also give
    this flag. `followed` lists the values that are not refused; if empty, only Megatron's default
    is not.
    """

    status: Status
    names: str
    note: str = ""
    neutral: Neutral | None = None
    by_presence: bool = False
    asked_by: str = ""
    followed: tuple[str, ...] = ()
