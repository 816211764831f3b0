"""What selective recompute of single modules takes, and what it saves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cost.memory.activations import layer_activation_bytes
from megatron_hetero.cost.memory.working import working_bytes
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.work.compute import PassTimes, part_seconds
from megatron_hetero.cost.work.launches import layer_launches
from megatron_hetero.cost.work.layer_work import attention_work, mlp_work
from megatron_hetero.cost.work.pieces import modelled_layer
from megatron_hetero.cost.work.speed import speed_of
from megatron_hetero.cost.work.traffic import KernelTraffic
from megatron_hetero.model.spec import Workload
from tests.cost.builders import FAST, make_workload

PLAIN = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "add_bias_linear": False}
DENSE = make_workload(gated_mlp=True, **PLAIN)
LATENT = {
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_head_dim": 64,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 64,
    "qk_layernorm": True,
}
EXPERTS = make_workload(
    gated_mlp=True,
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=256,
    moe_shared_expert_intermediate_size=256,
    grouped_experts=True,
    sequence_parallel=True,
    **LATENT,
    **PLAIN,
)
LINK = Link(100e9, 3e-6)
OF_DENSE = ["core_attn", "mlp", "layernorm"]
OF_EXPERTS = ["core_attn", "layernorm", "mla_up_proj", "moe", "shared_experts", "moe_act"]


def again(workload: Workload, *modules: str, recompute: str = "selective") -> Workload:
    changes = {"recompute": recompute, "recompute_modules": modules}
    return replace(workload, training=replace(workload.training, **changes))  # type: ignore[arg-type]


def layer(workload: Workload, width: int = 2) -> PassTimes:
    members = [(FAST, even_share(workload.model, width))] * width
    return modelled_layer(workload, members, LINK).total


def kept(workload: Workload, flash: bool = True) -> int:
    share = even_share(workload.model, 2)
    training = workload.training
    return layer_activation_bytes(workload.model, training, share, flash, training.recompute)


@pytest.mark.parametrize(
    ("workload", "modules"), [(DENSE, OF_DENSE), (EXPERTS, OF_EXPERTS)], ids=["dense", "experts"]
)
@given(data=st.data())
def test_more_modules_take_longer_and_keep_less(
    workload: Workload, modules: list[str], data: st.DataObject
) -> None:
    """Never as long as full recompute, nor as little as that keeps."""
    some = data.draw(st.lists(st.sampled_from(modules), min_size=1, unique=True))
    more = data.draw(st.sets(st.sampled_from(modules))) | set(some)
    local = data.draw(st.booleans())
    flash = data.draw(st.booleans())
    workload = replace(workload, training=replace(workload.training, local_layers=local))
    none, full = again(workload, recompute="none"), again(workload, recompute="full")
    few, many = again(workload, *some), again(workload, *sorted(more))
    # A forward pass without gradients, as of a checkpoint, has no time of its own here.
    assert {layer(w).forward_s for w in (none, few, many, full)} == {layer(none).forward_s}
    backward = [layer(w).backward_s for w in (none, few, many, full)]
    assert backward == sorted(backward)
    sizes = [kept(w, flash) for w in (full, many, few, none)]
    assert sizes == sorted(sizes)
    launches = [
        layer_launches(w.model, w.training, even_share(w.model, 2), flash=flash).backward
        for w in (none, few, many, full)
    ]
    assert launches == sorted(launches)
    # What is computed again is held for a while: no more than what is not kept.
    share = even_share(workload.model, 2)
    for asked in (few, many, full):
        held = working_bytes(asked.model, asked.training, share, flash)
        assert held - working_bytes(none.model, none.training, share, flash) <= (
            kept(none, flash) - kept(asked, flash)
        )


def test_an_mlp_is_computed_again_but_for_its_sum_with_what_went_in() -> None:
    share = even_share(DENSE.model, 1)
    plain = part_seconds(DENSE, FAST, share, mlp_work)
    repeated = part_seconds(again(DENSE, "mlp"), FAST, share, mlp_work)
    assert repeated.products[1] - plain.products[1] == pytest.approx(plain.products[0])
    # Transformer Engine's norm is in the first product: two elements of five.
    model, training = DENSE.model, DENSE.training
    work = mlp_work(model, training, share, True)
    elements = share.own_tokens(model, training) * model.hidden_size
    moved = KernelTraffic(
        work.moved.forward.num_bytes - elements * 3 * training.element_bytes,
        work.moved.forward.kernels - 1,
    )
    again_s = repeated.memory[1] - plain.memory[1]
    assert again_s == pytest.approx(speed_of(training, FAST).moved_s(moved))
    # Attention is another part.
    attention = [part_seconds(w, FAST, share, attention_work) for w in (DENSE, again(DENSE, "mlp"))]
    assert attention[0] == attention[1]


def test_an_mlp_keeps_only_what_goes_into_it() -> None:
    model, training = DENSE.model, DENSE.training
    tokens, element = training.micro_batch_size * model.seq_length, training.element_bytes
    inside = tokens * (model.ffn_hidden_size // 2) * 3 * element
    normed = tokens * model.hidden_size * element + tokens * 8
    assert kept(DENSE) - kept(again(DENSE, "mlp")) == inside + normed
    # Megatron's local layers have the norm outside of it.
    local = replace(DENSE, training=replace(training, local_layers=True))
    assert kept(local) - kept(again(local, "mlp")) == inside


def test_norms_by_themselves_alone_are_computed_again() -> None:
    """Transformer Engine's dense layers have none."""
    assert layer(again(DENSE, "layernorm")) == layer(again(DENSE, recompute="none"))
    assert kept(again(DENSE, "layernorm")) == kept(DENSE)
    assert kept(again(EXPERTS, "layernorm")) < kept(EXPERTS)


@pytest.mark.parametrize("module", ["moe", "shared_experts", "mla_up_proj"])
def test_checkpoints_exchange_again(module: str) -> None:
    """Over a slow link the exchange is nearly all."""
    members = [(FAST, even_share(EXPERTS.model, 2))] * 2
    slow = Link(1e8, 1e-3)
    plain, repeated = (
        modelled_layer(w, members, slow).communication for w in (EXPERTS, again(EXPERTS, module))
    )
    more_s = repeated.backward_s - plain.backward_s
    assert 0 < more_s < plain.forward_s
    core = modelled_layer(again(EXPERTS, "moe_act", "core_attn"), members, slow).communication
    assert core == plain
