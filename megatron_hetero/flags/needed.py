"""Flags, beside the model's, without which a training job cannot start.

A Hugging Face config.json has no training settings, and many files of flags describe only the
model: they suffice for a plan, not for a job. Megatron reports these flags one by one, after all
processes have started (`megatron.training.arguments.validate_args`); without an evaluation interval
it divides by None.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from megatron_hetero.model.flag_table import flag_table, last_of_each
from megatron_hetero.model.spec import Workload


@dataclass(frozen=True)
class Needed:
    """A need of every job: one of `flags`. `example` shows how one is
    written, with a word in place of the value."""

    flags: tuple[str, ...]
    what: str
    example: str


NEEDED: tuple[Needed, ...] = (
    Needed(
        ("--train-iters", "--train-samples"),
        "how long to train, in steps of the global batch, such as 100000",
        "--train-iters STEPS",
    ),
    Needed(("--lr",), "the learning rate, such as 3e-4", "--lr RATE"),
    Needed(
        ("--data-path", "--data-args-path", "--train-data-path", "--per-split-data-args-path",
         "--mock-data"),
        "what to train on, a .bin and an .idx file without these endings, such as "
        "data/books_text_document",
        "--data-path PREFIX",
    ),
    Needed(
        ("--tokenizer-type",),
        "the tokenizer that made the data, such as HuggingFaceTokenizer",
        "--tokenizer-type TYPE",
    ),
    Needed(
        ("--eval-interval",),
        "steps from one validation to the next, such as 1000",
        "--eval-interval STEPS",
    ),
)  # fmt: skip

READ_A_MODEL = frozenset(
    {
        "HuggingFaceTokenizer",
        "SFTTokenizer",
        "SentencePieceTokenizer",
        "GPTSentencePieceTokenizer",
        "Llama2Tokenizer",
        "TikTokenizer",
    }
)
"""Values of `--tokenizer-type` that are a file or a folder, named by `--tokenizer-model`."""

_TOKENIZER_MODEL = Needed(
    ("--tokenizer-model",),
    "the file or folder of the tokenizer, such as models/llama",
    "--tokenizer-model FOLDER",
)
_NOT_TO_EVALUATE = ("--train-iters", "--lr")


def missing_flags(
    given: Mapping[str, tuple[str, ...]], unknown: Collection[str] = ()
) -> tuple[Needed, ...]:
    """Return the entries of `NEEDED` that a job lacks, in the order of `NEEDED`.

    Args:
        given: flag -> its values.
        unknown: more flags that are given, with values that only a running shell knows.
    """
    names = {*given, *unknown}
    found = [needed for needed in NEEDED if names.isdisjoint(needed.flags)]
    # Some tokenizers are read from a file or folder.
    if given.get("--tokenizer-type", ("",))[0] in READ_A_MODEL and "--tokenizer-model" not in names:
        found.append(_TOKENIZER_MODEL)
    # A job that only evaluates has neither steps nor a rate.
    if "--skip-train" in names:
        found = [needed for needed in found if needed.flags[0] not in _NOT_TO_EVALUATE]
    return tuple(found)


def missing_in_job(workload: Workload | None, more: Collection[str] = ()) -> tuple[Needed, ...]:
    """Return the needs that the flags of a plan, together with `more` flags, do not meet.

    The result is empty for a plan without flags: one made in Python or from a bare layout.

    Raises:
        UsageError: Megatron would not read the flags.
    """
    if workload is None or not workload.megatron_args:
        return ()
    options = last_of_each(flag_table().split((*workload.megatron_args, *more)))
    given = {name: option.values for option in options for name in option.flag.names}
    return missing_flags(given, workload.unread_flags)


def missing_line(missing: Collection[Needed]) -> str:
    """Name missing flags on one line, for a terminal or a comment."""
    return ", ".join(f"{needed.example} ({needed.what})" for needed in missing)
