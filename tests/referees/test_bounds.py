"""The lower bound under the referees' prices: below every plan, and near the best."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.bounds.chains.kinds import gpu_classes
from megatron_hetero.bounds.effort import QUICK
from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.model.spec import Workload
from tests.planner.naive import best_step_time_s
from tests.referees.test_costs import placements, small_case
from tools.bench.search.planners import CASES
from tools.referees.cases import load_case
from tools.referees.hexiscale import Hexiscale, Shape
from tools.referees.hexiscale_costs import HexiscaleCosts
from tools.referees.sailor import Sailor
from tools.referees.sailor_costs import SailorCosts
from tools.referees.waiting.bound import referee_bound
from tools.referees.waiting.rules import HasFillRules, Room


def shrunk(costs: CostModel, nodes: tuple[Node, ...], **training: int) -> tuple[Cluster, Workload]:
    """Other machines, another batch."""
    links = {(a.name, b.name): a.link for a in nodes for b in nodes if a.name != b.name}
    cluster = Cluster(nodes, links, Limits(memory_reserve_bytes=0))
    workload = replace(costs.workload, training=replace(costs.workload.training, **training))
    return cluster, workload


@st.composite
def machines(draw: st.DrawFn, known: tuple[Node, ...], max_gpus: int) -> tuple[Node, ...]:
    """One to three machines of known types, together at most `max_gpus` GPUs."""
    made: list[Node] = []
    for index in range(draw(st.integers(1, 3))):
        left = max_gpus - sum(node.num_gpus for node in made)
        if left:
            node = draw(st.sampled_from(known))
            made.append(replace(node, name=f"n{index}", num_gpus=draw(st.integers(1, left))))
    return tuple(made)


@st.composite
def hexiscale_jobs(draw: st.DrawFn) -> HexiscaleCosts:
    """A few layers of HexiScale's on a few GPUs: over some networks the exchange rules, over
    others the boundaries."""
    question = small_case("hexiscale").questions[0]
    costs = question.make_costs(question.cluster, question.workload, None)
    known = question.cluster.nodes
    cluster, workload = shrunk(
        costs,
        draw(machines(known, 4)),
        global_batch_size=draw(st.integers(1, 5)),
    )
    num_layers = draw(st.integers(1, 4))
    workload = replace(workload, model=replace(workload.model, num_layers=num_layers))
    between = draw(st.sampled_from([0.02, 0.5, 5.0, 500.0])) * 1024**3
    hidden = draw(st.sampled_from([512, 4096, 16384]))
    return HexiscaleCosts(cluster, workload, Hexiscale(Shape(hidden, num_layers), between))


def check_hexiscale(data: st.DataObject) -> None:
    """Against every plan."""
    costs = data.draw(hexiscale_jobs())
    best_s = best_step_time_s(costs.cluster, costs.workload, costs)
    bound_s = referee_bound(costs, effort=QUICK).step_time_s
    if best_s is not None:
        assert bound_s <= best_s * (1 + 1e-9)


def check_sailor(data: st.DataObject) -> None:
    """Against every plan."""
    question = small_case("sailor").questions[0]
    costs = question.make_costs(question.cluster, question.workload, None)
    cluster, workload = shrunk(
        costs,
        data.draw(machines(question.cluster.nodes, 3)),
        global_batch_size=data.draw(st.integers(1, 4)),
    )
    assert isinstance(costs, SailorCosts)
    costs = SailorCosts(cluster, workload, Sailor("OPT-350", 1))
    best_s = best_step_time_s(cluster, workload, costs)
    bound_s = referee_bound(costs, effort=QUICK).step_time_s
    if best_s is not None:
        assert bound_s <= best_s * (1 + 1e-9)


CHECKS = {"hexiscale": check_hexiscale, "sailor": check_sailor}


@pytest.mark.parametrize("referee", CHECKS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_no_plan_is_below_the_bound(referee: str, data: st.DataObject) -> None:
    CHECKS[referee](data)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("referee", CHECKS)
@settings(max_examples=1000, deadline=None)
@given(data=st.data())
def test_no_plan_of_many_is_below_the_bound(referee: str, data: st.DataObject) -> None:
    CHECKS[referee](data)


@pytest.mark.parametrize("referee", ["hexiscale", "sailor"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_a_replica_takes_at_least(referee: str, data: st.DataObject) -> None:
    """The form of `FillRules` on random plans, replica by replica."""
    case = small_case(referee)
    question = data.draw(st.sampled_from(case.questions))
    costs = question.make_costs(question.cluster, question.workload, None)
    assert isinstance(costs, HasFillRules)
    rules = costs.fill_rules()
    nodes = {node.name: node.num_gpus for node in costs.cluster.nodes}
    placement = data.draw(placements(nodes, costs.workload.model.num_layers))
    step_s = question.score(placement).step_s
    replicas = placement.replicas
    of_class = {node.name: c.nodes for c in gpu_classes(costs) for node in c.nodes}
    most = max(replica.num_micro_batches for replica in replicas)
    all_gpus = [sum(stage.width for stage in replica.stages) for replica in replicas]
    alike = len({tuple(s.num_layers for s in replica.stages) for replica in replicas}) == 1
    room = Room(len(replicas), sum(all_gpus), min(all_gpus), inf, 0.0)
    apart_s = rules.apart_exchange_s(room)
    for replica in replicas:
        rest = len(replica.stages) - 1
        count = most if rules.counts_alike else replica.num_micro_batches
        loads_s = [0.0] * (rest + 1)
        for s in range(rest):
            ends = [(of_class[g.devices[0].node], g.width) for g in replica.stages[s : s + 2]]
            before_s, behind_s = rules.boundary_s(*ends[0], *ends[1], s + 1 == rest)
            loads_s[s] += before_s
            loads_s[s + 1] += behind_s
        fill_s = slowest_s = 0.0
        for s, stage in enumerate(replica.stages):
            node = costs.cluster.node_by_name[stage.devices[0].node]
            pieces = costs.pieces(node, stage.width, costs.workload.model.vocab_size)
            own_s = pieces.stage(stage.num_layers, s == 0, s == rest).total_s + loads_s[s]
            owned = of_class[node.name], stage.width
            fill_s += own_s + stage.num_layers * rules.layer_exchange_s(*owned, len(replicas))
            exchange_s = 0.0
            if alike or apart_s is None:
                exchange_s = rules.stage_exchange_s(
                    *owned, stage.num_layers, s == 0, s == rest, len(replicas)
                )
            slowest_s = max(slowest_s, (count - 1) * own_s + exchange_s)
        extra_s = 0.0 if alike or apart_s is None else apart_s
        assert fill_s + slowest_s + extra_s <= step_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("case", "question", "score_s", "gap"),
    [("sailor-a100-032", 2, 7.71, 0.01), ("sailor-s01", 3, 24.72, 0.03)],
)
def test_the_bound_is_near_the_best_plan(
    case: str, question: int, score_s: float, gap: float
) -> None:
    asked = load_case(CASES / f"{case}.yaml").questions[question]
    costs = asked.make_costs(asked.cluster, asked.workload, None)
    bound_s = referee_bound(costs, 1.01 * score_s, QUICK).step_time_s
    assert bound_s <= score_s < (1 + gap) * bound_s
