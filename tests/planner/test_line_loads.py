"""No line is asked for more than it carries: the bytes of printed plans, counted here by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.limits import CHOICES
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.files import canonical_json
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner import plan_cluster
from megatron_hetero.schedule.simulator.shared_paths import queued
from megatron_hetero.schedule.simulator.step import simulate_plan
from megatron_hetero.schedule.stock import is_stock
from tests.cost.builders import make_workload

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GIGABIT = 125_000_000


@dataclass
class Described:
    """A cluster file as data; what shares what is told from it alone."""

    sites: dict[str, list[tuple[str, str, int]]]
    """Of each site its nodes: name, GPU, number."""
    gigabits: int
    shared: str = "pair"
    site_uplinks: dict[str, int] = field(default_factory=dict)
    node_uplinks: dict[str, int] = field(default_factory=dict)

    def load(self, folder: Path) -> Cluster:
        nodes = [
            {"name": name, "gpu": gpu, "count": count, "site": site}
            | ({"uplink": f"{self.node_uplinks[name]} Gb/s"} if name in self.node_uplinks else {})
            for site, own in self.sites.items()
            for name, gpu, count in own
        ]
        inside = {"bandwidth": "20 GB/s", "latency": "10 us"}
        data = {
            "version": 1,
            "nodes": nodes,
            "sites": {s: {"uplink": f"{u} Gb/s"} for s, u in self.site_uplinks.items()},
            "links": {
                "inside_node": {"RTX-4090": inside, "RTX-3090": inside},
                "between_nodes": {"bandwidth": "25 Gb/s", "latency": "30 us"},
                "between_sites": [
                    {
                        "sites": list(self.sites),
                        "bandwidth": f"{self.gigabits} Gb/s",
                        "latency": "5 ms",
                        "shared": self.shared,
                    }
                ],
            },
        }
        path = folder / "cluster.yaml"
        path.write_text(canonical_json(data))  # JSON is YAML
        return load_cluster(path)

    def site_of(self, node: str) -> str:
        return next(site for site, own in self.sites.items() if node in [name for name, *_ in own])

    def lines(self, here: str, there: str) -> dict[str, float]:
        """Names and bytes a second of what a byte between two nodes shares with others."""
        one, other = self.site_of(here), self.site_of(there)
        found: dict[str, float] = {}
        if here in self.node_uplinks:
            found[f"uplink of {here} out"] = self.node_uplinks[here] * GIGABIT
        if there in self.node_uplinks:
            found[f"uplink of {there} in"] = self.node_uplinks[there] * GIGABIT
        if one == other:
            return found
        if one in self.site_uplinks:
            found[f"uplink of site {one} out"] = self.site_uplinks[one] * GIGABIT
        if other in self.site_uplinks:
            found[f"uplink of site {other} in"] = self.site_uplinks[other] * GIGABIT
        order = list(self.sites)
        way = "forth" if order.index(one) < order.index(other) else "back"
        if self.shared == "pair":
            found[f"line {one} -> {other}"] = self.gigabits * GIGABIT
        elif self.shared == "all":
            found[f"backbone {', '.join(order)} ({way})"] = self.gigabits * GIGABIT
        return found


def node_of(device: str) -> str:
    return device.rpartition(":")[0]


def boundary_bytes(plan: Plan, workload: Workload) -> Counter[tuple[str, str]]:
    """Bytes of a step between each two nodes: an activation there and its gradient back for every
    micro-batch; stock Megatron's ranks each send all of it."""
    found: Counter[tuple[str, str]] = Counter()
    model, training = workload.model, workload.training
    for replica in plan.replicas:
        size = replica.shape.micro_batch_size or training.micro_batch_size
        message = 2 * model.seq_length * size * model.hidden_size
        nodes = [node_of(stage.devices[0]) for stage in replica.stages]
        widths = [len(stage.devices) for stage in replica.stages]
        for i in range(len(nodes) - 1):
            if nodes[i] != nodes[i + 1]:
                there = back = replica.shape.num_micro_batches * message
                if is_stock(plan) and not training.sequence_parallel:
                    there, back = there * widths[i], back * widths[i + 1]
                found[nodes[i], nodes[i + 1]] += there
                found[nodes[i + 1], nodes[i]] += back
    return found


def gradient_bytes(
    plan: Plan, workload: Workload, described: Described
) -> Counter[tuple[str, str]]:
    """Bytes of the all-reduce, 4 for an element, in rings by site, node and GPU: of n holders each
    hands (n - 1) / n of a layer to the next, twice."""
    model = workload.model
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    # Queries, keys, values and output; two products of the MLP; biases; two norms.
    layer = 4 * hidden * hidden + 2 * hidden * ffn + 5 * hidden + ffn + 4 * hidden
    owners: dict[int, list[str]] = {}
    for replica in plan.replicas:
        number = 0
        for stage in replica.stages:
            for _ in range(stage.shape.num_layers):
                owners.setdefault(number, []).append(stage.devices[0])
                number += 1
    found: Counter[tuple[str, str]] = Counter()

    def ring(holders: list[str], num_params: float) -> None:
        def place(device: str) -> tuple[str, str, int]:
            return described.site_of(node_of(device)), node_of(device), int(device.split(":")[1])

        order = sorted(set(holders), key=place)
        each = 2 * (len(order) - 1) / len(order) * 4 * num_params
        for one, other in zip(order, order[1:] + order[:1], strict=True):
            if node_of(one) != node_of(other):
                found[node_of(one), node_of(other)] += each  # type: ignore[assignment]

    positions = model.max_position_embeddings * hidden  # exchanged with the first layer
    for number, holders in owners.items():
        ring(holders, layer + (0 if number else positions))
    widths = {len(stage.devices) for replica in plan.replicas for stage in replica.stages}
    rows = 128 * lcm(*widths)
    words = -(-model.vocab_size // rows) * rows * hidden
    first = [replica.stages[0].devices[0] for replica in plan.replicas]
    last = [replica.stages[-1].devices[0] for replica in plan.replicas]
    if model.tied_embeddings:
        ring(first + last, words)
    else:
        ring(first, words)
        ring(last, words)
    return found


def check_loads(plan: Plan, cluster: Cluster, described: Described, step_s: float) -> Counter[str]:
    """Bytes on each line; none is taken for longer than the step."""
    assert plan.workload is not None
    carried = boundary_bytes(plan, plan.workload)
    if not plan.workload.training.use_distributed_optimizer:
        carried.update(gradient_bytes(plan, plan.workload, described))
    total: Counter[str] = Counter()
    speeds: dict[str, float] = {}
    for (here, there), num_bytes in carried.items():
        assert num_bytes / cluster.node_links[here, there].bytes_per_s <= step_s * (1 + 1e-9)
        for name, bytes_per_s in described.lines(here, there).items():
            total[name] += num_bytes
            speeds[name] = bytes_per_s
    for name, num_bytes in total.items():
        assert num_bytes / speeds[name] <= step_s * (1 + 1e-9), name
    return total


@st.composite
def described(draw: st.DrawFn) -> Described:
    names = ["east", "west", "north"][: draw(st.integers(2, 3))]
    gpus = st.sampled_from(["RTX-4090", "RTX-3090"])
    sites = {
        site: [(f"{site[0]}{i}", draw(gpus), draw(st.integers(1, 2))) for i in range(num)]
        for site in names
        for num in [draw(st.integers(1, 2))]
    }
    nodes = [name for own in sites.values() for name, *_ in own]
    uplinks = st.sampled_from([1, 4, 16])
    return Described(
        sites,
        draw(st.sampled_from([1, 3, 10])),
        draw(st.sampled_from(["pair", "pair", "all", "none"])),
        draw(st.dictionaries(st.sampled_from(names), uplinks, max_size=2)),
        draw(st.dictionaries(st.sampled_from(nodes), uplinks, max_size=2)),
    )


@st.composite
def jobs(draw: st.DrawFn) -> Workload:
    """Long sequences and few layers, so that boundaries load the lines."""
    return make_workload(
        draw(st.integers(4, 8)), 1024, draw(st.sampled_from([8, 16, 24])),
        seq_length=2048, max_position_embeddings=2048, tied_embeddings=draw(st.booleans()),
        use_distributed_optimizer=draw(st.sampled_from([False, False, True])),
    )  # fmt: skip


@st.composite
def placed(draw: st.DrawFn, cluster: Cluster, workload: Workload) -> Plan:
    """One to three replicas of one to four stages of one GPU, anywhere."""
    free = draw(st.permutations([device.name for device in cluster.devices]))
    layouts, names = [], []
    left, num_layers = len(free), workload.model.num_layers
    for _ in range(draw(st.integers(1, min(3, left)))):
        depth = draw(st.integers(1, min(4, left))) if left else 0
        if depth:
            left -= depth
            cuts = sorted(draw(st.permutations(range(1, num_layers)))[: depth - 1])
            sizes = [b - a for a, b in zip([0, *cuts], [*cuts, num_layers], strict=True)]
            layouts.append(",".join(f"tp1:{n}" for n in sizes) + f" @{draw(st.integers(1, 6))}")
            names.append([free.pop() for _ in range(depth)])
    total = sum(int(layout.partition("@")[2]) for layout in layouts)
    training = replace(workload.training, global_batch_size=total)
    plan = plan_from_layout(parse_layout(" | ".join(layouts)), replace(workload, training=training))
    return on(plan, names)


def on(plan: Plan, names: Sequence[Sequence[str]]) -> Plan:
    """The plan, of stages of one GPU, on these GPUs: [replica][stage]."""
    replicas = []
    for replica, own in zip(plan.replicas, names, strict=True):
        stages = zip(replica.stages, own, strict=True)
        placed_stages = tuple(replace(stage, devices=(name,)) for stage, name in stages)
        replicas.append(replace(replica, stages=placed_stages))
    return replace(plan, replicas=tuple(replicas))


@settings(max_examples=40, deadline=None)
@given(described(), jobs(), st.data())
def test_no_line_is_taken_for_longer_than_the_step(
    tmp_path_factory: pytest.TempPathFactory,
    found: Described,
    workload: Workload,
    data: st.DataObject,
) -> None:
    """Priced quickly, with queues, and simulated whole; the simulation carries what we count."""
    cluster = found.load(tmp_path_factory.mktemp("cluster"))
    plan = data.draw(placed(cluster, workload))
    assert plan.workload is not None
    costs, placement = CostModel(cluster, plan.workload), placement_of(plan, cluster)
    cost = costs.placement(placement)
    quick_s, simulated = cost.step_time_s, simulate_plan(plan, cluster)
    total = check_loads(plan, cluster, found, quick_s)
    check_loads(plan, cluster, found, queued(costs, placement, cost).step_time_s)
    check_loads(plan, cluster, found, simulated.step_time_s)
    if not workload.training.use_distributed_optimizer:
        carried = {link.name: link.num_bytes for link in simulated.links}
        for name, num_bytes in total.items():
            assert carried[name] == pytest.approx(num_bytes, rel=0.01), name


@settings(max_examples=4, deadline=None)
@given(described(), jobs())
def test_nor_of_a_plan_that_the_planner_prints(
    tmp_path_factory: pytest.TempPathFactory, found: Described, workload: Workload
) -> None:
    cluster = found.load(tmp_path_factory.mktemp("cluster"))
    cluster = replace(cluster, limits=replace(cluster.limits, as_given=CHOICES))
    plan = plan_cluster(cluster, workload)
    assert plan.estimates is not None
    check_loads(plan, cluster, found, plan.estimates.step_time_s)


TWO = {
    "east": [("e0", "RTX-4090", 1), ("e1", "RTX-4090", 1)],
    "west": [("w0", "RTX-4090", 1), ("w1", "RTX-4090", 1)],
}


def test_a_line_is_not_counted_for_every_pair_of_nodes(tmp_path: Path) -> None:
    """Two pipelines, each from a node of its own to another of its own: one line, not two."""
    workload = make_workload(
        4, 1024, 32, seq_length=2048, max_position_embeddings=2048, tied_embeddings=False
    )
    plan = plan_from_layout(parse_layout("tp1:2,tp1:2 @16 | tp1:2,tp1:2 @16"), workload)
    plan = on(plan, [("e0:0", "w0:0"), ("e1:0", "w1:0")])
    crossed_s = 32 * 2 * 2048 * 1024 / GIGABIT
    busy, pipelines = {}, {}
    for shared in ("none", "pair"):
        found = Described(TWO, 1, shared)
        cluster = found.load(tmp_path)
        cost = CostModel(cluster, workload).placement(placement_of(plan, cluster))
        run = simulate_plan(plan, cluster, is_stock=False)
        busy[shared] = cost.card_s
        pipelines[shared] = run.pipelines_s
    assert busy["pair"] == pytest.approx(crossed_s)
    assert busy["none"] == pytest.approx(busy["pair"] / 2)
    # The line takes longer than all else of the pipelines, where it is one.
    assert pipelines["none"] < busy["pair"] < pipelines["pair"]


BUDGET = Described(
    {
        "east": [("a100-0", "", 4), ("a100-1", "", 4)],
        "west": [("rtx-0", "", 4), ("rtx-1", "", 4)],
    },
    5,
)
TWO_SITES = Described(
    {
        "north": [("north-0", "", 4), ("north-1", "", 4)],
        "south": [("south-0", "", 4), ("south-1", "", 4)],
    },
    10,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "model", "found"),
    [("budget", "gpt-1.3b.flags", BUDGET), ("two-sites", "gpt-2.7b.flags", TWO_SITES)],
)
def test_no_line_of_an_example_is(folder: str, model: str, found: Described) -> None:
    cluster = load_cluster(EXAMPLES / folder / "cluster.yaml")
    plan = plan_cluster(cluster, load_workload(EXAMPLES / folder / model))
    assert plan.estimates is not None
    check_loads(plan, cluster, found, plan.estimates.step_time_s)
