"""Print `docs/megatron-flags.md` from `flags/support/support.json`.

python tools/make_flags_page.py            # rewrites the page
python tools/make_flags_page.py --check    # exit 1 if the page is out of date
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from megatron_hetero.flags.support.kinds import MEANING, NEUTRAL, Neutral, Status, Support
from megatron_hetero.flags.support.lookup import named_flags, support_of
from megatron_hetero.model.flag_table import flag_table

PAGE = Path(__file__).parents[1] / "docs" / "megatron-flags.md"
COUNTED = Path(__file__).parents[1] / "benchmarks" / "flags-refused-at-3614b8f.json"
"""The flags that the tables of that commit refuse."""
FOLLOWED: tuple[Status, ...] = ("proved", "passed on", "the plan's")


def page() -> str:
    """Write the page as Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    table = flag_table()
    yield "# Megatron's flags on an asymmetric plan"
    yield ""
    yield (
        f"All {len(table.flags)} flags of megatron-core {table.megatron_core_version}. A plan that "
        "stock Megatron can express is handed to it with all flags; this page is about the others. "
        "Printed by `tools/make_flags_page.py`."
    )
    yield from ("", "| | flags | |", "| --- | ---: | --- |")
    for status in get_args(Status):
        yield f"| {status} | {len(list(named_flags(status)))} | {MEANING[status]} |"
    yield from ("", "| passed on | flags | |", "| --- | ---: | --- |")
    for neutral in get_args(Neutral):
        number = sum(support_of(flag).neutral == neutral for flag in table.flags)
        yield f"| {neutral} | {number} | {NEUTRAL[neutral]} |"
    yield from _since_the_first_count()
    yield from ("", "| flag | on an asymmetric plan | |", "| --- | --- | --- |")
    for flag in table.flags:
        support = support_of(flag)
        yield f"| `{flag.names[0]}` | {_status(support)} | {support.note} |"


def _since_the_first_count() -> Iterator[str]:
    """Yield what became of the flags that an early commit refused."""
    counted = json.loads(COUNTED.read_text())
    table = flag_table().by_name
    of_status: dict[str, list[str]] = {}
    for name in counted["flags"]:
        of_status.setdefault(support_of(table[name]).status, []).append(f"`{name}`")
    total = len(counted["flags"])
    followed = [name for status in FOLLOWED for name in of_status.get(status, [])]
    yield ""
    yield (
        f"Of the {total} flags that commit {counted['commit']} refused, {len(followed)} are "
        f"followed now: {', '.join(followed)}."
    )


def _status(support: Support) -> str:
    return support.status + (f": {support.neutral}" if support.neutral else "")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from printed_page import write_or_check

    raise SystemExit(write_or_check(PAGE, page, "make_flags_page.py", __doc__.splitlines()[0]))
