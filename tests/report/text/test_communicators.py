"""The line of `explain` about communicators."""

from __future__ import annotations

import io

from rich.console import Console

from megatron_hetero.cost.sync.communicators import by_rank
from megatron_hetero.report.text.communicators import communicator_lines
from tests.runtime.workloads import plan, workload


def printed(layout: str) -> str:
    asked = plan(layout)
    stream = io.StringIO()
    console = Console(file=stream, width=400, color_system=None, markup=False)
    for line in communicator_lines(asked, by_rank(asked, workload())):
        console.print(line)
    return stream.getvalue()


def test_the_rank_in_most_is_named_with_its_uses() -> None:
    """Ranks 0 and 1 hold half of layers 0 to 2, and of the embedding, with the other two ranks."""
    said = printed("tp2:3,tp1:1 @4 | tp1:4 @2")
    assert said.startswith("Communicators  up to 8 (rank 3: ")
    assert "the whole job, losses, 6 x gradients" in said
    assert "147 MiB of buffers" in said


def test_one_process_has_none() -> None:
    assert printed("tp1:4 @4") == ""
