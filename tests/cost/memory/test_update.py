"""Bytes that the optimizer's step moves, beside a count of Megatron's by hand."""

from __future__ import annotations

import pytest

from megatron_hetero.cost.memory.stage import StageMemory, update_traffic_bytes
from megatron_hetero.cost.memory.states import StateHolders, state_bytes
from tests.cost.builders import make_workload

PARAMS = 1000


@pytest.mark.parametrize("local_layers", [False, True])
@pytest.mark.parametrize("reduced_in_bf16", [False, True])
@pytest.mark.parametrize("holders", [1, 4])
def test_a_parameter_is_moved_as_megatron_moves_it(
    local_layers: bool, reduced_in_bf16: bool, holders: int
) -> None:
    training = make_workload(
        precision="bf16", local_layers=local_layers, grad_reduce_in_bf16=reduced_in_bf16
    ).training
    states = state_bytes(training)
    memory = StageMemory(
        {
            "weights": PARAMS * states.weight,
            "gradients": PARAMS * states.gradient,
            "optimizer": PARAMS * states.optimizer // holders,
            "activations": 0,
            "buffers": 0,
        },
        dict.fromkeys(["weights", "gradients", "optimizer", "activations", "buffers"], 0),
        80 * 10**9,
        update_base_bytes=PARAMS * states.update // holders,
    )
    gradient = 2 if reduced_in_bf16 else 4
    zeroed, checked = gradient, gradient
    # A copy in fp32 is written from a gradient in 16 bits.
    copied = 2 + 4 if reduced_in_bf16 else 0
    norm, scaled, read = 4, (0 if local_layers else 4 + 4), 4
    moments, weight = 2 * (4 + 4), 4 + 4
    # The 16-bit weight is made of the fp32 one.
    cast = 4 + 2
    owned = copied + norm + scaled + read + moments + weight + cast
    by_hand = zeroed + checked + owned / holders
    moved = update_traffic_bytes(memory, 0, StateHolders(holders), training)
    assert moved / PARAMS == pytest.approx(by_hand)
