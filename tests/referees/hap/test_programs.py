"""Programs beside what the stages of a plan do."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.model import CostModel
from megatron_hetero.errors import UsageError
from megatron_hetero.planner.completion.stage_places import StagePlace
from megatron_hetero.planner.moves.group_shares import GroupShares
from tests.cost.builders import FAST, GIB, SLOW, make_cluster, make_workload, place
from tools.referees.hap.costed import LayerGroup
from tools.referees.hap.programs import plan_programs
from tools.referees.hap.synthesise import layer_options, placed_layer_s

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


def gaps(seeds: range) -> list[tuple[float, float, float]]:
    """On random groups of unlike GPUs: seconds of the search's own shares of a tensor-parallel
    group over those of the synthesised ones, by the price list of plans; the same of shares of
    sequences; and seconds of the fastest form over those of the fastest of all programs."""
    found = []
    for seed in seeds:
        rng = Random(seed)
        nodes = [(f"n{i}", random_gpu(rng, f"GPU{i}"), 1) for i in range(rng.choice((2, 2, 3)))]
        link = Link(rng.choice((5e9, 12e9, 50e9, 200e9)), 1e-5)
        cluster = make_cluster(*nodes, between=link)
        hidden = rng.choice((1024, 2048, 4096))
        seq_length, flash = rng.choice((1024, 4096)), rng.random() < 0.5
        workload = make_workload(
            num_layers=4,
            hidden_size=hidden,
            num_attention_heads=16,
            num_query_groups=16,
            kv_channels=hidden // 16,
            seq_length=seq_length,
            global_batch_size=16,
            flash_attention=flash,
            fused_scores="nowhere" if flash else "divided",
        )
        costs = CostModel(cluster, workload)
        rows = costs.vocab_rows((len(nodes),))
        place = StagePlace(cluster.devices, None, False, False, 1)
        own = GroupShares(costs, rows).options(place, 4)[0]
        own_s = costs.group_pieces(cluster.devices, own, rows).layer.total_s
        divided = replace(place, context_parallel=len(nodes))
        of_tokens = GroupShares(costs, costs.vocab_rows((1,))).options(divided, 4)[0]
        tokens_s = placed_layer_s(costs, replace(divided, context_shares=of_tokens).stage, 16)
        options = layer_options(costs, LayerGroup(cluster.devices, 4, 1, 16, (1e12,) * len(nodes)))
        tensor = next(o for o in options if o.form and o.form.name == "tensor parallel")
        together = [o for o in options if o.form is None or o.form.division != "sequences"]
        forms = [o.synthesis.seconds for o in together if o.form is not None]
        least = min(o.synthesis.seconds for o in together)
        context = next(o for o in options if o.form and o.form.name == "context parallel")
        assert tensor.priced_s is not None and context.priced_s is not None
        # Transformer Engine divides sequences equally.
        of_sequences = 0.0 if flash else tokens_s / context.priced_s
        found.append((own_s / tensor.priced_s, of_sequences, min(forms) / least))
    return found


@pytest.mark.slow
def test_the_search_knows_the_shares_that_are_synthesised() -> None:
    """By the price of plans its shares of a group, of tensors and of sequences, are no slower than
    the synthesised ones by more than 1 %; and of all programs none is faster than those of the
    runtime's forms by more than 2 %."""
    of_tensors, of_sequences, forms = zip(*gaps(range(20)), strict=True)
    assert max(of_tensors) <= 1.01
    assert 0 < max(of_sequences) <= 1.01
    assert max(forms) <= 1.02
