"""A Megatron argument vector as flags with values, each with file and line."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_hetero.errors import ModelError, UsageError
from megatron_hetero.model.flag_table import flag_table
from megatron_hetero.model.shell.values import Word
from megatron_hetero.model.unread import Unread

COMMAND_LINE = "command line"

PLAN_FLAGS = frozenset(
    {
        "--tensor-model-parallel-size",
        "--pipeline-model-parallel-size",
        "--pipeline-model-parallel-layout",
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "--decoder-first-pipeline-num-layers",
        "--decoder-last-pipeline-num-layers",
        "--account-for-embedding-in-pipeline-split",
        "--account-for-loss-in-pipeline-split",
        "--use-tp-pp-dp-mapping",
        "--context-parallel-size",
        "--expert-model-parallel-size",
        "--expert-tensor-parallel-size",
        "--hetero-layout",
        "--hetero-plan",
    }
)
"""Flags that the plan decides."""

_EXCLUSIVE = (
    frozenset({"--bf16", "--fp16"}),
    frozenset({"--recompute-activations", "--recompute-granularity"}),
    frozenset({"--position-embedding-type", "--use-rotary-position-embeddings"}),
)
"""Sets of flags; one of a set, given by hand, takes the place of the others."""


@dataclass(frozen=True)
class Argument:
    """A flag and its values.  A value with a `reason` is not known without running the script."""

    flag: str
    values: tuple[Word, ...]
    where: str
    reason: str = ""

    @property
    def holes(self) -> tuple[Word, ...]:
        """Return the unknown words behind the values that the flag takes: flags, or nothing.

        An unknown word after a known value (`--split 949,50,1 $MORE`) is taken to be empty, which
        to the shell is no word at all; so is one after a flag without values.
        """
        return tuple(v for v in self.values[self._most_values :] if v.text is None)

    @property
    def _most_values(self) -> int:
        # A flag of another program is taken to have one value.
        flag = flag_table().by_name.get(self.flag)
        most = 1 if flag is None else flag.bounds[1]
        return 1 if most is None else most

    @property
    def words(self) -> tuple[str, ...] | None:
        """Return the argument as Megatron gets it; None when the script has to be run to know
        it."""
        most = self._most_values
        # Known values all count; an unknown one behind the last that the flag takes is no value.
        values = [v for i, v in enumerate(self.values) if i < most or v.text is not None]
        if self.reason or any(v.reason for v in values):
            return None
        return (self.flag, *(v.text for v in values if v.text is not None))

    @property
    def unread(self) -> Iterator[Unread]:
        """Yield the parts of the argument that only a running shell knows."""
        # The first unknown value gives the reason of the whole argument.
        hidden = next((v for v in self.values if not v.is_known), None)
        if self.words is None:
            reason = self.reason or (hidden.reason if hidden else "")
            yield Unread(self.flag, self.where, reason)
        yield from (Unread("", hole.where, hole.reason) for hole in self.holes)


@dataclass(frozen=True)
class JobText:
    """A job as it is written: flags that `takes_flags` says can be added to the source, what only a
    shell knows outside of them, and variables that a script sets for the job's libraries."""

    source: str
    arguments: tuple[Argument, ...]
    takes_flags: bool = True
    unread: tuple[Unread, ...] = ()
    exports: tuple[str, ...] = ()


def command_line_words(args: Sequence[str]) -> tuple[Word, ...]:
    """Wrap the words that a person typed after `--`."""
    return tuple(Word(text, COMMAND_LINE) for text in args)


def leading_holes(words: Sequence[Word]) -> tuple[Unread, ...]:
    """Return the unknown words before the first flag."""
    leading = itertools.takewhile(lambda word: not word.is_flag, words)
    return tuple(Unread("", w.where, w.reason) for w in leading if w.text is None)


def dropped_holes(arguments: Sequence[Argument], kept: Sequence[Argument]) -> Iterator[Unread]:
    """Yield the unknown words behind flags that another flag, or the plan, takes the place of."""
    for argument in arguments:
        if not any(argument is other for other in kept):
            yield from (Unread("", hole.where, hole.reason) for hole in argument.holes)


def group_arguments(words: Sequence[Word]) -> tuple[Argument, ...]:
    """Group flags with the words up to the next flag; `--flag=value` is split.

    Raises:
        ModelError: a word stands before the first flag.
    """
    arguments: list[Argument] = []
    for word in words:
        if word.is_flag:
            # `--flag=` has an empty value, `--flag` none.
            flag, separator, value = (word.text or "").partition("=")
            values = (Word(value, word.where, word.reason),) if separator else ()
            arguments.append(Argument(flag, values, word.where, word.reason))
        elif arguments:
            last = arguments[-1]
            arguments[-1] = replace(last, values=(*last.values, word))
        elif word.text is not None or word.is_conditional:
            # An unknown word here may be flags (`leading_holes` names it); text surely is none.
            what = f'"{word.text}"' if word.text is not None else f"a variable ({word.reason})"
            raise ModelError(f"{word.where}: {what} stands before the first flag; remove it")
    return tuple(arguments)


def merge_arguments(
    arguments: Sequence[Argument], typed: Sequence[Argument]
) -> tuple[Argument, ...]:
    """Merge a script's arguments, without flags that the plan decides, with the typed arguments; a
    typed flag wins.

    A flag that occurs twice keeps its last values, in its first place, as in Megatron's parser.

    Raises:
        UsageError: a typed flag is one that the plan decides.
    """
    for argument in typed:
        if argument.flag in PLAN_FLAGS:
            raise UsageError(
                f"{argument.flag} is decided by the plan and cannot be given; remove it, or limit "
                "the planner in cluster.yaml (limits.max_tensor_parallel, max_pipeline_parallel, "
                "as_given: [context_parallel] for none)"
            )
    # Of flags that exclude one another, the typed one displaces those of the script.
    displaced: set[str] = set()
    for flags in _EXCLUSIVE:
        given = {a.flag for a in typed} & flags
        if given:
            displaced |= flags - given
    # A dictionary keeps the first place of a flag and the last of its values, like argparse.
    merged = {a.flag: a for a in arguments if a.flag not in PLAN_FLAGS and a.flag not in displaced}
    merged.update({a.flag: a for a in typed})
    return tuple(merged.values())
