"""Where replicas of a shape go: counted without visiting nodes, as if each was put one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.planner.problem import Chain, Unit, make_problem
from megatron_hetero.planner.shapes.kinds import kinds_of
from tests.cost.builders import FAST, make_cluster, make_workload
from tools.referees.search.shape_layout import Shape, ShapeLayouts


def layouts(sizes: list[tuple[int, int]]) -> ShapeLayouts:
    """Kinds of (nodes, GPUs on each)."""
    nodes = [
        (f"n{kind}-{i:02}", FAST, num_gpus)
        for kind, (num_nodes, num_gpus) in enumerate(sizes)
        for i in range(num_nodes)
    ]
    job = make_workload(num_layers=8, global_batch_size=64)
    problem = make_problem(make_cluster(*nodes), job)
    return ShapeLayouts(problem, kinds_of(problem))


def one_by_one(found: ShapeLayouts, shape: Shape, count: int, by_stage: bool) -> list[Chain] | None:
    """Each unit to the first node with room."""
    free = {n.name: list(found.problem.gpus[n.name]) for k in found.kinds for n in k.nodes}
    chains: dict[tuple[int, int], Unit] = {}
    places = [(r, s) for r in range(count) for s in range(len(shape))]
    for r, s in sorted(places, key=lambda place: place[::-1]) if by_stage else places:
        kind, width = shape[s]
        fitting = [n.name for n in found.kinds[kind].nodes if len(free[n.name]) >= width]
        if not fitting:
            return None
        chains[r, s] = Unit(fitting[0], tuple(free[fitting[0]][:width]))
        del free[fitting[0]][:width]
    return [tuple(chains[r, s] for s in range(len(shape))) for r in range(count)]


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 4, 6, 8])),
        min_size=1, max_size=2, unique_by=lambda size: size[1],
    ),
    st.data(),
)  # fmt: skip
def test_units_go_to_the_first_node_with_room(
    sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    found = layouts(sizes)
    stage = st.integers(0, len(found.kinds) - 1).flatmap(
        lambda kind: st.tuples(st.just(kind), st.sampled_from(found.kinds[kind].widths))
    )
    shape = tuple(data.draw(st.lists(stage, min_size=1, max_size=4)))
    for by_stage in (True, False):
        fits = {count: one_by_one(found, shape, count, by_stage) for count in range(1, 12)}
        for count, chains in fits.items():
            assert found.has_room(shape, count, by_stage) == (chains is not None)
            assert found.chains(shape, count, by_stage) == (chains or [])
            if by_stage:
                assert found.first_chain(shape, count) == (chains[0] if chains else ())
        most = found.most(shape, by_stage)
        if most:
            assert found.has_room(shape, most, by_stage)
        if most < 11 and sum(num_nodes * gpus for num_nodes, gpus in sizes) < 8:
            assert all(fits[count] is None for count in range(most + 1, 12))
