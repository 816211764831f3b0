"""Print `docs/megatron-flags.md` from `flags/support/table.py`.

python tools/make_flags_page.py            # rewrites the page
python tools/make_flags_page.py --check    # exit 1 if the page is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from megatron_hetero.flags.support.kinds import MEANING, NEUTRAL, Neutral, Status, Support
from megatron_hetero.flags.support.lookup import named_flags, support_of
from megatron_hetero.model.flag_table import flag_table

PAGE = Path(__file__).parents[1] / "docs" / "megatron-flags.md"


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
    yield from ("", "| flag | on an asymmetric plan | |", "| --- | --- | --- |")
    for flag in table.flags:
        support = support_of(flag)
        yield f"| `{flag.names[0]}` | {_status(support)} | {support.note} |"


def _status(support: Support) -> str:
    return support.status + (f": {support.neutral}" if support.neutral else "")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from printed_page import write_or_check

    raise SystemExit(write_or_check(PAGE, page, "make_flags_page.py", __doc__.splitlines()[0]))
