"""Parts of a script that are not read, because only a running shell knows them."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Unread:
    """Part of a script that only a running shell knows, missing in the plan.

    `name` is the flag or the environment variable whose value it is, a file or a setting that is
    left out, and empty for a word that may hold flags or nothing; `where` is file and line,
    `reason` the variable and what it depends on.
    """

    name: str
    where: str
    reason: str

    @property
    def may_change_model(self) -> bool:
        """Return whether the part may hold flags of the model or the training.

        A known flag without its value changes neither: the reader refuses one that does.
        """
        # A name in capitals is a variable for a library, which changes neither model nor training.
        is_setting = re.fullmatch("[A-Z][A-Z0-9_]*", self.name)
        return not self.name.startswith(("--", "recompute of ")) and not is_setting

    def __str__(self) -> str:
        if self.name:
            verb = "are" if "," in self.name else "is"
            return f"{self.where}: {self.name} {verb} left out: {self.reason}"
        return f"{self.where}: {self.reason}: the flags that it may hold are not in the plan"
