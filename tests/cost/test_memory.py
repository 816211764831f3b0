from __future__ import annotations

import pytest

from megatron_hetero.cost.memory import (
    layer_activation_bytes,
    layer_params,
    stage_memory,
    stage_params,
    state_bytes,
)
from megatron_hetero.model.blocks import padded_vocab_size
from tests.cost.builders import FAST, make_workload


def test_bytes_per_parameter() -> None:
    def total(**changes: object) -> int:
        return state_bytes(make_workload(**changes).training).total

    assert total(precision="bf16") == 18
    assert total(precision="fp32") == 16
    assert total(precision="fp16") == 20
    assert total(precision="bf16", optimizer="sgd") == 14
    assert total(precision="fp32", optimizer="sgd") == 12


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
    assert layer_params(model, 1) == 12 * 768**2 + 13 * 768
    # Shards add up to the whole plus the copies of norms (4 h) and output biases (2 h).
    assert 4 * layer_params(model, 4) == layer_params(model, 1) + 3 * 6 * 768


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
    assert layer_params(model, 1) == 218_112_000
    assert stage_params(model, 1, 32, True, True, 128256) == 8_030_261_248


def test_a_tied_output_weight_costs_only_on_another_stage() -> None:
    model = make_workload(tied_embeddings=True).model
    norm, words = 2 * 512, 1024 * 512
    assert stage_params(model, 1, 0, False, True, 1024) == norm + words
    both = stage_params(model, 1, 0, True, True, 1024)
    assert both == stage_params(model, 1, 0, True, False, 1024) + norm


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_activations_are_those_of_korthikanti(width: int, sequence_parallel: bool) -> None:
    workload = make_workload(micro_batch_size=2, sequence_parallel=sequence_parallel)
    model, training = workload.model, workload.training
    s, b, h, a = 256, 2, 512, 8
    found = layer_activation_bytes(model, training, width, False, "none")
    scores = 5 * a * s / h
    if sequence_parallel:
        assert found == s * b * h * (34 + scores) / width
    else:
        assert found == s * b * h * (10 + (24 + scores) / width)
    selective = layer_activation_bytes(model, training, width, False, "selective")
    assert found - selective == 5 * a * s * s * b // width
    full = layer_activation_bytes(model, training, width, False, "full")
    assert full == 2 * s * b * h // (width if sequence_parallel else 1)


def test_memory_is_linear_in_layers_and_adds_up() -> None:
    workload = make_workload()
    memory = stage_memory(
        workload,
        FAST,
        2,
        first=True,
        last=False,
        num_in_flight=3,
        vocab_rows=1024,
        reserve_bytes=12345,
    )
    assert memory.capacity_bytes == FAST.memory_bytes
    for layers in (0, 1, 7):
        parts = memory.parts_bytes(layers)
        assert sum(parts.values()) == memory.peak_bytes(layers)
        assert parts["reserve"] == 12345
        params = stage_params(workload.model, 2, layers, True, False, 1024)
        assert parts["weights"] + parts["gradients"] + parts["optimizer"] == 18 * params
    assert memory.peak_bytes(memory.max_layers) <= FAST.memory_bytes
    assert memory.peak_bytes(memory.max_layers + 1) > FAST.memory_bytes


def test_more_micro_batches_in_flight_keep_more_activations() -> None:
    def activations(num_in_flight: int) -> int:
        memory = stage_memory(
            make_workload(),
            FAST,
            1,
            first=False,
            last=False,
            num_in_flight=num_in_flight,
            vocab_rows=1024,
            reserve_bytes=0,
        )
        return memory.parts_bytes(3)["activations"]

    assert activations(5) == 5 * activations(1)
