"""The exchange of gradients during the last backward passes, and of weights after the update."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.parameters import layer_params, whole_layer_params
from megatron_hetero.cost.share import even_share
from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.parts import ChunkTimes, Collective, Final, Pipeline, Run
from megatron_hetero.schedule.programme import Operation, Schedule, build_schedule
from megatron_hetero.schedule.simulator.engine import run_step
from megatron_hetero.schedule.simulator.step import StepSimulation, simulate_plan
from tests.schedule.simulator.test_step import placed, three_nodes

SLOW = Link(2e8, 1e-4)
BIG = {"hidden_size": 2048, "num_layers": 8, "tied_embeddings": False}


def unlike_replicas(**changes: object) -> Plan:
    return placed("tp1:8 @4 | tp1:5,tp1:3 @4", ["a:0"], ["b:0", "c:0"], **{**BIG, **changes})


def simulated(plan: Plan, **options: bool) -> StepSimulation:
    return simulate_plan(plan, three_nodes(SLOW), **options)


def without_room(cluster: Cluster) -> Cluster:
    """The same nodes, of whose memory an exchange has nothing."""
    nodes = [
        replace(node, gpu_type=replace(node.gpu_type, memory_bytes=1)) for node in cluster.nodes
    ]
    return replace(cluster, nodes=tuple(nodes))


def test_an_overlapped_exchange_begins_within_the_last_backward_pass_of_first_stages() -> None:
    plain, found = (simulated(unlike_replicas(overlap_grad_reduce=on)) for on in (False, True))
    assert found.pipelines_s == plain.pipelines_s
    assert found.step_time_s < plain.step_time_s
    begins = [start_s for _, start_s, _ in found.collectives]
    assert min(begins) < found.pipelines_s <= max(end_s for *_, end_s in found.collectives)
    for collective, start_s, _ in found.collectives:
        for holder in collective.holders:
            stage = found.stages[holder[0]][holder[1]]
            last = max((o for o in stage.operations if o.kind == "backward"), key=lambda o: o.end_s)
            if holder[1] == 0:
                assert start_s > last.start_s
            else:
                assert start_s >= last.end_s
    assert {c.holders for c, *_ in found.collectives} == {c.holders for c, *_ in plain.collectives}
    # The embedding's gradient is complete with the pass itself.
    assert begins[-1] >= min(found.stages[r][0].compute_end_s for r in (0, 1))


def test_a_divided_optimizer_reduces_to_owners_and_gathers_new_weights() -> None:
    plain, found = (
        simulated(unlike_replicas(use_distributed_optimizer=on)) for on in (False, True)
    )
    num_gradients = len(found.collectives) // 2
    gradients, weights = found.collectives[:num_gradients], found.collectives[num_gradients:]
    updated_s = max(o.end_s for s in found.timelines for o in s.operations if o.kind == "step")
    assert all(end_s <= updated_s for *_, end_s in gradients)
    assert found.weight_sync_s > 0
    assert found.step_time_s == max(end_s for *_, end_s in weights)
    for phase in (gradients, weights):
        begins_early = [start_s < phase[i][2] for i, (_, start_s, _) in enumerate(phase[2:])]
        assert any(begins_early), "there is room for more than two buckets"
    tight = simulate_plan(
        unlike_replicas(use_distributed_optimizer=True), without_room(three_nodes(SLOW))
    ).collectives
    assert len(tight) == 2 * num_gradients
    for phase in (tight[:num_gradients], tight[num_gradients:]):
        for i, (_, start_s, _) in enumerate(phase[2:]):
            assert start_s >= phase[i][2] - 1e-12, "two buckets are under way at a time"
    # Every pair of holders swaps half of each buffer, in fp32; the weights come back in bf16.
    # A ring of two moves the same bytes as that.
    moved = sum(sum(c.hop_bytes) for c, *_ in plain.collectives)
    assert sum(sum(c.hop_bytes) for c, *_ in gradients) == pytest.approx(moved / 2)
    assert sum(sum(c.hop_bytes) for c, *_ in weights) == pytest.approx(moved / 4)


def test_an_owner_of_more_receives_more() -> None:
    plan = unlike_replicas(use_distributed_optimizer=True)
    first = replace(plan.replicas[0].stages[0], optimizer_share=3)
    plan = replace(plan, replicas=(replace(plan.replicas[0], stages=(first,)), *plan.replicas[1:]))
    (collective, *_), *_ = simulated(plan).collectives
    carried = dict(zip((path for path, _ in collective.hops), collective.hop_bytes, strict=True))
    assert carried["c -> a"] == pytest.approx(3 * carried["a -> c"])


def test_each_set_of_ranks_has_buckets_of_its_own_and_waits_for_small_ones() -> None:
    """Two pairs of ranks share the wire between a and b; what all four hold whole waits for both
    pairs, and is one of two buckets under way meanwhile, where there is no room for more."""
    plan = placed(
        "tp2:8 @4 | tp1:4,tp2:4 @4",
        ["a:0", "a:1"],
        ["c:0", "b:0", "b:1"],
        **{**BIG, "use_distributed_optimizer": True},
    )
    collectives = simulate_plan(plan, without_room(three_nodes(SLOW))).collectives
    deep = [(c, begin, end) for c, begin, end in collectives if c.holders == ((0, 0), (1, 1))]
    gradients = [entry for entry in deep if entry[0].name.startswith("gradients")]
    *pairs, last = sorted(gradients, key=lambda entry: len(entry[0].ranks))
    assert {tuple(c.places.values()) for c, *_ in pairs} == {((0,), (0,)), ((1,), (1,))}
    assert last[0].ranks == [((0, 0), 0), ((0, 0), 1), ((1, 1), 0), ((1, 1), 1)]
    assert last[2] >= max(end for *_, end in pairs)
    for rank in last[0].ranks:
        own = [(begin, end) for c, begin, end in collectives if rank in c.ranks]
        for at_s in (begin for begin, _ in own):
            assert sum(begin <= at_s < end for begin, end in own) <= 2
    # Of a pair each sends half; of the four each sends every other one a quarter.
    moved = sum(c.hop_bytes[list(dict(c.hops)).index("a -> b")] for c, *_ in gradients)
    model = plan.workload.model  # type: ignore[union-attr]
    whole = 4 * whole_layer_params(model)
    in_pairs = 4 * layer_params(model, even_share(model, 1)) + 1024 * model.hidden_size - whole
    assert moved == pytest.approx(4 * (in_pairs / 2 + whole))


def test_stock_megatron_divides_only_overlapping_first_stages_into_buckets() -> None:
    changes = {**BIG, "use_distributed_optimizer": True, "num_layers": 16}
    layout = "tp1:8,tp1:8 @4 | tp1:8,tp1:8 @4"
    devices = ["a:0", "b:0"], ["a:1", "b:1"]

    def of(**more: object) -> StepSimulation:
        return simulated(placed(layout, *devices, **{**changes, **more}), is_stock=True)

    plain, found = of(), of(overlap_grad_reduce=True)
    holders = [c.holders for c, *_ in plain.collectives]
    first, last = ((0, 0), (1, 0)), ((0, 1), (1, 1))
    assert sorted(holders) == [first, first, last, last], "gradients and weights of each stage"
    counted = [c.holders for c, *_ in found.collectives]
    assert counted.count(last) == 2
    layer = 12 * 2048**2
    num_buckets = -(-8 * layer // 41_943_040)  # matrices of a fourth of a layer or more
    assert num_buckets - 2 <= counted.count(first) / 2 <= num_buckets + 1
    assert found.step_time_s < plain.step_time_s


def one_stage(num_micro_batches: int) -> Schedule:
    order = [
        Operation(kind, k) for k in range(num_micro_batches) for kind in ("forward", "backward")
    ]
    return build_schedule([order], num_micro_batches)


def run(*collectives: Collective, backward_s: tuple[float, float] = (2.0, 4.0)) -> Run:
    """Two replicas of one stage: forward 1 s, backward of two or of four."""
    pipelines = [Pipeline(one_stage(1), ((ChunkTimes(1.0, s),),), (), ()) for s in backward_s]
    return run_step(pipelines, collectives)


def test_a_holder_comes_to_its_collectives_in_order_and_no_earlier_than_its_gradients() -> None:
    holders = (0, 0), (1, 0)
    early = {(0, 0): Final(0, 1.5), (1, 0): Final(0, 3.0)}  # at 1.5 s and 2.0 s
    a = Collective("a", holders, (("wire", 1.0),), final=early)
    b = Collective("b", holders, (("wire", 1.0),), 0.25, final={h: Final() for h in holders})
    found = run(a, b)
    assert [(c.name, start, end) for c, start, end in found.collectives] == [
        ("a", 2.0, 3.0),
        ("b", 5.0, 6.25),
    ]
    assert [o.end_s for o in found.operations[0, 0] if o.kind == "backward"] == [3.0]
    assert found.end_s == 6.25


@pytest.mark.parametrize(
    ("taken", "begins"),
    [(0.0, [5, 5, 5]), (1 / 3, [5, 5, 5]), (0.5, [5, 5, 6]), (1.0, [5, 6, 7])],
)
def test_no_more_than_there_is_room_for_are_under_way(taken: float, begins: list[float]) -> None:
    holders = (0, 0), (1, 0)
    buffers = dict.fromkeys(holders, taken)
    wires = [Collective(str(i), holders, ((f"wire {i}", 1.0),), buffers=buffers) for i in range(3)]
    assert [start_s for _, start_s, _ in run(*wires).collectives] == begins


def test_weights_follow_each_holders_update() -> None:
    pipelines = [Pipeline(one_stage(1), ((ChunkTimes(1.0, 1.0),),), (), ()) for _ in range(2)]
    weights = Collective("weights", ((0, 0), (1, 0)), (("wire", 1.0),))
    found = run_step(pipelines, (), [[1.0], [3.0]], [weights])
    assert [(start, end) for _, start, end in found.collectives] == [(5.0, 6.0)]
    assert [o.kind for o in found.operations[0, 0]][-1] == "weight_sync"
    assert found.end_s == 6.0


def test_a_packed_all_reduce_waits_for_room_and_one_in_place_does_not() -> None:
    """A single GPU packs the buckets of both ranks of its other replica's group."""
    wide, narrow = (["a:0", "a:1"], ["b:0"]), (["a:0"], ["b:0"])
    for layout, devices, limited in (
        ("tp2:8 @4 | tp1:8 @4", wide, True),
        ("tp1:8 @4 | tp1:8 @4", narrow, False),
    ):
        plan = placed(layout, *devices, **BIG)
        far = three_nodes(Link(2e9, 0.5))
        free, tight = (simulate_plan(plan, c, is_stock=False) for c in (far, without_room(far)))
        gained_s = tight.step_time_s - free.step_time_s
        assert (gained_s > 0.5) if limited else gained_s == pytest.approx(0.0)
