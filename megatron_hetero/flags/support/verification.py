"""What becomes of a job's flags where `verify` trains it small, on CPUs, beside one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.flags.support.lookup import support_of
from megatron_hetero.flags.support.verification_table import OF_STATUS, TABLE, Entry, Treatment
from megatron_hetero.flags.table import Flag, Option


@dataclass(frozen=True)
class Treated:
    """A job's options by what becomes of them, in the order in which they were given."""

    options: tuple[tuple[Option, Entry], ...]

    def of(self, *treatments: Treatment) -> tuple[Option, ...]:
        """The options of some treatments."""
        return tuple(option for option, entry in self.options if entry.treatment in treatments)


@cache
def treatments_of(flag: Flag) -> tuple[Entry, ...]:
    """The entries that decide about a flag: those of some values, and the one of all others.

    Raises:
        LookupError: no entry names it, and `support_table` leaves it open.
    """
    found = []
    for entry in TABLE:
        names = entry.names.split()
        if any(fnmatchcase(name, pattern) for pattern in names for name in flag.names):
            found.append(entry)
            if not entry.values:
                return tuple(found)
    status = support_of(flag).status
    if status not in OF_STATUS:
        raise LookupError(f"{flag.names[0]} is in no entry of verification_table.TABLE")
    return (*found, OF_STATUS[status])


def treat(options: Sequence[Option]) -> Treated:
    """What `verify` does with a job's options.

    Raises:
        UnsupportedError: names every option of a job that cannot be compared.
    """
    treated = tuple((option, _entry_of(option)) for option in options)
    refused = [
        f"{option}: {entry.note}"
        for option, entry in treated
        if entry.treatment == "refused" and option.values != (str(option.flag.default),)
    ]
    if refused:
        heading = "These flags cannot be verified; leave them out to compare the rest:"
        raise UnsupportedError("\n  ".join([heading, *refused]))
    return Treated(treated)


def _entry_of(option: Option) -> Entry:
    return next(
        entry
        for entry in treatments_of(option.flag)
        if not entry.values or set(option.values) <= set(entry.values)
    )
