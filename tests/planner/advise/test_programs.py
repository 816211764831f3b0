"""Programs beside what the stages of a plan do."""

from __future__ import annotations

from random import Random

import pytest

from megatron_hetero.cluster.spec import GpuType, Link
from megatron_hetero.cost.model import CostModel
from megatron_hetero.errors import UsageError
from megatron_hetero.planner.advise.programs import plan_programs
from megatron_hetero.planner.completion.stage_options import StagePlace
from megatron_hetero.planner.moves.group_shares import GroupShares
from megatron_hetero.planner.synthesis.costed import LayerGroup
from megatron_hetero.planner.synthesis.synthesise import layer_options
from tests.cost.builders import FAST, GIB, SLOW, make_cluster, make_workload, place

CLUSTER = make_cluster(("a", FAST, 2), ("b", SLOW, 2))
SHAPE = {"num_layers": 8, "hidden_size": 1024, "seq_length": 1024, "max_position_embeddings": 1024}


def test_stages_that_are_alike_are_shown_once() -> None:
    cluster = make_cluster(("a", FAST, 4))
    workload = make_workload(**SHAPE, global_batch_size=8)
    (stage,) = plan_programs(place("tp2:8 @4 | tp2:8 @4", workload, cluster), cluster)
    assert (stage.replica, stage.stage, stage.shape) == (0, 0, "tp2:8")
    own = next(o for o in stage.options if o.form and o.form.name == "tensor parallel")
    assert own.priced_s == pytest.approx(stage.layer_s, rel=1e-9)
    assert own.synthesis.seconds == pytest.approx(stage.layer_s, rel=0.02)


def test_a_stage_of_one_gpu_has_no_programs() -> None:
    workload = make_workload(**SHAPE)
    plan = place("tp1:2,tp1:2,tp1:2,tp1:2 @4", workload, CLUSTER)
    assert plan_programs(plan, CLUSTER) == ()


def test_a_plan_without_a_model_is_refused() -> None:
    with pytest.raises(UsageError, match="no model"):
        plan_programs(place("tp2:4,tp2:4 @4", None, CLUSTER), CLUSTER)


def random_gpu(rng: Random, name: str) -> GpuType:
    flops = rng.choice((60e12, 120e12, 300e12)) * rng.uniform(0.8, 1.2)
    peak = {"bf16": flops, "fp16": flops, "fp32": flops / 8, "fp8": None}
    return GpuType(name, 48 * GIB, flops / 200, peak, "8.0", "made up")


def gaps(seeds: range) -> list[tuple[float, float]]:
    """On random groups of unlike GPUs: seconds of the search's own shares of a tensor-parallel
    group over those of the synthesised ones, by the price list of plans; and seconds of the fastest
    form over those of the fastest of all programs."""
    found = []
    for seed in seeds:
        rng = Random(seed)
        nodes = [(f"n{i}", random_gpu(rng, f"GPU{i}"), 1) for i in range(rng.choice((2, 2, 3)))]
        link = Link(rng.choice((5e9, 12e9, 50e9, 200e9)), 1e-5)
        cluster = make_cluster(*nodes, between=link)
        hidden = rng.choice((1024, 2048, 4096))
        workload = make_workload(
            num_layers=4,
            hidden_size=hidden,
            num_attention_heads=16,
            num_query_groups=16,
            kv_channels=hidden // 16,
            seq_length=rng.choice((1024, 4096)),
            global_batch_size=16,
            flash_attention=rng.random() < 0.5,
        )
        costs = CostModel(cluster, workload)
        rows = costs.vocab_rows((len(nodes),))
        own = GroupShares(costs, rows).options(
            StagePlace(cluster.devices, None, False, False, 1), 4
        )[0]
        own_s = costs.group_pieces(cluster.devices, own, rows).layer.total_s
        options = layer_options(costs, LayerGroup(cluster.devices, 4, 1, 16, (1e12,) * len(nodes)))
        tensor = next(o for o in options if o.form and o.form.name == "tensor parallel")
        together = [o for o in options if o.form is None or o.form.division != "sequences"]
        forms = [o.synthesis.seconds for o in together if o.form is not None]
        least = min(o.synthesis.seconds for o in together)
        assert tensor.priced_s is not None
        found.append((own_s / tensor.priced_s, min(forms) / least))
    return found


@pytest.mark.slow
def test_the_search_knows_the_shares_that_are_synthesised() -> None:
    """By the price of plans its shares of a group are no slower than the synthesised ones by more
    than 1 %; and of all programs none is faster than those of the runtime's forms by more than
    2 %."""
    found = gaps(range(20))
    assert max(shares for shares, _ in found) <= 1.01
    assert max(form for _, form in found) <= 1.02
