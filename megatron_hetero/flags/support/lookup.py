"""Treatment of a Megatron flag on an asymmetric plan.

The first entry of `support.json` that names a flag, by itself or by a pattern, decides. Every flag
has to be named by an entry, so that no flag of a new Megatron release is overlooked. The runtime
(`runtime.job.checks.support`) refuses all entries with the status `refused`, and followed flags in
part (with some values, or beside others; `IN_PART` of its test lists these); tests compare the two.
`docs/megatron-flags.md` is printed from the table. A plan that stock Megatron can express runs
there, with all flags.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache

from megatron_hetero.flags.support.kinds import Status, Support
from megatron_hetero.flags.support.tables import support_table
from megatron_hetero.model.flag_table import Flag, Option, flag_table, last_of_each
from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.stock import is_stock


@cache
def support_of(flag: Flag) -> Support:
    """Return the entry that decides about a flag.

    Raises:
        LookupError: no entry names it.
    """
    for entry in support_table():
        if any(_names(pattern, name) for pattern in entry.names for name in flag.names):
            return entry
    raise LookupError(f"{flag.names[0]} is in no entry of support.json")


def _names(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) if "*" in pattern else name == pattern


def refused_by_presence(given: Sequence[Option]) -> tuple[Option, ...]:
    """Return the options that no asymmetric plan can follow, whatever the value."""
    return tuple(option for option in given if support_of(option.flag).by_presence)


def refused_options(plan: Plan) -> tuple[Option, ...]:
    """Return the options of the plan's job that the runtime refuses before the start.

    The result is empty where stock Megatron runs the plan. Options that repeat Megatron's default
    are never refused.

    Raises:
        UsageError: Megatron would not read the job's flags.
    """
    if plan.workload is None or is_stock(plan):
        return ()
    return refused_among(plan.workload.megatron_args)


def refused_among(megatron: Sequence[str]) -> tuple[Option, ...]:
    """Return the options of a command line that the runtime refuses on any asymmetric plan.

    Raises:
        UsageError: Megatron would not read the flags.
    """
    table = flag_table()
    # Longest name -> the last occurrence.
    given = {o.flag.names[0]: o for o in last_of_each(table.split(megatron))}
    for entry in support_table():
        # The flag's default holds where it is not given, and may be refused beside another flag.
        if entry.followed and entry.asked_by in given:
            for name in entry.names:
                flag = table.by_name[name]
                given.setdefault(name, Option(flag, name, (str(flag.default),)))
    return tuple(option for option in given.values() if _is_refused(option, given))


def _is_refused(option: Option, given: Collection[str]) -> bool:
    entry = support_of(option.flag)
    if entry.status != "refused" or (entry.asked_by and entry.asked_by not in given):
        return False
    # Any value is refused; else only values that the runtime does not follow.
    if entry.by_presence:
        return True
    followed = entry.followed or (str(option.flag.default),)
    return not (option.values and set(option.values) <= set(followed))


def without_effect(given: Sequence[Option]) -> Iterator[tuple[Option, str]]:
    """Yield the options that change nothing on an asymmetric plan, each with the reason."""
    for option in given:
        entry = support_of(option.flag)
        if entry.status == "no effect":
            yield option, entry.note


def named_flags(status: Status) -> Iterator[Flag]:
    """Yield all flags of a status, in the order of the table."""
    return (flag for flag in flag_table().flags if support_of(flag).status == status)
