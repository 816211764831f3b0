from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.model.blocks import blocks, num_parameters, padded_vocab_size
from megatron_hetero.model.load import load_workload

GPT2 = shlex.split(
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 "
    "--max-position-embeddings 1024 --vocab-size 50257 --global-batch-size 8 "
    "--micro-batch-size 1"
)
TINY = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --vocab-size 100 --global-batch-size 2 --micro-batch-size 1"
)
VARIANTS = [
    "",
    "--swiglu --untie-embeddings-and-output-weights",
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope --add-qkv-bias "
    "--group-query-attention --num-query-groups 2 --kv-channels 16",
    "--qk-layernorm --ffn-hidden-size 48",
    "--num-experts 4 --moe-ffn-hidden-size 24 --swiglu",
    "--num-experts 4 --disable-bias-linear",
    "--mtp-num-layers 2 --position-embedding-type rope --swiglu",
]


def test_gpt2_by_hand() -> None:
    workload = load_workload(None, GPT2)
    embedding, *layers, head = blocks(workload)
    assert [b.kind for b in blocks(workload)] == ["embedding", *["layer"] * 12, "head"]
    assert embedding.num_parameters == (50304 + 1024) * 768
    assert layers[0].num_parameters == 7_087_872  # 12 h^2 + 13 h
    assert layers[0].num_replicated_parameters == 6 * 768  # 2 norms, 2 biases
    assert head.num_parameters == 2 * 768  # tied: the final norm alone
    assert layers[0].matmul_flops_forward == 24 * 1024 * 768**2
    assert layers[0].attention_flops_forward == 2 * 1024**2 * 768
    assert head.matmul_flops_forward == 2 * 1024 * 768 * 50304
    assert (embedding.matmul_flops_forward, head.attention_flops_forward) == (0, 0)


def test_further_tokens_by_hand() -> None:
    """Each has a layer, three norms, a product of twice the width, and logits of its own."""
    flags = "--mtp-num-layers 2 --position-embedding-type rope"
    plain = blocks(load_workload(None, [*GPT2, "--position-embedding-type", "rope"]))
    more = blocks(load_workload(None, [*GPT2, *flags.split()]))
    assert more[:-1] == plain[:-1]
    head, layer = plain[-1], plain[1]
    joined = 2 * 768**2
    extra = layer.num_parameters + joined + 3 * 2 * 768
    assert more[-1].num_parameters - head.num_parameters == 2 * extra
    flops = layer.matmul_flops_forward + 2 * 1024 * joined + head.matmul_flops_forward
    assert more[-1].matmul_flops_forward - head.matmul_flops_forward == 2 * flops
    assert more[-1].attention_flops_forward == 2 * layer.attention_flops_forward


def test_grouped_queries_and_gates_in_the_flops() -> None:
    flags = "--group-query-attention --num-query-groups 4 --swiglu --ffn-hidden-size 2048"
    layer = blocks(load_workload(None, [*GPT2, *flags.split()]))[1]
    weights = 768 * (768 + 2 * 4 * 64) + 768 * 768 + 3 * 768 * 2048
    assert layer.matmul_flops_forward == 2 * 1024 * weights


def test_experts_cost_their_topk_and_hold_them_all() -> None:
    dense = blocks(load_workload(None, GPT2))[1]
    flags = "--num-experts 8 --moe-router-topk 2"
    sparse = blocks(load_workload(None, [*GPT2, *flags.split()]))[1]
    mlp = 2 * 768 * 3072
    assert sparse.matmul_flops_forward - dense.matmul_flops_forward == 2 * 1024 * (mlp + 768 * 8)
    assert sparse.num_parameters - dense.num_parameters == 7 * (mlp + 3072 + 768) + 8 * (768 + 1)


@given(st.integers(1, 300_000), st.lists(st.integers(1, 8), min_size=1, max_size=4))
def test_every_width_divides_the_padded_vocabulary(vocab_size: int, widths: list[int]) -> None:
    model = load_workload(None, [*TINY, "--vocab-size", str(vocab_size)]).model
    padded = padded_vocab_size(model, widths)
    assert padded >= vocab_size
    assert all(padded % (128 * width) == 0 for width in widths)
    assert padded - vocab_size < 128 * 840  # lcm(1..8)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_tensor_parallel_group_holds_each_parameter(variant: str) -> None:
    workload = load_workload(None, [*TINY, *variant.split()])
    for block in blocks(workload):
        assert 0 <= block.num_replicated_parameters <= block.num_parameters
        assert (block.num_parameters - block.num_replicated_parameters) % 2 == 0
    assert num_parameters(workload) == sum(b.num_parameters for b in blocks(workload))


_COUNT_WITH_MEGATRON = """
import json, sys
sys.modules["transformer_engine"] = None  # Megatron's own layers are counted
import torch.distributed
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec, get_gpt_mtp_block_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron_hetero.model.blocks import padded_vocab_size
from megatron_hetero.model.load import load_workload

store = torch.distributed.FileStore(sys.argv[1], 1)
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
parallel_state.initialize_model_parallel()
counts = []
for flags in json.loads(sys.argv[2]):
    m = load_workload(None, flags).model
    config = TransformerConfig(
        num_layers=m.num_layers, hidden_size=m.hidden_size, kv_channels=m.kv_channels,
        num_attention_heads=m.num_attention_heads, num_query_groups=m.num_query_groups,
        ffn_hidden_size=m.ffn_hidden_size, gated_linear_unit=m.gated_mlp,
        add_bias_linear=m.add_bias_linear, add_qkv_bias=m.add_qkv_bias,
        normalization=m.normalization, qk_layernorm=m.qk_layernorm,
        num_moe_experts=m.num_experts or None, moe_router_topk=m.moe_router_topk or 2,
        moe_ffn_hidden_size=m.moe_ffn_hidden_size or None, use_cpu_initialization=True,
        mtp_num_layers=m.mtp_num_layers or None,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=m.num_experts or None, moe_grouped_gemm=False,
        qk_layernorm=m.qk_layernorm, normalization=m.normalization,
    )
    further_tokens = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    model = GPTModel(
        config, spec, mtp_block_spec=further_tokens,
        vocab_size=padded_vocab_size(m),
        max_sequence_length=m.max_position_embeddings,
        position_embedding_type=m.position_embedding,
        share_embeddings_and_output_weights=m.tied_embeddings,
    )
    counts.append(sum(p.numel() for p in model.parameters()))
print("counts", json.dumps(counts))
"""


@pytest.mark.slow
def test_parameter_counts_equal_megatrons(tmp_path: Path) -> None:
    flags = [[*TINY, *variant.split()] for variant in VARIANTS]
    result = subprocess.run(
        [sys.executable, "-c", _COUNT_WITH_MEGATRON, str(tmp_path / "store"), json.dumps(flags)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=110,
        check=True,
    )
    counts = json.loads(result.stdout.split("counts ")[-1])
    assert counts == [num_parameters(load_workload(None, f)) for f in flags]
