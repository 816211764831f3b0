from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_hetero.cost.memory.activations import layer_activation_bytes
from megatron_hetero.cost.memory.device import stage_memory
from megatron_hetero.cost.memory.libraries import KeptFree
from megatron_hetero.cost.memory.stage import (
    StageMemory,
    with_in_flight,
    with_some_layers_recomputed,
)
from megatron_hetero.cost.memory.states import StateHolders, state_bytes
from megatron_hetero.cost.parameters import layer_params, matrix_params, stage_params
from megatron_hetero.cost.share import even_share, member_shares
from megatron_hetero.model.blocks import padded_vocab_size
from megatron_hetero.model.spec import Workload
from megatron_hetero.model.training import Fp8Recipe
from tests.cost.builders import FAST, make_workload


def test_bytes_per_parameter() -> None:
    """Beside activations, and what the update alone adds."""

    def found(**changes: object) -> tuple[int, int]:
        states = state_bytes(make_workload(**changes).training)
        return states.weight + states.gradient + states.optimizer, states.update

    assert found(precision="bf16") == (18, 0)
    assert found(precision="fp32") == (16, 0)
    assert found(precision="fp16") == (16, 4)
    assert found(precision="bf16", optimizer="sgd") == (14, 0)
    assert found(precision="bf16", grad_reduce_in_bf16=True) == (16, 4)
    assert found(precision="fp32", optimizer="sgd") == (12, 0)


@pytest.mark.parametrize("seq_length", [64, 16384])
@pytest.mark.parametrize("num_layers", [1, 3, 24])
def test_copies_of_gradients_live_where_activations_were(seq_length: int, num_layers: int) -> None:
    """The peak is the fuller of passes and update, each counted by itself."""
    workload = make_workload(
        num_layers=24, seq_length=seq_length, precision="bf16", grad_reduce_in_bf16=True
    )
    memory = memory_of(workload, first=True, last=True, kept_free=KeptFree(54321, 12345))
    num_params = stage_params(
        workload.model, even_share(workload.model, 1), num_layers, True, True, 1024
    )
    parts = {part: memory.base[part] + num_layers * memory.per_layer[part] for part in memory.base}
    passing = sum(parts.values())
    updating = 20 * num_params + parts["libraries"] + parts["reserve"]
    assert (updating > passing) == (seq_length == 64)
    assert memory.peak_bytes(num_layers) == max(passing, updating)
    assert sum(memory.parts_bytes(num_layers).values()) == memory.peak_bytes(num_layers)
    assert memory.parts_bytes(num_layers)["optimizer"] == 12 * num_params
    for room in (memory.peak_bytes(num_layers), memory.peak_bytes(num_layers) - 1):
        fits = replace(memory, capacity_bytes=room).max_layers
        assert (fits >= num_layers) == (room == memory.peak_bytes(num_layers))


@pytest.mark.parametrize(
    ("widths", "rows"), [((1,), 1024), ((1, 2), 1024), ((3,), 1152), ((2, 3), 1536)]
)
def test_vocabulary_is_padded_for_all_widths(widths: tuple[int, ...], rows: int) -> None:
    assert padded_vocab_size(make_workload().model, widths) == rows


def test_parameters_of_a_gpt2_layer() -> None:
    model = make_workload(
        hidden_size=768, num_attention_heads=12, num_query_groups=12, kv_channels=64
    ).model
    # GPT-2 small: 12 h^2 + 13 h.
    assert layer_params(model, even_share(model, 1)) == 12 * 768**2 + 13 * 768
    # Shards add up to the whole plus the copies of norms (4 h) and output biases (2 h).
    assert (
        4 * layer_params(model, even_share(model, 4))
        == layer_params(model, even_share(model, 1)) + 3 * 6 * 768
    )


def test_parameters_of_a_llama_layer() -> None:
    model = make_workload(
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        gated_mlp=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        position_embedding="rope",
        tied_embeddings=False,
        num_layers=32,
        vocab_size=128256,
    ).model
    assert layer_params(model, even_share(model, 1)) == 218_112_000
    assert stage_params(model, even_share(model, 1), 32, True, True, 128256) == 8_030_261_248


def test_a_tied_output_weight_costs_only_on_another_stage() -> None:
    model = make_workload(tied_embeddings=True).model
    norm, words = 2 * 512, 1024 * 512
    assert stage_params(model, even_share(model, 1), 0, False, True, 1024) == norm + words
    both = stage_params(model, even_share(model, 1), 0, True, True, 1024)
    assert both == stage_params(model, even_share(model, 1), 0, True, False, 1024) + norm


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_activations_are_those_of_korthikanti(width: int, sequence_parallel: bool) -> None:
    workload = make_workload(micro_batch_size=2, sequence_parallel=sequence_parallel)
    model, training = workload.model, workload.training
    share = even_share(model, width)
    s, b, h, a = 256, 2, 512, 8
    found = layer_activation_bytes(model, training, share, False, "none")
    scores = 5 * a * s / h
    # The paper leaves out mean and deviation of each row in both norms.
    statistics = 2 * 2 * 4 * s * b
    if sequence_parallel:
        assert found == (s * b * h * (34 + scores) + statistics) / width
    else:
        assert found == s * b * h * (10 + (24 + scores) / width) + statistics
    selective = layer_activation_bytes(model, training, share, False, "selective")
    assert found - selective == 5 * a * s * s * b // width
    full = layer_activation_bytes(model, training, share, False, "full")
    assert full == 2 * s * b * h // (width if sequence_parallel else 1)


def memory_of(workload: Workload, width: int = 1, **changes: Any) -> StageMemory:
    asked = {"first": False, "last": False, "num_in_flight": 1, "vocab_rows": 1024}
    asked |= {"kept_free": KeptFree(0, 0), "share": even_share(workload.model, width)} | changes
    return stage_memory(workload, FAST, **asked)


def test_memory_is_linear_in_layers_and_adds_up() -> None:
    workload = make_workload()
    memory = memory_of(workload, 2, first=True, num_in_flight=3, kept_free=KeptFree(54321, 12345))
    assert memory.capacity_bytes == FAST.memory_bytes
    for layers in (0, 1, 7):
        parts = memory.parts_bytes(layers)
        assert sum(parts.values()) == memory.peak_bytes(layers)
        assert (parts["libraries"], parts["reserve"]) == (54321, 12345)
        share = even_share(workload.model, 2)
        params = stage_params(workload.model, share, layers, True, False, 1024)
        assert parts["weights"] + parts["gradients"] + parts["optimizer"] == 18 * params
    assert memory.peak_bytes(memory.max_layers) <= FAST.memory_bytes
    assert memory.peak_bytes(memory.max_layers + 1) > FAST.memory_bytes


def test_more_micro_batches_in_flight_keep_more_activations() -> None:
    one, five = (
        memory_of(make_workload(), num_in_flight=n, last=True).parts_bytes(3)["activations"]
        for n in (1, 5)
    )
    assert five == 5 * one


def test_uneven_shares_divide_what_equal_ones_do() -> None:
    """3 of 8 groups to the first, 1 to the last; all four together hold what an even group does."""
    model = make_workload().model
    shares = member_shares(model, 4, (3, 2, 2, 1))
    assert [s.query_groups for s in shares] == [3, 2, 2, 1]
    assert [s.mlp_columns for s in shares] == [768, 512, 512, 256]
    params = [layer_params(model, share) for share in shares]
    assert sum(params) == 4 * layer_params(model, even_share(model, 4))
    assert params[0] > params[1] == params[2] > params[3]
    assert member_shares(model, 4, (7, 7, 7, 7)) == member_shares(model, 4)


def test_the_distributed_optimizer_divides_its_states_among_the_holders() -> None:
    workload = make_workload(use_distributed_optimizer=True)
    asked = {"first": True, "last": False}
    alone = memory_of(workload, **asked).parts_bytes(2)
    shared = memory_of(workload, holders=StateHolders(4, 7), **asked).parts_bytes(2)
    words = 1024 * 512
    states = 12  # fp32 weights and two moments
    others = alone["optimizer"] - states * words
    assert shared["optimizer"] == pytest.approx(others / 4 + states * words / 7, abs=4)
    assert {k: v for k, v in alone.items() if k != "optimizer"} == {
        k: v for k, v in shared.items() if k != "optimizer"
    }


def test_a_stage_may_recompute_some_of_its_layers() -> None:
    kept = memory_of(make_workload(), num_in_flight=3)
    recomputed = memory_of(make_workload(recompute="full"), num_in_flight=3)
    some = with_some_layers_recomputed(kept, recomputed, 2)
    activations = [m.parts_bytes(5)["activations"] for m in (kept, some, recomputed)]
    per_layer = (activations[0] - activations[2]) // 5
    assert activations[0] - activations[1] == 2 * per_layer
    assert some.parts_bytes(5)["weights"] == kept.parts_bytes(5)["weights"]


def test_unfused_attention_keeps_more() -> None:
    """Scores, and for grouped queries a copy of keys and values for every head."""
    grouped = {"num_query_groups": 2, "attention_dropout": 0.0}
    sizes = {}
    for flash in (True, False):
        workload = make_workload(**grouped)
        model, share = workload.model, even_share(workload.model, 1)
        sizes[flash] = layer_activation_bytes(model, workload.training, share, flash, "none")
    scores, statistics = 2 * 8 * 256**2, 4 * 256 * 8
    repeated = 2 * 256 * 2 * (512 - 128)
    assert sizes[False] - sizes[True] == scores - statistics + repeated


@pytest.mark.parametrize(("first", "last"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("kinds", [None, (0, 1, 1, 1, 0, 1)])
def test_more_in_flight_is_one_that_many_times(
    first: bool, last: bool, recompute: str, kinds: tuple[int, ...] | None
) -> None:
    experts = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 96}
    changes = {} if kinds is None else {**experts, "moe_layer_freq": kinds}
    job = make_workload(6, recompute=recompute, **changes)
    assert bool(job.model.kinds) == (kinds is not None)
    (share, _) = member_shares(job.model, 2)

    def memory(num_in_flight: int, libraries: int) -> StageMemory:
        return stage_memory(
            job, FAST, share, first=first, last=last, num_in_flight=num_in_flight,
            vocab_rows=1024, kept_free=KeptFree(libraries, 2),
        )  # fmt: skip

    for count, libraries in ((0, 1), (1, 0), (2, 5), (7, 1)):
        found = with_in_flight(job.model, memory(1, 0), count, libraries)
        assert found == memory(count, libraries)


@pytest.mark.parametrize(
    ("capability", "recipe", "copies"),
    [
        ("8.9", "tensorwise", 2),
        ("9.0", "delayed", 2),
        ("10.0", "tensorwise", 1),
        ("10.3", "delayed", 1),
        ("10.0", "mxfp8", 2),
        ("12.0", "tensorwise", 2),
    ],
)
def test_fp8_weights_are_kept_transposed_where_products_need_it(
    capability: str, recipe: Fp8Recipe, copies: int
) -> None:
    workload = make_workload(precision="bf16")
    training = replace(workload.training, fp8=True, fp8_recipe=recipe)
    workload = replace(workload, training=training)
    share = even_share(workload.model, 1)
    memory = stage_memory(
        workload, replace(FAST, compute_capability=capability), share, first=False, last=False,
        num_in_flight=1, vocab_rows=1024, kept_free=KeptFree(0, 0),
    )  # fmt: skip
    assert memory.per_layer["buffers"] == copies * layer_params(workload.model, share)
    # Kept in fp8 alone, a matrix has no weight in 16 bits, and norms and biases no copies.
    workload = replace(workload, training=replace(training, fp8_param_gather=True))
    memory = stage_memory(
        workload, replace(FAST, compute_capability=capability), share, first=False, last=False,
        num_in_flight=1, vocab_rows=1024, kept_free=KeptFree(0, 0),
    )  # fmt: skip
    matrices = matrix_params(workload.model, share)
    assert matrices == (4 + 2 * 4) * 512**2
    others = layer_params(workload.model, share) - matrices
    assert memory.per_layer["weights"] + memory.per_layer["buffers"] == (
        copies * matrices + 2 * others
    )
    assert memory.per_layer["buffers"] == (copies - 1) * matrices
