"""Seeds under settings that are not the job's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.placement import Recompute
from megatron_hetero.model.spec import Workload
from megatron_hetero.planner.columns.strategy import Columns
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.seeds.settings import chosen_settings, search_under
from megatron_hetero.planner.seeds.symmetric import Symmetric
from tests.cost.builders import AS_GIVEN, FAST, FREE, SLOW, make_cluster, make_workload

FLAGS: tuple[tuple[int, Recompute], ...] = ((1, "none"), (4, "none"), (2, "full"))


def job(size: int, recompute: Recompute) -> Workload:
    return make_workload(
        num_layers=12, global_batch_size=16, micro_batch_size=size, recompute=recompute
    )


def mixed(memory_bytes: int = 16 << 30) -> Cluster:
    fast, slow = (replace(gpu, memory_bytes=memory_bytes) for gpu in (FAST, SLOW))
    return make_cluster(("a", fast, 2), ("b", slow, 2), ("c", slow, 2), limits=FREE)


@pytest.mark.parametrize("memory_bytes", [16 << 30, 300 << 20])
def test_bundles_do_not_depend_on_the_flags_that_a_plan_may_change(memory_bytes: int) -> None:
    found = []
    for flags in FLAGS:
        board = Scoreboard(make_problem(mixed(memory_bytes), job(*flags)))
        Columns().search(board)
        kept = (*board.ranking_of_all, *board.out_of_memory.fastest)
        # Launch counts of the rule go with what follows the flags alone.
        plain = {c.structure: c.step_time_s for c in kept if not c.has_counts}
        assert {r.micro_batch_size or flags[0] for c in kept for r in c.placement.replicas} == {1}
        found.append(plain)
    assert found[0]
    for other in found[1:]:
        assert other == pytest.approx(found[0])


def test_settings_that_are_held_stay() -> None:
    for flags in FLAGS:
        held = make_problem(replace(mixed(), limits=AS_GIVEN), job(*flags))
        assert chosen_settings(held, "none") == flags
        assert chosen_settings(make_problem(mixed(), job(*flags)), "none") == (1, "none")


def test_what_an_interrupted_search_found_is_kept() -> None:
    board = Scoreboard(make_problem(mixed(), job(4, "none")))

    def interrupted(part: Scoreboard) -> None:
        Symmetric().search(part)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search_under(board, (1, "full"), "symmetric", interrupted)
    assert board.best is not None
    assert {s.recompute for r in board.best.placement.replicas for s in r.stages} == {"full"}
