"""Typed reading of Megatron flags, with the place of every refusal."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from megatron_hetero.errors import ModelError, UnsupportedError
from megatron_hetero.model.arguments import COMMAND_LINE, Argument, JobText
from megatron_hetero.model.flag_table import flag_table
from megatron_hetero.model.shell.values import Word
from megatron_hetero.model.unread import Unread

# Counts and sizes fit into 32 bits; anything larger is a slip of the keyboard.
MAX_SIZE = 1 << 31


class FlagReader:
    """The flags of one job by name.

    Every method raises `ModelError` with file, line and flag when the value is not what Megatron
    takes, or is one that only a running shell would know.  `is_planned`: what cannot be planned is
    refused.
    """

    def __init__(self, job: JobText, is_planned: bool = True) -> None:
        self._job = job
        self._arguments = {a.flag: a for a in job.arguments}
        self._source = job.source
        self._is_planned = is_planned
        self._set_aside: list[Unread] = []
        # A flag takes one value at least, so only unknown words behind it may be flags.
        for argument in job.arguments:
            self._check_hidden_flags(argument.flag, (*argument.values[1:], *argument.holes))

    def __contains__(self, flag: str) -> bool:
        return flag in self._arguments

    def fail(self, flags: Sequence[str], message: str) -> NoReturn:
        """Raise `ModelError` at the first of `flags` that is there, else at the source."""
        for flag in flags:
            if flag in self._arguments:
                raise ModelError(f"{self._arguments[flag].where}: {message}")
        raise ModelError(f"{self._source}: {message}")

    def switch(self, flag: str) -> bool:
        """Return whether a flag without value is given."""
        argument = self._arguments.get(flag)
        if argument is None:
            return False
        self._check_certain(argument)
        self._check_hidden_flags(flag, argument.values)
        # Unknown words behind a switch are taken for empty (`Argument.holes`).
        known = [v for v in argument.values if v.text is not None]
        if known:
            self.fail([flag], f'{flag} takes no value, and "{known[0].text}" follows it')
        return True

    def text(self, flag: str, default: str, allowed: Sequence[str]) -> str:
        """Read one of `allowed`."""
        value = self._value(flag)
        if value is not None and value not in allowed:
            self.fail([flag], f'{flag} is "{value}"; allowed: {", ".join(allowed)}')
        return default if value is None else value

    def words(self, flag: str) -> tuple[str, ...] | None:
        """Read all values of a flag that takes several."""
        argument = self._arguments.get(flag)
        if argument is None:
            return None
        self._check_certain(argument)
        for value in argument.values:
            if value.text is None or value.reason:
                self._fail_unknown(argument, value.reason)
        return tuple(v.text for v in argument.values if v.text is not None)

    def known_text(self, flag: str) -> str | None:
        """Read the one value of a flag; None where it is not given, or only a running shell knows
        it."""
        argument = self._arguments.get(flag)
        words = None if argument is None or argument.reason else argument.words
        return words[1] if words is not None and len(words) == 2 else None

    def optional_size(self, flag: str, minimum: int = 1) -> int | None:
        """Read an integer of at least `minimum`; None when the flag is not given."""
        value = self._value(flag)
        if value is None:
            return None
        # Megatron reads it with int(): no decimal point, no exponent, but 22_000_000.
        if not re.fullmatch(r"[-+]?[0-9]+(_[0-9]+)*", value) or len(value) > 20:
            self.fail([flag], f'{flag} is "{value}"; it must be a whole number')
        number = int(value)
        if not minimum <= number < MAX_SIZE:
            self.fail([flag], f"{flag} is {number}; it must be at least {minimum}, below 2^31")
        return number

    def size(self, flag: str, default: int, minimum: int = 1) -> int:
        """Read an integer of at least `minimum`."""
        value = self.optional_size(flag, minimum)
        return default if value is None else value

    def fraction(self, flag: str, default: float) -> float:
        """Read a probability: 0 or more, below 1."""
        value = self._value(flag)
        if value is None:
            return default
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0 <= number < 1:
            self.fail([flag], f'{flag} is "{value}"; it must be a number from 0 to below 1')
        return number

    def require(self, flags: Sequence[str], reasons: Mapping[str, str]) -> None:
        """Refuse a job without some of `flags`, all of them at once.

        A flag that Megatron does not know and that reads like one of its own is named first.

        Args:
            reasons: why a flag is needed, where that is not plain.
        """
        missing = [flag for flag in flags if flag not in self]
        if not missing:
            return
        # A misspelt flag is the likeliest reason that one is missing.
        for flag in self._arguments:
            near = flag_table().near(flag)
            if flag not in flag_table().by_name and near:
                self.fail([flag], f"{flag} is no flag of Megatron; did you mean {near[0]}?")
        names = [f"{f} ({reasons[f]})" if f in reasons else f for f in missing]
        what = " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
        verb, them = ("are", "them") if names[1:] else ("is", "it")
        # The remedy depends on where flags can be added.
        if self._source == COMMAND_LINE:
            remedy = f"add {them}"
        elif self._job.takes_flags:
            remedy = f"add {them} there, or on our command line"
        else:
            remedy = f"a config.json has no such key: give {them} on our command line"
        words = " ".join(f"{flag} N" for flag in missing)
        # Parts of the script that are not known may hold the flag, and the user is told where.
        holes = [part for part in self.unread() if not part.name]
        may_hold = "".join(f"\n{part.where}: {part.reason}, and may hold {them}" for part in holes)
        self.fail([], f"{what} {verb} missing; {remedy}: -- {words}{may_hold}")

    def required_size(self, flag: str) -> int:
        """Read an integer of a flag that `require` has seen."""
        value = self.optional_size(flag)
        if value is None:
            self.fail([], f"{flag} is missing")
        return value

    def refuse(self, flag: str, what: str) -> None:
        """Raise `UnsupportedError` when `flag` is given, and the job is planned."""
        argument = self._arguments.get(flag)
        if not self._is_planned or argument is None:
            return
        raise UnsupportedError(
            f"{argument.where}: {flag}: {what} is not supported yet; remove the flag"
        )

    def set_aside(self, flag: str, what: str, reason: str) -> None:
        """Remember what the plan does otherwise than a flag of the job says."""
        if self._is_planned:
            self._set_aside.append(Unread(what, self._arguments[flag].where, reason))

    def replace(self, flag: str, value: str) -> None:
        """Give a flag the value that the plan starts from."""
        if self._is_planned:
            argument = self._arguments[flag]
            word = Word(value, argument.where)
            self._arguments[flag] = replace(argument, values=(word,))

    def say_instead(self, flag: str, flags: Mapping[str, Sequence[str]]) -> None:
        """Let other flags, with these values, say what a flag of the job says."""
        if self._is_planned:
            where = self._arguments.pop(flag).where
            for name, values in flags.items():
                words = tuple(Word(value, where) for value in values)
                self._arguments[name] = Argument(name, words, where)

    def kept(self) -> tuple[str, ...]:
        """Return every known argument, in the form that Megatron gets."""
        return tuple(word for a in self._arguments.values() for word in a.words or ())

    def unread(self) -> tuple[Unread, ...]:
        """Return what only running the script would tell, each once."""
        hidden = (u for a in self._arguments.values() for u in a.unread)
        found = (*self._job.unread, *hidden, *self._set_aside)
        return tuple(dict.fromkeys(found))

    def _value(self, flag: str) -> str | None:
        argument = self._arguments.get(flag)
        if argument is None:
            return None
        self._check_certain(argument)
        # The first word counts even if it is unknown; unknown words behind it are taken for empty.
        known = [v for v in argument.values if v.text is not None or v is argument.values[0]]
        if not known or (len(known) == 1 and known[0].text == ""):
            self.fail([flag], f"{flag} has no value")
        if known[0].text is None or known[0].reason:
            self._fail_unknown(argument, known[0].reason)
        if len(known) > 1:
            self.fail([flag], f'{flag} takes one value, and "{known[1].text}" follows it')
        return known[0].text

    def _check_certain(self, argument: Argument) -> None:
        if argument.reason:
            self._fail_unknown(argument, argument.reason)

    def _check_hidden_flags(self, flag: str, surplus: Sequence[Word]) -> None:
        """Refuse a variable set under a condition that may hold any flags."""
        for word in surplus:
            if word.text is None and word.is_conditional:
                self.fail(
                    [flag],
                    f"the flags in the variable after {flag} cannot be known without running the "
                    f"script: {word.reason}; write the flags that you use into a file of flags",
                )

    def _fail_unknown(self, argument: Argument, reason: str) -> NoReturn:
        self.fail(
            [argument.flag],
            f"{argument.flag} cannot be known without running the script: {reason}; give it on our "
            f"command line, after --: -- {argument.flag} VALUE; or say what the script is started "
            'with: --model "run.sh ARGUMENT", --model-env NAME=VALUE',
        )
