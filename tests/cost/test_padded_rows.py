"""Rows that fp8 adds to those of experts: as many as Megatron's own padding adds, on average."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import get_args

import pytest

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cost.network.experts import links_in_group
from megatron_hetero.cost.share import even_share, member_shares
from megatron_hetero.cost.work.layer_work import mlp_work
from megatron_hetero.model.training import Fp8Recipe, TrainingSpec
from tests.cost.builders import make_workload

JOB = make_workload(
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=512,
    token_dispatcher="alltoall",
    sequence_parallel=True,
    grouped_experts=True,
)
IN_FP8 = replace(JOB, training=replace(JOB.training, fp8=True))
PADDED = replace(JOB, training=replace(IN_FP8.training, pads_routing=True))
NUM_EXPERTS, NUM_STEPS = 64, 20

SCRIPT = """
import json, sys
sys.modules["transformer_engine"] = None
import torch
from megatron.core.enums import Fp8Recipe
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.transformer.moe.moe_utils import pad_routing_map
torch.manual_seed(1)
found = {}
for recipe in sys.argv[3:]:
    size, added = get_fp8_align_size(Fp8Recipe[recipe]), 0
    for _ in range(int(sys.argv[2])):
        chosen = torch.rand(4096, int(sys.argv[1])).topk(4).indices
        routes = torch.zeros(4096, int(sys.argv[1]), dtype=torch.bool).scatter(1, chosen, True)
        added += int(pad_routing_map(routes.clone(), size).sum() - routes.sum())
    found[recipe] = size, added
print("found", json.dumps(found))
"""


def test_random_routes_get_as_many_rows_from_megatron() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(NUM_EXPERTS), str(NUM_STEPS), *get_args(Fp8Recipe)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        check=True,
        timeout=300,
    )
    found = json.loads(run.stdout.split("found ")[-1])
    for recipe in get_args(Fp8Recipe):
        training = TrainingSpec(1, 1, fp8=True, fp8_recipe=recipe)
        size, added = found[recipe]
        assert training.padded_rows == (size - 1) / 2
        # Counts are spread over all remainders: five standard deviations of their mean.
        number = NUM_EXPERTS * NUM_STEPS
        assert abs(added / number - training.padded_rows) < 5 * size / sqrt(12 * number)
    assert TrainingSpec(1, 1).padded_rows == 0.0


def test_experts_pad_their_own_rows_and_routers_those_of_each_rank() -> None:
    model = JOB.model
    (share, *_) = member_shares(model, 2, None, expert_shares=(1, 1))
    plain, in_fp8, padded = (share.routed_tokens(model, j.training) for j in (JOB, IN_FP8, PADDED))
    assert plain == 256 * 2 / 2
    assert in_fp8 - plain == 4 * 7.5
    assert padded - plain == 4 * 7.5 * 2
    # Of a group over replicas, every rank pads what it sends.
    wide = replace(share, expert_ranks=8, experts=1)
    plain, in_fp8, padded = (wide.routed_tokens(model, j.training) for j in (JOB, IN_FP8, PADDED))
    assert plain == 256 / 2 * 8 * 2 / 8
    assert (in_fp8 - plain, padded - plain) == (7.5, 7.5 * 8)


def test_padding_is_in_products_and_copies_or_in_the_exchange() -> None:
    model, share = JOB.model, even_share(JOB.model, 1)
    works = [mlp_work(model, job.training, share, True) for job in (JOB, IN_FP8, PADDED)]
    plain, in_fp8, padded = ([sum(w.gemm_flops), w.moved.forward.num_bytes] for w in works)
    rows = 8 * 7.5
    each = 2 * 2 * 512 * 512
    assert in_fp8[0] - plain[0] == pytest.approx(rows * each)
    # One rank pads alike in both ways, which differ by two copies of the rows (read, written).
    assert padded[0] == in_fp8[0]
    routed = 256 * 2 + rows
    assert in_fp8[1] - padded[1] == pytest.approx(routed * 2 * 2 * 512 * 2)
    # What routers pad travels, there and back.
    links = links_in_group(Link(1e9, 0.0), 4, is_dealt=True)
    seconds = [links.pass_s(model, job.training, 64) for job in (JOB, IN_FP8, PADDED)]
    assert seconds[0] == seconds[1]
    assert seconds[2] - seconds[0] == pytest.approx(2 * rows * 512 * 2 * 3 / 4 / 1e9)
