"""The command line of a tool that prints a page of `docs/` from code."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def write_or_check(page: Path, text: Callable[[], str], tool: str, description: str) -> int:
    """Write the page; with --check, say whether it is up to date.

    Args:
        tool: file name of the tool, for the message.
    Returns:
        The exit code: 1 if --check finds the page out of date.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if parser.parse_args().check:
        if page.read_text() == text():
            return 0
        print(f"{page} is out of date; run python tools/{tool}")
        return 1
    page.write_text(text())
    return 0
