"""Treatment of a job's flags in `verify`, which compares a small model on CPUs with a single
process.

The first entry of `verification.json` that names a flag decides. A flag that no entry names follows
from its status on an asymmetric plan (`OF_STATUS`); for a status without such a rule (flags that a
plan follows), a test demands an entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.flags.support.kinds import Entry, Status, Treatment
from megatron_hetero.flags.support.lookup import support_of
from megatron_hetero.flags.support.tables import verification_table
from megatron_hetero.model.flag_table import Flag, Option

OF_STATUS: dict[Status, Entry] = {
    "the plan's": Entry("kept by the plan", (), "the plan says it"),
    "refused": Entry("refused", (), "verify cannot train such a job"),
    "elsewhere": Entry("no effect", (), "another kind of job, or a feature that is not used"),
}
FP8 = "fp8 products with a scale for each tensor"
"""Note of flags that are kept only where the layers and the small model's sizes have them."""


@dataclass(frozen=True)
class Treated:
    """Options of a job with their treatments, in the order given."""

    options: tuple[tuple[Option, Entry], ...]

    def of(self, *treatments: Treatment) -> tuple[Option, ...]:
        """Return the options with one of some treatments."""
        return tuple(option for option, entry in self.options if entry.treatment in treatments)


@cache
def treatments_of(flag: Flag) -> tuple[Entry, ...]:
    """Return the entries that decide about a flag: those of some values, then the general one.

    Raises:
        LookupError: no entry names the flag, and its status on a plan implies none.
    """
    found = []
    for entry in verification_table():
        if any(fnmatchcase(name, pattern) for pattern in entry.names for name in flag.names):
            found.append(entry)
            # An entry for all values ends the search.
            if not entry.values:
                return tuple(found)
    # Without a general entry the flag's status in the runtime decides.
    status = support_of(flag).status
    if status not in OF_STATUS:
        raise LookupError(f"{flag.names[0]} is in no entry of verification.json")
    return (*found, OF_STATUS[status])


def treat(options: Sequence[Option]) -> Treated:
    """Assign to each option of a job its treatment in `verify`.

    Raises:
        UnsupportedError: some options cannot be compared; the message names all of them.
    """
    treated = tuple((option, _entry_of(option)) for option in options)
    refused = [
        f"{option}: {entry.note}"
        for option, entry in treated
        # A refused flag with Megatron's default value changes nothing.
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
