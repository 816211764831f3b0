"""A rank's published state, and the cause named by an error of the training thread."""

from __future__ import annotations

import os
import re
import sys
import traceback
from dataclasses import dataclass

import torch.distributed as dist

from megatron_hetero.runtime.faults import unfinished
from megatron_hetero.runtime.faults.progress import Phase

# Words of gloo, NCCL and torch's stores about a connection that is gone.
_LOST_CONNECTION = re.compile(
    r"gloo|nccl|connection (was )?(reset|closed|refused|lost)|broken pipe|socket|tcpstore|"
    r"timed out|process group|remote peer",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Beat:
    """What a rank published: the `number` of the publication and where its training thread is.

    `age_s`: seconds since its stamp.  `waits`: it is in a call that waits for others.
    """

    number: int
    step: int
    phase: Phase
    age_s: float
    waits: bool
    line: str

    def text(self) -> str:
        """The form in the store."""
        fields = (self.number, self.step, self.phase.value, f"{self.age_s:.1f}", int(self.waits))
        return "\t".join([*map(str, fields), self.line])

    @staticmethod
    def of(text: str) -> Beat:
        """A beat from the store."""
        number, step, phase, age, waits, line = text.split("\t", 5)
        return Beat(int(number), int(step), Phase(phase), float(age), waits == "1", line)


def where(thread: int | None) -> tuple[bool, str]:
    """Return whether a thread is in a wait of torch's, and the thread's line of code."""
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        return False, "-"
    # A wait shows in the innermost calls: torch's own, or our `wait_for`.
    stack = traceback.extract_stack(frame)
    waits = any(
        "torch/distributed" in entry.filename or entry.filename == unfinished.__file__
        for entry in stack[-3:]
    )
    others = ("torch/", unfinished.__file__)
    # People are told the nearest line outside of torch.
    own = next((e for e in reversed(stack) if not any(o in e.filename for o in others)), stack[-1])
    return waits, f"{os.path.basename(own.filename)}:{own.lineno} ({own.name})"


def is_lost_connection(error: BaseException) -> bool:
    """Tell if an error, or a cause of the error, is a lost connection."""
    # Errors may be chained in a circle, which `seen` ends.
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen:
        if isinstance(at, dist.DistError) or (
            isinstance(at, RuntimeError | OSError) and _LOST_CONNECTION.search(str(at))
        ):
            return True
        seen.append(at)
        at = at.__cause__ or at.__context__
    return False
