"""A complete starter script of a training job: Megatron's flags by subject, each with its meaning.

`plan --model` reads it like any other script. Values that only the user knows stand in it as
comments that begin with MISSING; `preflight` reports those that a job cannot start without until
they are filled in.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_hetero.flags.needed import NEEDED, Needed, missing_flags
from megatron_hetero.model.arguments import Argument
from megatron_hetero.model.flag_table import flag_table

MISSING = "# MISSING:"
"""Beginning of a line that the user has to fill in."""
USUAL_BATCH = ("--micro-batch-size 1", "--global-batch-size 128")
"""Arguments of a job that says nothing of its batch."""


@dataclass(frozen=True)
class _ScriptSection:
    """One bash array of the script.

    `flags` belong to it, in order, each with the text of its comment; `defaults` are the arguments
    written where the source has none.
    """

    name: str
    title: str
    flags: tuple[tuple[str, str], ...]
    defaults: tuple[str, ...] = ()
    of_experts: bool = False
    """True if the flag is for models with experts only."""


_SECTIONS = (
    _ScriptSection(
        "BATCH_ARGS",
        "How many sequences a step has; the plan divides them among unlike GPUs.",
        (
            ("--micro-batch-size", "sequences that a GPU computes at once"),
            ("--global-batch-size", "sequences of one step, of the whole job"),
        ),
        USUAL_BATCH,
    ),
    _ScriptSection(
        "TRAINING_ARGS",
        "The optimizer, and how long to train.",
        (
            ("--train-iters", "steps of the global batch"),
            ("--train-samples", "sequences, instead of steps"),
            ("--lr", "the learning rate at its highest"),
            ("--min-lr", "and at the end"),
            ("--lr-decay-style", ""),
            ("--lr-warmup-fraction", "part of the training in which it rises"),
            ("--optimizer", ""),
            ("--weight-decay", ""),
            ("--adam-beta1", ""),
            ("--adam-beta2", ""),
            ("--clip-grad", "the largest norm of the gradient"),
            ("--seed", ""),
        ),
        (
            "--lr-decay-style cosine", "--lr-warmup-fraction .01", "--weight-decay 0.1",
            "--adam-beta1 0.9", "--adam-beta2 0.95", "--clip-grad 1.0",
        ),
    ),
    _ScriptSection(
        "EXPERTS_ARGS",
        "How experts are trained; the plan decides which GPUs have which.",
        (
            ("--sequence-parallel", "Megatron trains experts on a tensor-parallel group only so"),
            ("--moe-grouped-gemm", "the products of a GPU's experts in one kernel"),
            ("--moe-token-dispatcher-type", "each token goes to its own experts alone"),
            ("--moe-router-load-balancing-type", "experts get as many tokens each"),
            ("--moe-aux-loss-coeff", "weight of that loss; Megatron's default is 0"),
        ),
        (
            "--sequence-parallel", "--moe-grouped-gemm", "--moe-token-dispatcher-type alltoall",
            "--moe-router-load-balancing-type aux_loss",
        ),
        of_experts=True,
    ),
    _ScriptSection(
        "DATA_ARGS",
        "What to train on: `megatron-hetero data` makes it of text, with the same tokenizer.",
        (
            ("--data-path", "without .bin and .idx; several, with weights: 0.7 A 0.3 B"),
            ("--mock-data", "random tokens, to try a job without data"),
            ("--split", "parts of the data for training, validation and test"),
            ("--tokenizer-type", "the one that made the data"),
            ("--tokenizer-model", "its file or folder"),
            ("--data-cache-path", "where the order of samples is kept, for all nodes to read"),
        ),
        ("--split 949,50,1",),
    ),
    _ScriptSection(
        "EVALUATION_ARGS",
        "Validation.",
        (
            ("--eval-interval", "steps from one validation to the next; Megatron wants it always"),
            ("--eval-iters", "global batches of each; 0: none"),
        ),
        ("--eval-interval 1000", "--eval-iters 10"),
    ),
    _ScriptSection(
        "CHECKPOINT_ARGS",
        "Checkpoints: they can be resumed under any other plan.",
        (
            ("--save", "folder that all nodes can write"),
            ("--load", "where to resume from; nothing there yet: from the start"),
            ("--save-interval", "steps from one checkpoint to the next"),
        ),
        ("--save checkpoints", "--load checkpoints", "--save-interval 1000"),
    ),
    _ScriptSection(
        "LOG_ARGS",
        "The log; TensorBoard needs its package on the last node.",
        (
            ("--log-interval", "steps from one line to the next"),
            ("--tensorboard-dir", ""),
            ("--wandb-project", ""),
            ("--wandb-exp-name", ""),
        ),
        ("--log-interval 10",),
    ),
)  # fmt: skip

_COEFFICIENT = Needed(
    ("--moe-aux-loss-coeff",),
    "weight of that loss, such as 0.001; without it experts are not balanced",
    "--moe-aux-loss-coeff WEIGHT",
)

_TAIL = """\
# The plan decides the parallel sizes and starts the processes:
#
#   megatron-hetero plan --cluster cluster.yaml --model {name} -o plan.json
#   megatron-hetero doctor plan.json --cluster cluster.yaml      finds what is still missing here
#   megatron-hetero launch plan.json --for ssh -o job            writes what starts it
#
# The next line runs the same job on one machine alone, without a plan."""


def job_script(arguments: Sequence[Argument], source: str, name: str) -> str:
    """Return the text of a job's script.

    Args:
        arguments: flags of the model, and all others that the source gives (`model.arguments`);
            they replace the defaults of the sections.
        source: origin of the arguments, for the first comment.
        name: file name of the script itself.
    """
    # The source's own arguments, which replace the defaults of the sections.
    known = {argument.flag: argument for argument in arguments}
    lines = [
        "#!/usr/bin/env bash",
        f"# A training job for Megatron, from {_one_line(source)}.",
        "# Fill in the lines that say MISSING, if there are any; `doctor` finds those that keep a",
        "# job from starting.",
        "set -euo pipefail",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1",
        "",
    ]
    # Flags of experts are only for models that have experts.
    sections = [s for s in _SECTIONS if "--num-experts" in known or not s.of_experts]
    in_sections = {flag for section in sections for flag, _ in section.flags}
    in_sections |= {flag for needed in NEEDED for flag in needed.flags}
    # Everything without a section of its own describes the model.
    lines += ["# The model, and how it is computed.", "MODEL_ARGS=("]
    for argument in arguments:
        if argument.flag not in in_sections:
            lines.append(_line(argument))
    lines += [")", ""]
    for section in sections:
        lines += [f"# {section.title}", f"{section.name}=(", *_body(section, known), ")", ""]
    # One command with all arrays, which `plan --model` reads as well.
    names = ["MODEL_ARGS", *(section.name for section in sections)]
    lines += [_TAIL.format(name=shlex.quote(name)), "torchrun --standalone --nproc-per-node 1 \\"]
    lines += ["    -m megatron_hetero.pretrain_gpt \\"]
    lines += [f'    "${{{array}[@]}}"' + (" \\" if array != names[-1] else "") for array in names]
    return "\n".join(lines) + "\n"


def _missing(known: dict[str, Argument]) -> tuple[Needed, ...]:
    """Return the needed flags that neither the source nor a default of the sections gives."""
    given = {flag: argument.words[1:] for flag, argument in known.items() if argument.words}
    for section in _SECTIONS:
        # Defaults of experts meet no need of every job.
        for default in () if section.of_experts else section.defaults:
            given.setdefault(default.split()[0], tuple(default.split()[1:]))
    return missing_flags(given)


def _unbalanced(known: dict[str, Argument]) -> tuple[Needed, ...]:
    """Return the weight of a balancing loss that the job names without one: Megatron starts, and
    balances nothing.  A bias on the choice (DeepSeek) balances without a loss."""
    kind = known.get("--moe-router-load-balancing-type")
    words = ("aux_loss",) if kind is None else (kind.words or ())
    is_balanced = "--moe-router-enable-expert-bias" in known or _COEFFICIENT.flags[0] in known
    has_loss = any(word.endswith("aux_loss") for word in words)
    return (_COEFFICIENT,) if has_loss and not is_balanced else ()


def _body(section: _ScriptSection, known: dict[str, Argument]) -> Iterator[str]:
    """Yield the lines of a section; a missing flag stands in its place as a comment."""
    defaults = {default.split()[0]: default for default in section.defaults}
    missing = {needed.flags[0]: needed for needed in (*_missing(known), *_unbalanced(known))}
    # What the source gives, what is missing, what only the source's shell knows, or the default.
    for flag, meaning in section.flags:
        argument = known.get(flag)
        if argument is not None and argument.words is not None:
            yield _line(argument, meaning)
        elif flag in missing:
            needed = missing[flag]
            yield f"    {MISSING} {needed.example}  # {needed.what}"
        elif argument is not None:
            # The source took it from its shell.
            yield _line(argument)
        elif flag in defaults and not _replaced(flag, known):
            yield _commented(f"    {defaults[flag]}", meaning)


def _replaced(flag: str, known: dict[str, Argument]) -> bool:
    """Tell if the source gives another flag for the same need."""
    others = next((needed.flags for needed in NEEDED if flag in needed.flags), ())
    return any(other in known for other in others)


def _line(argument: Argument, meaning: str = "") -> str:
    # The value came from a variable that the source's shell has.
    if argument.words is None:
        where = _one_line(argument.where)
        examples = {flag: needed.example for needed in NEEDED for flag in needed.flags[:1]}
        example = examples.get(argument.flag, f"{argument.flag} VALUE")
        return f"    {MISSING} {example}  # {where} takes it from its shell"
    return _commented(f"    {shlex.join(argument.words)}", meaning or _help(argument.flag))


def _help(flag: str) -> str:
    """Return Megatron's help for a flag; "" if it is too long for a comment."""
    known = flag_table().by_name.get(flag)
    text = _one_line(known.help).rstrip(".") if known is not None else ""
    return text if len(text) <= 60 else ""


def _commented(line: str, meaning: str) -> str:
    return f"{line:<44}  # {meaning}" if meaning else line


def _one_line(text: str) -> str:
    """Return a text on a single line, without characters that could end a comment."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
