"""FLOPs and bytes of a layer are those of Megatron's own, with Transformer Engine's layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.work.layer_work import attention_work, mlp_work
from megatron_hetero.cost.work.pieces import price_pieces
from megatron_hetero.cost.work.speed import speed_of
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.training import TrainingSpec
from tests.cost.builders import FAST, INSIDE
from tests.cost.work.megatron_traffic import BASE

NO_DROPOUT = "--attention-dropout=0 --hidden-dropout=0"
LLAMA = (
    f"{NO_DROPOUT} --normalization=RMSNorm --disable-bias-linear --position-embedding-type=rope "
    "--untie-embeddings-and-output-weights --ffn-hidden-size=1792"
)
GROUPED = "--group-query-attention --num-query-groups=2"
SORTED = "--moe-token-dispatcher-type=alltoall"
MIXTRAL = f"{LLAMA} --swiglu {GROUPED} --num-experts=8 --moe-router-topk=2"
LATENT = (
    f"{LLAMA} --swiglu --multi-latent-attention --q-lora-rank=192 --kv-lora-rank=128 "
    "--qk-head-dim=64 --qk-pos-emb-head-dim=32 --v-head-dim=64 --qk-layernorm"
)
CASES: Mapping[str, str] = {
    "GPT-3": NO_DROPOUT,
    "GPT-3, dropout": "--attention-dropout=0 --hidden-dropout=0.1",
    "Llama": f"{LLAMA} --swiglu {GROUPED}",
    "as many keys as queries": f"{LLAMA} --swiglu",
    "positions that are learned": f"{LLAMA} --swiglu {GROUPED} --position-embedding-type="
    "learned_absolute",
    "Nemotron": f"{LLAMA} --squared-relu {GROUPED}",
    "Qwen": f"{LLAMA} --swiglu {GROUPED} --qk-layernorm",
    "Mixtral": f"{MIXTRAL} {SORTED} --moe-grouped-gemm",
    "Mixtral, experts apart": f"{MIXTRAL} {SORTED}",
    "Mixtral, gathered": f"{MIXTRAL} --moe-token-dispatcher-type=allgather --moe-grouped-gemm",
    "Qwen, experts": f"{LLAMA} --swiglu {GROUPED} --qk-layernorm --num-experts=32 "
    f"--moe-router-topk=8 --moe-ffn-hidden-size=192 {SORTED} --moe-grouped-gemm",
    "latent": LATENT,
    "DeepSeek": f"{LATENT} --num-experts=16 --moe-router-topk=4 --moe-ffn-hidden-size=256 "
    "--moe-shared-expert-intermediate-size=256 --moe-router-score-function=sigmoid "
    "--moe-router-enable-expert-bias --moe-router-dtype=fp32 "
    f"{SORTED} --moe-grouped-gemm",
}
"""Flags of a job by name; of a flag given twice the last counts."""


QUICK = ("GPT-3", "Llama", "Mixtral", "DeepSeek")
SLOW = tuple(case for case in CASES if case not in QUICK)


@cache
def megatrons(piece: str, flags: tuple[str, ...]) -> list[list[list[float]]]:
    """Measure jobs in a process of their own, which has Transformer Engine's layers."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.cost.work.megatron_traffic", piece, json.dumps(flags)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    found: list[list[list[float]]] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_a_layer_multiplies_and_moves_what_megatrons_does(case: str) -> None:
    """Products are equal.  What routers move for each expert is not priced, nor biases and weights
    of norms, which are few."""
    job = load_workload(None, f"{BASE} {CASES[case]} --num-layers=2".split())
    share = even_share(job.model, 1)
    halves = [work(job.model, job.training, share, True) for work in (attention_work, mlp_work)]
    flops = sum(sum(half.gemm_flops) for half in halves)
    together = QUICK if case in QUICK else SLOW
    measured = megatrons("layer", tuple(CASES[name] for name in together))
    passes = measured[together.index(case)]
    assert [own[0] for own in passes] == [flops, 2 * flops]
    # Routers of many kinds have more operators than the usual one.
    least, least_kernels = (0.95, 0.5) if job.model.num_experts else (0.98, 0.85)
    for name, (_, num_bytes, kernels) in zip(("forward", "backward"), passes, strict=True):
        moved = [getattr(half.moved, name) for half in halves]
        assert least < sum(own.num_bytes for own in moved) / num_bytes <= 1.0
        assert least_kernels <= sum(own.kernels for own in moved) / kernels <= 1.1


def test_a_weight_at_both_ends_has_its_gradients_added() -> None:
    """Beside a model with a weight for each end, which moves as much otherwise."""
    untied = f"{BASE} --num-layers=1 {CASES['Llama']}"
    tied = untied.replace(" --untie-embeddings-and-output-weights", "")
    (_, (_, apart, _)), (_, (_, together, _)) = megatrons("model", (untied, tied))
    members = [(FAST, even_share(load_workload(None, tied.split()).model, 1))]
    pieces = [
        price_pieces(load_workload(None, flags.split()), None, members, INSIDE, 256)
        for flags in (untied, tied)
    ]
    assert pieces[0].tied_s == 0.0
    moved = pieces[1].tied_s * speed_of(TrainingSpec(1, 1, "bf16"), FAST).memory_bytes_per_s
    assert moved == pytest.approx(together - apart)
    # Stages with one end each have no more.
    only = [pieces[1].stage(0, first, not first).total_s for first in (True, False)]
    assert pieces[1].stage(0, True, True).total_s == pytest.approx(sum(only) + pieces[1].tied_s)


def test_fused_sorting_reads_and_writes_each_token_once() -> None:
    """Each token goes to two experts.  Apart its row is read and written twice, and on the way back
    two rows are added to a sum that starts from zero: 4 + 6 + 1; fused 1 + 2 and 2 + 1."""
    flags = f"{BASE} {CASES['Mixtral']} --num-layers=2".split()
    plain = load_workload(None, flags)
    fused = load_workload(None, [*flags, "--moe-permute-fusion"])
    share = even_share(plain.model, 1)
    moved = [mlp_work(job.model, job.training, share, True).moved for job in (plain, fused)]
    each = plain.training.micro_batch_size * plain.model.seq_length * 512 * 2
    saved = [
        [a.num_bytes - b.num_bytes, a.kernels - b.kernels] for a, b in zip(*moved, strict=True)
    ]
    assert saved == [[5 * each, 1], [5 * each, 1]]
