"""New weights that travel during the first forward passes (`--overlap-param-gather`)."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.bounds.estimate import workload_of
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.plan.plan import LayerRange, Plan
from megatron_hetero.schedule.estimate import plan_cost
from megatron_hetero.schedule.of_plan import with_schedule
from megatron_hetero.schedule.orders.interleaved import interleaved
from megatron_hetero.schedule.parts import Collective, FirstUse
from megatron_hetero.schedule.simulator.gathers import Gathers
from megatron_hetero.schedule.simulator.step import StepSimulation, simulate_plan
from tests.schedule.simulator.test_step import placed, three_nodes

BIG = {"hidden_size": 2048, "num_layers": 8, "tied_embeddings": False}
DIVIDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
LINKS = [Link(bytes_per_s, 1e-5) for bytes_per_s in (2e8, 4e9, 1e11)]
FOUR = "tp1:2,tp1:2,tp1:2,tp1:2 @8 | tp1:2,tp1:2,tp1:2,tp1:2 @8"
IN_FOUR = [f"b:{i}" for i in range(4)], [f"c:{i}" for i in range(4)]


def both(plan: Plan, link: Link, *, is_stock: bool) -> tuple[StepSimulation, StepSimulation]:
    """The step in which new weights are waited for, and the one in which they travel meanwhile."""
    job = workload_of(plan)
    hidden = replace(job, training=replace(job.training, overlap_param_gather=True))
    cluster = three_nodes(link)
    waits = simulate_plan(plan, cluster, job, is_stock=is_stock)
    return waits, simulate_plan(plan, cluster, hidden, is_stock=is_stock)


def first_forward_s(found: StepSimulation, replica: int, stage: int) -> float:
    spans = found.stages[replica][stage].operations
    return min(span.start_s for span in spans if span.kind == "forward")


TWO = Collective("one", ((0, 0),), (("a", 2.0),), needed={(0, 0): FirstUse(0, 0.0)})
THREE = Collective("other", ((0, 0),), (("a", 3.0),), needed={(0, 0): FirstUse(0, 1.0)})


@pytest.mark.parametrize("lazily", [False, True])
def test_a_pass_begins_when_each_layer_will_find_its_weights(lazily: bool) -> None:
    """The second gather ends 5 s after the first one starts, and is needed 1 s into the pass."""
    gathers = Gathers([TWO, THREE], {(0, 0): 0.0}, lazily=lazily)
    assert gathers.begin_s((0, 0), 0, 0.0) == 4.0
    assert [(start_s, end_s) for _, start_s, end_s in gathers.spans] == [(0.0, 2.0), (2.0, 5.0)]
    assert gathers.paths.busy_s == {"a": 5.0}
    # Later passes have them.
    assert gathers.begin_s((0, 0), 0, 6.0) == 6.0


def test_only_gathers_that_start_with_the_step_hide_behind_earlier_stages() -> None:
    for lazily, begin_s in ((False, 10.0), (True, 14.0)):
        gathers = Gathers([TWO, THREE], {(0, 0): 0.0}, lazily=lazily)
        assert gathers.begin_s((0, 0), 0, 10.0) == begin_s


@pytest.mark.parametrize("link", LINKS)
def test_replicas_of_one_stage_wait_for_what_their_passes_do_not_hide(link: Link) -> None:
    plan = placed("tp1:8 @4 | tp1:8 @4", ["b:0"], ["c:0"], **{**BIG, **DIVIDED})
    for is_stock in (False, True):
        waits, found = both(plan, link, is_stock=is_stock)
        stall_s = first_forward_s(found, 0, 0)
        assert found.step_time_s == pytest.approx(
            waits.step_time_s - waits.weight_sync_s + stall_s
        )
        forward_s = next(o for o in found.timelines[0].operations if o.kind == "forward")
        hidden_s = waits.weight_sync_s - stall_s
        # A pass hides what it computes before the last bucket at most.
        assert 0 < hidden_s <= forward_s.end_s - forward_s.start_s
        assert not found.weight_sync_s


@pytest.mark.parametrize("link", LINKS)
def test_our_stages_gather_while_earlier_ones_compute_and_stock_megatrons_do_not(
    link: Link,
) -> None:
    plan = placed(FOUR, *IN_FOUR, **{**BIG, **DIVIDED})
    waits, ours = both(plan, link, is_stock=False)
    assert ours.step_time_s < waits.step_time_s
    waits, stock = both(plan, link, is_stock=True)
    # Behind the first stage each starts its one gather with its first pass: they add up.
    gathers = [span for span in stock.collectives if span[0].needed]
    own_s = {c.holders[0][1]: end_s - start_s for c, start_s, end_s in gathers}
    later_s = sum(own_s[stage] for stage in (1, 2, 3))
    stall_s = first_forward_s(stock, 0, 0)
    assert stock.pipelines_s - waits.pipelines_s == pytest.approx(later_s + stall_s)


def in_chunks() -> Plan:
    """Two replicas of two stages of two chunks of two layers, in Megatron's interleaved order."""
    devices = ["b:0", "c:0"], ["b:1", "c:1"]
    plan = placed("tp1:4,tp1:4 @4 | tp1:4,tp1:4 @4", *devices, **{**BIG, **DIVIDED})
    replicas = []
    for replica in plan.replicas:
        stages = []
        for s, stage in enumerate(replica.stages):
            chunks = LayerRange(2 * s, 2), LayerRange(4 + 2 * s, 2)
            stages.append(replace(stage, first_layer=2 * s, chunks=chunks))
        replicas.append(replace(replica, stages=tuple(stages)))
    plan = replace(plan, replicas=tuple(replicas))
    for r in range(2):
        plan = with_schedule(plan, r, interleaved((0, 1) * 2, 4), "interleaved")
    return plan


def test_interleaved_stages_of_stock_megatron_start_all_gathers_with_the_step() -> None:
    waits, found = both(in_chunks(), Link(1e9, 1e-5), is_stock=True)
    gathers = [(start_s, use) for c, start_s, _ in found.collectives for use in c.needed.values()]
    assert {use.chunk for _, use in gathers} == {0, 1}
    assert min(start_s for start_s, _ in gathers) == 0.0
    assert found.step_time_s < waits.step_time_s


@settings(max_examples=20, deadline=None)
@given(
    st.permutations(["b:0", "b:1", "c:0", "c:1", "a:0"]).map(lambda drawn: drawn[:3]),
    st.sampled_from(LINKS),
    st.booleans(),
)
def test_the_formula_hides_as_much_as_the_simulation(
    devices: list[str], link: Link, tied: bool
) -> None:
    """But for one bucket: the formula has buckets of one size."""
    layout = " | ".join(["tp1:8 @2"] * len(devices))
    sizes = {**BIG, **DIVIDED, "overlap_param_gather": True, "tied_embeddings": tied}
    plan = placed(layout, *[[device] for device in devices], **sizes)
    cluster = three_nodes(link)
    found = simulate_plan(plan, cluster, is_stock=False)
    placement, costs = placement_of(plan, cluster), CostModel(cluster, workload_of(plan))
    room_s = max(end_s - start_s for c, start_s, end_s in found.collectives if c.needed)
    gradients_s = max(end_s - start_s for c, start_s, end_s in found.collectives if not c.needed)
    formula_s = costs.placement(placement).step_time_s
    assert abs(formula_s - found.step_time_s) <= room_s + gradients_s


SCRIPT = """
import json, sys
sys.modules["transformer_engine"] = None
import torch, torch.distributed as dist
from megatron_hetero.runtime import backend
backend.activate_cpu_backend()
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
layers = torch.nn.Sequential(*[torch.nn.Linear(8, 8, bias=False) for _ in range(3)])
config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
divided = DistributedDataParallelConfig(
    overlap_grad_reduce=True, use_distributed_optimizer=True, overlap_param_gather=True,
    bucket_size=64,
)
model, events = DistributedDataParallel(config, divided, layers), []
for number, layer in enumerate(layers):
    group = model.param_to_bucket_group[layer.weight]
    def start(force_sync=False, number=number, real=group.start_param_sync):
        events.append(f"gather {number}")
        return real(force_sync)
    group.start_param_sync = start
    layer.register_forward_hook(lambda *given, number=number: events.append(f"layer {number}"))
model(torch.ones(2, 8))
print(json.dumps(events))
"""


def test_megatron_starts_a_gather_when_the_pass_comes_to_the_one_before(tmp_path: Path) -> None:
    """Without interleaved stages no gather starts before the first forward pass does."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "store")],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    order = ["gather 0", "gather 1", "layer 0", "gather 2", "layer 1", "layer 2"]
    assert json.loads(run.stdout.splitlines()[-1]) == order


@pytest.mark.parametrize("link", LINKS)
def test_the_price_of_a_plan_says_what_its_simulation_does(link: Link) -> None:
    """Of unlike replicas, which take turns on their path, and of chunks."""
    shape = {**BIG, **DIVIDED, "overlap_param_gather": True}
    unlike = placed("tp1:8 @4 | tp1:5,tp1:3 @4", ["a:0"], ["b:0", "c:0"], **shape)
    chunks = in_chunks()
    job = workload_of(chunks)
    hidden = replace(job, training=replace(job.training, overlap_param_gather=True))
    cluster = three_nodes(link)
    for plan, close in ((unlike, 0.03), (replace(chunks, workload=hidden), 1e-9)):
        cost = plan_cost(plan, CostModel(cluster, workload_of(plan)), placement_of(plan, cluster))
        found = simulate_plan(plan, cluster)
        assert cost.step_time_s == pytest.approx(found.step_time_s, rel=close)
