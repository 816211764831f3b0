"""Bytes that the optimizer's step moves, beside a count of Megatron's by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_hetero.cost.memory.stage import StageMemory, update_traffic_bytes
from megatron_hetero.cost.memory.states import StateBytes, StateHolders, state_bytes
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.training import Fp8Recipe
from tests.cost.builders import make_workload
from tests.runtime.toy_model import in_world

PARAMS = 1000
ONE, TWO = "tp1:1 @2", "tp1:1 @1 | tp1:1 @1"


@pytest.mark.parametrize("local_layers", [False, True])
@pytest.mark.parametrize("reduced_in_bf16", [False, True])
@pytest.mark.parametrize("holders", [1, 4])
def test_a_parameter_is_moved_as_megatron_moves_it(
    local_layers: bool, reduced_in_bf16: bool, holders: int
) -> None:
    training = make_workload(
        precision="bf16",
        local_layers=local_layers,
        grad_reduce_in_bf16=reduced_in_bf16,
        use_distributed_optimizer=True,
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
    # Replicas scale their gradients before they sum them.
    averaged = 2 * gradient if holders > 1 else 0
    # A copy in fp32 is written from a gradient in 16 bits.
    copied = 2 + 4 if reduced_in_bf16 else 0
    norm, clipped, read = 4, (0 if local_layers else 4 + 4), 4
    moments, weight = 2 * (4 + 4), 4 + 4
    # The 16-bit weight is made of the fp32 one.
    cast = 4 + 2
    owned = copied + norm + clipped + read + moments + weight + cast
    by_hand = zeroed + checked + averaged + owned / holders
    moved = update_traffic_bytes(memory, 0, StateHolders(holders), training)
    assert moved / PARAMS == pytest.approx(by_hand)


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations on a whole buffer of gradients read and write, but for those
    by which the sum over ranks is made on a CPU."""

    num_bytes = 0
    counted = ("zero_", "fill_", "linalg_vector_norm", "mul_")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().split("::")[-1].split(".")[0]
        if name not in self.counted:
            return result
        outputs = result if isinstance(result, tuple) else (result,)
        # What is filled is not read.
        inputs = () if name in ("zero_", "fill_") else args
        tensors = [each for each in (*inputs, *outputs) if isinstance(each, torch.Tensor)]
        self.num_bytes += sum(t.nbytes for t in tensors if t.numel() >= PARAMS)
        return result


@pytest.mark.parametrize(("layout", "per_token"), [(ONE, False), (TWO, False), (ONE, True)])
def test_a_whole_buffer_is_moved_as_megatron_moves_it(
    layout: str, per_token: bool, tmp_path: Path
) -> None:
    """Zeroed and checked, and scaled by a part of the replicas or by one over the tokens."""
    num_ranks = layout.count("|") + 1
    training = make_workload(
        precision="bf16", use_distributed_optimizer=True, per_token_loss=per_token
    ).training
    parts = ["weights", "gradients", "optimizer", "activations", "buffers"]
    none = dict.fromkeys(parts, 0)
    memory = StageMemory(none | {"gradients": 1024 * 4}, none, 1)
    expected = update_traffic_bytes(memory, 0, StateHolders(num_ranks), training)
    # The norm, clipping and Adam are of what a rank owns.
    expected -= 4 * 1024 * 4 / num_ranks

    def check(rank: int) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer import TransformerConfig

        parallel_state.initialize_model_parallel()
        config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, calculate_per_token_loss=per_token
        )
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, check_for_nan_in_grad=True
        )
        model = DistributedDataParallel(config, ddp, torch.nn.Linear(32, 32, bias=False).bfloat16())
        with Traffic() as moved:
            model.zero_grad_buffer()
            model.finish_grad_sync()
            if per_token:
                model.scale_gradients(0.5)
        assert moved.num_bytes == expected

    in_world(layout, check, tmp_path)


JOB = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 128 --bf16 "
    "--vocab-size 1000 --max-position-embeddings 256 --global-batch-size 16 "
    "--micro-batch-size 2 --use-distributed-optimizer "
)
AWARE = "--use-precision-aware-optimizer "
HALVES = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 "


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        # Main weights are the 16 bits that bf16 lacks; Adam works on gradients as they are.
        (AWARE, StateBytes(2, 4, 2 + 8)),
        (AWARE + HALVES, StateBytes(2, 4, 2 + 4)),
        (AWARE + "--main-grads-dtype bf16 --main-params-dtype fp16", StateBytes(2, 2, 2 + 8)),
        (AWARE + "--exp-avg-dtype fp8 --exp-avg-sq-dtype fp16", StateBytes(2, 4, 2 + 3)),
        # With scales of fp8 as tensors are now, Megatron keeps main weights, and copies gradients.
        (AWARE + "--fp8-format hybrid --fp8-recipe tensorwise", StateBytes(2, 4, 4 + 8)),
        (
            AWARE + HALVES + "--fp8-format hybrid --fp8-recipe mxfp8 --grad-reduce-in-bf16",
            StateBytes(2, 2, 4 + 4, update=4),
        ),
        (AWARE + "--fp8-format hybrid", StateBytes(2, 4, 2 + 8)),
        # Without the flag its details say nothing.
        (HALVES + "--main-grads-dtype bf16", StateBytes(2, 4, 4 + 8)),
    ],
)
def test_a_job_chooses_the_widths_of_its_states(flags: str, found: StateBytes) -> None:
    training = load_workload(None, (JOB + flags).split()).training
    assert state_bytes(training) == found


def test_adam_that_keeps_half_of_each_main_weight_moves_no_other_copy() -> None:
    """It reads and writes the weight and its other half in one kernel."""
    training = load_workload(None, (JOB + AWARE + HALVES).split()).training
    states = state_bytes(training)
    memory = StageMemory(
        {"weights": states.weight, "gradients": states.gradient, "optimizer": states.optimizer,
         "activations": 0, "buffers": 0},
        dict.fromkeys(["weights", "gradients", "optimizer", "activations", "buffers"], 0),
        80 * 10**9,
    )  # fmt: skip
    # Zeroed and checked; norm, clipped, and read; moments; weight and its other half.
    by_hand = 4 + 4 + 4 + (4 + 4) + 4 + 2 * (2 + 2) + 2 * (2 + 2)
    assert update_traffic_bytes(memory, 0, StateHolders(1), training) == by_hand


@pytest.mark.parametrize(
    ("recipe", "moved"), [("tensorwise", 6), ("delayed", 4), ("blockwise", 4), ("mxfp8", 4)]
)
def test_weights_of_layers_are_cast_once_a_step(recipe: Fp8Recipe, moved: int) -> None:
    """Read, and written as they are and transposed; `tensorwise` reads for the maximum first."""
    bf16 = make_workload(precision="bf16").training
    parts = dict.fromkeys(["weights", "gradients", "optimizer", "activations", "buffers"], 0)
    memory = StageMemory(parts, {**parts, "weights": 2 * PARAMS}, 80 * 10**9)
    plain, cast = (
        update_traffic_bytes(memory, 3, StateHolders(8), training)
        for training in (bf16, replace(bf16, fp8=True, fp8_recipe=recipe))
    )
    assert cast - plain == 3 * PARAMS * moved


@pytest.mark.parametrize(
    ("recipe", "owned", "arrived"),
    [
        # Owned: the 16-bit copy is read for the maximum (not with old scales) and cast.  Arrived:
        # read and written as columns.
        ("tensorwise", 2 + 2 + 1, 1 + 1),
        ("delayed", 2 + 1, 1 + 1),
        ("blockwise", 2 + 2 + 1, 1 + 1),
        # Sent in 16 bits, cast both ways and cleared.
        ("mxfp8", 0, 2 + (1 + 1) + 2),
    ],
)
def test_weights_kept_in_fp8_are_cast_by_their_owners(
    recipe: Fp8Recipe, owned: int, arrived: int
) -> None:
    training = make_workload(
        precision="bf16", fp8=True, fp8_recipe=recipe, use_distributed_optimizer=True
    ).training
    kept = replace(training, fp8_param_gather=True)
    none = dict.fromkeys(["weights", "gradients", "optimizer", "activations", "buffers"], 0)
    of_layer = {**none, "gradients": 4 * PARAMS}
    # A tenth of each layer is norms and biases.
    few, most = PARAMS // 10, PARAMS - PARAMS // 10
    plain = {**of_layer, "weights": 2 * PARAMS, "buffers": 2 * PARAMS}
    in_fp8 = {**of_layer, "weights": 2 * few + most, "buffers": most}
    moved = [
        update_traffic_bytes(StageMemory(none, layer, 80 * 10**9), 3, StateHolders(8), own)
        for layer, own in ((plain, replace(training, fp8=False)), (in_fp8, kept))
    ]
    assert moved[1] - moved[0] == 3 * most * (owned / 8 + arrived)
