"""Files of a launch folder in which a script has kept the number of its job or process."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_hetero.errors import UsageError
from megatron_hetero.files import read_text

_NOT_STARTED = "was the job started by `bash start.sh`?"


def kept_number(path: Path, pattern: re.Pattern[str]) -> str:
    """Return the first group of `pattern` in a one-line file.

    Raises:
        UsageError: the file is missing, or holds something else.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such file; {_NOT_STARTED}")
    # The number becomes a word of a command, so that its form is checked.
    text = read_text(path).strip()
    found = pattern.fullmatch(text)
    if found is None:
        raise UsageError(
            f"{path}:1: {text[:40]!r} is no number of a job or process; {_NOT_STARTED}"
        )
    return found[1]
