"""Choice of the command that starts training, among all commands of a script."""

from __future__ import annotations

import os.path
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.model.flag_table import flag_table
from megatron_hetero.model.shell.held import Started
from megatron_hetero.model.shell.values import Word
from megatron_hetero.model.unread import Unread

_ENDS = frozenset({"&&", "||", ";", "|", "|&", "&", ">", ">>", "2>&1", "&>"})
_OF_MODELS = frozenset({"--num-layers", "--hidden-size", "--num-attention-heads"})
_LAUNCHERS = re.compile(r"torchrun|python[\d.]*|deepspeed|accelerate|srun|mpirun|mpiexec")
_FEWEST_FLAGS = 3
_TRAINING = re.compile(r"pretrain|train_gpt")
_NO_GPT = re.compile(
    r"(?:pretrain|train|finetune)_(?:bert|t5|ict|mamba|hybrid|retro|vision|vlm|mimo|rl)(?![a-z0-9])"
    r"|run_(?:\w+_)?text_generation|run_inference_performance|report_theoretical_memory"
)
"""Programs of Megatron-LM that train no GPT, train a GPT by another loop, or train nothing."""


@dataclass(frozen=True)
class Launch:
    """Words behind the training script of a command, and the certainty of the choice: rank 0 is the
    surest, and `program` the script or module, "" where it is not known."""

    words: tuple[Word, ...]
    rank: int
    command: Started
    program: str = ""

    def check_model(self) -> None:
        """Refuse a program that trains another model.

        Raises:
            UnsupportedError: its name says so.
        """
        if _NO_GPT.match(self.program):
            raise UnsupportedError(
                f"{self.command.where}: {self.program} does not train a GPT as pretrain_gpt.py "
                "does, and no other model is planned; if yours does, write its flags into a file"
            )


def training_command(started: Sequence[Started]) -> tuple[Launch | None, tuple[Unread, ...]]:
    """Return the last command that starts training, and a note for each rival command.

    It names a `pretrain*.py` or `-m ...pretrain...`; else it has flags of a model; else it is any
    Python script with flags.
    """
    launches = [found for command in started if (found := _launch(command)) is not None]
    if not launches:
        return None, ()
    # Only commands of the surest kind compete; of these, one that runs for certain.
    best = min(launch.rank for launch in launches)
    candidates = [launch for launch in launches if launch.rank == best]
    certain = [launch for launch in candidates if not launch.command.reason]
    chosen = (certain or candidates)[-1]
    # A command with the same words gives the same job, and needs no note.
    notes = tuple(
        Unread(
            "",
            launch.command.where,
            f"another command that starts training has other flags; {chosen.command.where} is read",
        )
        for launch in candidates
        if _texts(launch) != _texts(chosen)
    )
    return chosen, tuple(dict.fromkeys(notes))


def _texts(launch: Launch) -> list[str | None]:
    return [word.text for word in launch.words]


def _launch(command: Started) -> Launch | None:
    words = list(command.words)
    # Words behind `&&` or `>` in one string of code belong to another command, or to none.
    for i, word in enumerate(words):
        if word.text in _ENDS and word.is_known and i:
            words = words[:i]
            break
    # The first Python program with flags behind it: launchers such as torchrun stand before it.
    for i in range(len(words)):
        name = _program(words, i)
        if name is None:
            continue
        rest = tuple(words[i + 1 :])
        if not any(w.is_flag for w in rest):
            continue
        if _TRAINING.match(name):
            return Launch(rest, 0, command, name)
        return Launch(rest, 1 if _has_model(rest) else 3, command, name)
    return _by_flags(command, words)


def _program(words: Sequence[Word], i: int) -> str | None:
    """Return the name of the Python program that a word is; None where it is none."""
    word = words[i]
    # A path such as `$ROOT/pretrain_gpt.py` is known by its last part.
    seen = word.text or (word.parts[-1].text if word.parts else None)
    if seen is None:
        return None
    if seen.endswith(".py"):
        return os.path.basename(seen)
    # `python -m package.pretrain_gpt`, but not the launcher `-m torch.distributed.run`.
    if i and words[i - 1].text == "-m" and not seen.startswith("torch.distributed"):
        return seen.rpartition(".")[2]
    return None


def _has_model(words: Sequence[Word]) -> bool:
    return any((w.text or "").partition("=")[0] in _OF_MODELS for w in words)


def _by_flags(command: Started, words: Sequence[Word]) -> Launch | None:
    """Read a command with an unknown program by its Megatron flags."""
    # Flags of the words by place, an empty text for what is no flag.
    names = [(word.text or "").partition("=")[0] if word.is_flag else "" for word in words]
    known = [i for i, name in enumerate(names) if name in flag_table().by_name]
    # The program may be a variable: a launcher, or several flags of Megatron, give it away.
    is_launcher = any(_LAUNCHERS.fullmatch(os.path.basename(w.text or "")) for w in words)
    is_hidden = words[0].text is None and len(known) >= _FEWEST_FLAGS
    if not known or not (is_hidden or (is_launcher and _has_model(words))):
        return None
    # Unknown words just before the first flag may hold flags, too.
    start = known[0]
    while start > 1 and words[start - 1].text is None:
        start -= 1
    return Launch(tuple(words[start:]), 2, command)
