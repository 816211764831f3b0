"""Lines about a rehearsal while it runs."""

from __future__ import annotations

import os

from megatron_hetero.lab.rehearse.clock import now
from megatron_hetero.lab.rehearse.progress import State, StepProgress, progress_words


def test_words_follow_the_state() -> None:
    def words(state: State) -> str:
        return progress_words(state, num_ranks=5, num_steps=3, predicted_s=2.0, at_s=104.0)

    assert words(State(0, 0, 0.0, 0.0)) == "starting 5 processes"
    assert words(State(1, 0, 0.0, 100.0)).startswith("a free step of 5 processes")
    assert words(State(3, 0, 10.0, 100.0)) == (
        "step 1 of 3, 10 times slower than the cluster: about 56 s left"
    )
    assert words(State(5, 2, 10.0, 0.0)).endswith("about 0 s left"), "never less than none"


def test_a_rank_writes_what_its_parent_reads() -> None:
    progress = StepProgress()
    before = now()
    pid = os.fork()
    if pid == 0:
        progress.begin(4, 1, 2.5)
        os._exit(0)
    os.waitpid(pid, 0)
    found = progress.state()
    assert (found.num_begun, found.num_kept, found.scale) == (4, 1, 2.5)
    assert before <= found.since_s <= now()
