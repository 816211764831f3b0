"""Megatron's flags as data, so that argument vectors can be read and printed without torch.

`flag_table.json` is generated from the real parser by `tools/make_flag_table.py`; a test keeps
the two equal.  Splitting follows argparse with `allow_abbrev=False`, as Megatron calls it.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

from megatron_hetero.errors import UsageError

TABLE_PATH = Path(__file__).with_name("flag_table.json")

Scalar = str | int | float | bool | None

_NEGATIVE_NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")
"""Pattern of tokens that argparse takes for values although the tokens begin with '-'."""


@dataclass(frozen=True)
class Flag:
    """One flag of Megatron's parser.

    `action` is argparse's: "store" takes values (`nargs`: None for one, a number, "+" or "*"), the
    others none.  `type` is the name of the converter.  `default` is None if JSON cannot say it.
    """

    names: tuple[str, ...]
    dest: str
    action: Literal["store", "store_true", "store_false", "boolean"]
    nargs: int | str | None
    type: str | None
    choices: tuple[Scalar, ...] | None
    default: Scalar | tuple[Scalar, ...]
    help: str

    @property
    def bounds(self) -> tuple[int, int | None]:
        """Return the fewest and the most values; None for no upper bound."""
        if self.action != "store":
            return 0, 0
        if self.nargs is None:
            return 1, 1
        if isinstance(self.nargs, int):
            return self.nargs, self.nargs
        return (1 if self.nargs == "+" else 0), None


@dataclass(frozen=True)
class Option:
    """One occurrence of a flag in an argument vector."""

    flag: Flag
    name: str
    values: tuple[str, ...] = ()

    @property
    def tokens(self) -> tuple[str, ...]:
        """Return the option as arguments; a value that begins with '-' is joined: `--flag=-1`.

        Raises:
            UsageError: a list of several values has such a value; argparse could take it for a
                flag.
        """
        # Without a value that looks like a flag the words stand one by one, as people write them.
        if not any(value.startswith("-") for value in self.values):
            return (self.name, *self.values)
        if "--" in self.values:
            raise UsageError(
                f"{self}: argparse takes the value '--' for the end of all flags; write another."
            )
        if len(self.values) > 1:
            raise UsageError(
                f"{self}: a value that begins with '-' cannot stand in a list of values, where it "
                "reads like a flag; write it without the '-'."
            )
        return (f"{self.name}={self.values[0]}",)

    def __str__(self) -> str:
        return " ".join((self.name, *self.values))


@dataclass(frozen=True)
class FlagTable:
    """All flags of a release of megatron-core, in the order of declaration in its parser."""

    megatron_core_version: str
    flags: tuple[Flag, ...]

    @cached_property
    def by_name(self) -> dict[str, Flag]:
        return {name: flag for flag in self.flags for name in flag.names}

    def near(self, name: str) -> tuple[str, ...]:
        """Return up to three names that `name` may be a misspelling of, the nearest first."""
        return tuple(difflib.get_close_matches(name, self.by_name, n=3))

    def option(self, name: str, *values: str) -> Option:
        """Return the option of a known name and valid values.

        Raises:
            UsageError: the name is unknown (the message proposes similar ones), the number of
                values is wrong, or a value is not of the flag's type or not among its choices.
        """
        flag = self.by_name.get(name)
        if flag is None:
            near = self.near(name)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise UsageError(
                f"{name} is not a flag of Megatron {self.megatron_core_version}.{hint}"
            )
        fewest, most = flag.bounds
        if len(values) < fewest or (most is not None and len(values) > most):
            wanted = f"{fewest} or more" if most is None else str(most)
            raise UsageError(f"{name} takes {wanted} value(s), not {len(values)}.")
        for value in values:
            _check_value(flag, name, value)
        return Option(flag, name, values)

    def split(self, argv: Sequence[str]) -> tuple[Option, ...]:
        """Cut an argument vector into options.

        Raises:
            UsageError: Megatron's parser would refuse the vector.
        """
        options = []
        position = 0
        while position < len(argv):
            # `--flag=value` is one word for argparse, so the value may begin with '-'.
            name, joined, value = argv[position].partition("=")
            if not name.startswith("--"):
                raise UsageError(
                    f"{argv[position]!r} is not a flag; Megatron takes flags and their values only."
                )
            position += 1
            if joined:
                options.append(self.option(name, value))
                continue
            # Values up to the next flag, but no more than the flag takes.
            most = self.by_name[name].bounds[1] if name in self.by_name else 0
            start = position
            while (
                position < len(argv)
                and (most is None or position - start < most)
                and _is_value(argv[position])
            ):
                position += 1
            options.append(self.option(name, *argv[start:position]))
        return tuple(options)

    def known_part(self, argv: Sequence[str]) -> tuple[str, ...]:
        """Drop the flags unknown to Megatron, with their values, from `argv`.

        A script with flags of its own has such a command line; its own parser judges them.
        """
        kept: list[str] = []
        is_kept = False
        # A flag's values follow it, so all words up to the next flag share its fate.
        for token in argv:
            if not _is_value(token):
                is_kept = token.partition("=")[0] in self.by_name
            if is_kept:
                kept.append(token)
        return tuple(kept)


def last_of_each(options: Iterable[Option]) -> tuple[Option, ...]:
    """Drop the options that a later option overrides; as in argparse, the last wins."""
    kept: dict[str, Option] = {}
    # Names that set the same destination (`--x`, `--no-x`) override one another.
    for option in options:
        kept.pop(option.flag.dest, None)
        kept[option.flag.dest] = option
    return tuple(kept.values())


@lru_cache(maxsize=1)
def flag_table() -> FlagTable:
    """Return the committed table of the supported Megatron release."""
    # Our own file, read at every start: nobody needs the places of its values.
    data = json.loads(TABLE_PATH.read_text(encoding="utf-8"))
    return FlagTable(
        data["megatron_core_version"],
        tuple(
            Flag(
                names=tuple(flag["names"]),
                dest=flag["dest"],
                action=flag["action"],
                nargs=flag.get("nargs"),
                type=flag.get("type"),
                choices=tuple(flag["choices"]) if "choices" in flag else None,
                default=_frozen(flag.get("default")),
                help=flag["help"],
            )
            for flag in data["flags"]
        ),
    )


def _frozen(default: Scalar | list[Scalar]) -> Scalar | tuple[Scalar, ...]:
    return tuple(default) if isinstance(default, list) else default


def _is_value(token: str) -> bool:
    """Tell if argparse reads a token as a value rather than as a flag."""
    return not token.startswith("-") or token == "-" or bool(_NEGATIVE_NUMBER.match(token))


def _check_value(flag: Flag, name: str, value: str) -> None:
    converted: Scalar = value
    if flag.type in ("int", "float"):
        try:
            converted = int(value) if flag.type == "int" else float(value)
        except ValueError:
            raise UsageError(f"{name}: {value!r} is not of type {flag.type}.") from None
    if flag.choices is not None and converted not in flag.choices:
        raise UsageError(
            f"{name}: {value!r} is not among {', '.join(str(c) for c in flag.choices)}."
        )
