"""Transformer Engine's linear layers in fp8, divided over ranks and whole, on a CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

ROWS, WIDTH, OUT = 48, 96, 96
"""Tokens, and columns in and out; 2 and 3 ranks divide them into multiples of 16."""


def divided_beside_whole(num_ranks: int, recipe: str, is_reduced: bool, folder: str) -> Any:
    """Run a column-parallel layer on parts of the sequence, and one process with all of it.

    Every rank's part of the weight has one largest number, so that all scales are those of the
    whole where the ranks agree on that of their inputs. The first rows are far larger than the
    others: a rank without them, left alone, scales otherwise.

    Args:
        num_ranks: ranks that divide the layer.
        recipe: "tensorwise" or "delayed".
        is_reduced: False leaves out the ranks' agreement, which the layer asks for.
        folder: for the files of the ranks.
    Returns:
        Whether the outputs of both steps are equal bit for bit, the weight gradients too, and the
        largest distance of the input's gradients, relative to the largest.
    """
    import torch

    from megatron_hetero.runtime.job.local.jobs import LocalJob
    from megatron_hetero.runtime.job.local.launch import run_jobs

    at = Path(folder)

    def run(rank: int, size: int) -> None:
        torch.save(_trained(rank, size, recipe, is_reduced), at / f"{size}-{rank}.pt")

    def ranks(rank: int) -> None:
        run(rank, num_ranks)

    def one(rank: int) -> None:
        run(0, 1)

    at.mkdir(parents=True, exist_ok=True)
    run_jobs([LocalJob("ranks", num_ranks, ranks, at / "ranks")], 120)
    run_jobs([LocalJob("one", 1, one, at / "one")], 120)
    parts = [torch.load(at / f"{num_ranks}-{rank}.pt") for rank in range(num_ranks)]
    whole = torch.load(at / "1-0.pt")
    same_out = all(
        torch.equal(torch.cat([part["out"][step] for part in parts], -1), whole["out"][step])
        for step in range(2)
    )
    same_weight = torch.equal(torch.cat([part["weight"] for part in parts]), whole["weight"])
    of_input = torch.cat([part["input"] for part in parts]).float()
    far = (of_input - whole["input"].float()).abs().max() / whole["input"].float().abs().max()
    return same_out, same_weight, float(far)


def _trained(rank: int, size: int, recipe: str, is_reduced: bool) -> dict[str, Any]:
    """Train a layer two steps; return its outputs, and the second step's gradients."""
    import torch
    import torch.distributed as dist

    from megatron_hetero.runtime import backend

    backend.activate_cpu_backend()
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    if not is_reduced:
        unchanged = Float8CurrentScalingQuantizer.__call__

        def alone(self: Any, *given: Any, **named: Any) -> Any:
            self.with_amax_reduction = False
            return unchanged(self, *given, **named)

        Float8CurrentScalingQuantizer.__call__ = alone
    store = dist.FileStore(os.environ["MEGATRON_HETERO_STORE"], size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    group = dist.group.WORLD
    drawn = torch.Generator().manual_seed(7)
    inputs = torch.randn(2, ROWS, WIDTH, generator=drawn)
    inputs[:, :4] *= 50
    weight = torch.randn(OUT, WIDTH, generator=drawn).clamp(-2, 2)
    weight[::16, 0] = 3.0
    gradients = torch.randn(2, ROWS, OUT, generator=drawn).clamp(-2, 2)
    gradients[:, :, ::16] = 4.0
    layer = te.Linear(
        WIDTH, OUT, bias=False, params_dtype=torch.bfloat16, device="cpu",
        parallel_mode="column", sequence_parallel=size > 1, tp_group=group, tp_size=size,
    )  # fmt: skip
    rows, columns = ROWS // size, OUT // size
    own_rows = slice(rank * rows, (rank + 1) * rows)
    own = slice(rank * columns, (rank + 1) * columns)
    with torch.no_grad():
        layer.weight.copy_(weight[own])
    # Tensors of two steps: a delayed scale of the second comes from the first.
    made = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=4)
    if recipe == "tensorwise":
        made = Float8CurrentScaling(fp8_format=Format.HYBRID)
    outs = []
    for step in range(2):
        layer.weight.grad = None
        given = inputs[step, own_rows].bfloat16().requires_grad_()
        with te.autocast(enabled=True, recipe=made, amax_reduction_group=group):
            out = layer(given)
        out.backward(gradients[step, :, own].bfloat16())
        outs.append(out.detach())
    assert given.grad is not None and layer.weight.grad is not None
    return {"out": outs, "weight": layer.weight.grad, "input": given.grad}


def casts() -> dict[str, bool]:
    """Cast tensors with Transformer Engine's own quantizers; return what holds, by name."""
    import torch

    from megatron_hetero.errors import UnsupportedError
    from megatron_hetero.runtime import backend

    backend.activate_cpu_backend()
    import transformer_engine_torch as compiled
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import (
        Float8CurrentScalingQuantizer,
        Float8Quantizer,
    )

    x = torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(1)) * 5
    largest = x.abs().max()
    found = {}
    for name, kind, most, bits in (
        ("e4m3", DType.kFloat8E4M3, 448.0, 3),
        ("e5m2", DType.kFloat8E5M2, 57344.0, 2),
    ):
        cast = Float8CurrentScalingQuantizer(kind, device="cpu")(x)
        found[f"{name} scale"] = torch.allclose(cast._scale_inv, largest / most, rtol=1e-6)
        wide = cast.dequantize()
        # Half of the last bit, and of the least number for numbers near 0.
        near = x.abs() * 2.0 ** -(bits + 1) + cast._scale_inv * 2.0**-9
        found[f"{name} rounds to nearest"] = bool(((x - wide).abs() <= near).all())
        found[f"{name} transpose"] = torch.equal(cast._transpose.movedim(0, -1), cast._data)
    power = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device="cpu", force_pow_2_scales=True)
    scale = 1 / power(x)._scale_inv
    found["power of two"] = torch.frexp(scale).mantissa.item() == 0.5 and bool(
        448 / largest / 2 < scale <= 448 / largest
    )
    zero = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device="cpu")(torch.zeros(16, 16))
    found["zeros"] = zero._scale_inv.item() == 1 and not zero.dequantize().any()
    # A delayed scale is used as it is, saturates, and notes the largest of several casts.
    delayed = Float8Quantizer(torch.full((1,), 200.0), torch.zeros(1), DType.kFloat8E4M3)
    late = delayed(x)
    delayed(x / 2)
    found["delayed scale"] = late._scale_inv.item() == torch.tensor(1 / 200.0).item()
    found["delayed saturates"] = abs(late.dequantize().abs().max().item() - 448 / 200) < 1e-6
    found["delayed amax"] = delayed.amax.item() == largest.item()
    before = late._data.clone()
    compiled.quantize(-x, delayed, late, torch.ones(1))
    found["noop"] = torch.equal(before, late._data)
    try:
        Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True)(x)
        found["blocks refused"] = False
    except UnsupportedError as error:
        found["blocks refused"] = "tensorwise" in str(error)
    # A product takes the form that a GPU takes, or says that it is missing.
    rows = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device="cpu", columnwise=False)(x)
    try:
        compiled.generic_gemm(
            rows, False, x, False, None, None, None, None, None, False, None, False, None, 0, False,
            False,
        )  # fmt: skip
        found["missing transpose"] = False
    except RuntimeError as error:
        found["missing transpose"] = "transpose" in str(error)
    return found
