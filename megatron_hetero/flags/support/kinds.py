"""Kinds of treatment of Megatron's flags, on an asymmetric plan and in `verify`."""

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
    "GPU": "acts on a GPU or through its libraries alone, where no test has compared it yet",
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
    """Treatment of some flags on an asymmetric plan; `names` are flags and patterns (with `*`).

    `neutral` gives, for flags that are passed on, the class of reasons why a plan trains the same
    as one process. `by_presence` flags are refused wherever they are given; other refusals depend
    on the value (`runtime.job.checks.support`). `asked_by` limits a refusal to jobs that also give
    this flag. `followed` lists the values that are not refused; if empty, only Megatron's default
    is not.
    """

    status: Status
    names: tuple[str, ...]
    note: str = ""
    neutral: Neutral | None = None
    by_presence: bool = False
    asked_by: str = ""
    followed: tuple[str, ...] = ()


Treatment = Literal[
    "kept", "kept by the plan", "kept in half precision", "shrunk", "no effect", "left out",
    "refused",
]  # fmt: skip
"""Kept: given to the plan's ranks and the one process as it stands; by the plan: to its ranks
alone, since it says how ranks work together; in half precision: to both in bf16 or fp16.  Shrunk:
another value is used, and both are shown.  Left out: a CPU cannot run it.  Refused: as the runtime
does, or because nothing could be compared."""


@dataclass(frozen=True)
class Entry:
    """Treatment of some flags in `verify`: `names` are flags and patterns (with `*`).

    `note` is the class or reason. An entry with `values` holds for these values alone.
    """

    treatment: Treatment
    names: tuple[str, ...]
    note: str = ""
    values: tuple[str, ...] = ()
