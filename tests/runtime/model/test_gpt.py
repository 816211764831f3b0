"""What Megatron leaves to the script: the batch of a stage, the loss, the parts of its layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.rerun_state_machine import destroy_rerun_state_machine
from megatron.core.timers import Timers
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.training import global_vars

from megatron_hetero.runtime import backend
from megatron_hetero.runtime.megatron import parallel_state
from megatron_hetero.runtime.model.gpt import forward_step, layer_spec, loss_func
from megatron_hetero.runtime.model.moe.dealt_experts import DealtMoELayer
from megatron_hetero.runtime.model.norm import SequenceParallelTorchNorm
from megatron_hetero.runtime.model.samples.packed import PackedAttention
from megatron_hetero.runtime.parallel.context_attention import GatheredAttention
from tests.runtime.toy_model import ToyRank, in_world
from tests.runtime.workloads import plan

ARGS: dict[str, Any] = {
    "sft": False, "dataloader_inter_document_masking": False, "qk_clip": False,
    "log_max_attention_logit": False, "check_for_nan_in_loss_and_grad": True,
    "check_for_spiky_loss": False, "create_attention_mask_in_dataloader": True,
    "reset_attention_mask": False, "mtp_num_layers": None, "micro_batch_size": 2, "seq_length": 3,
}  # fmt: skip


@pytest.fixture(autouse=True)
def args(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Megatron's arguments, as far as they are read here."""
    made = SimpleNamespace(**ARGS)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", made)
    monkeypatch.setattr(global_vars, "_GLOBAL_TIMERS", Timers(0, "max"))
    yield made
    destroy_rerun_state_machine()  # which the loss asks for, and jobs make themselves


def test_the_loss_is_the_sum_over_counted_tokens() -> None:
    losses = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    total, count, report = loss_func(mask, losses)
    assert (total.item(), int(count)) == (51.0, 4) and count.dtype == torch.int
    assert report["lm loss"].tolist() == [51.0, 4.0] and not report["lm loss"].requires_grad
    total.backward()
    assert torch.equal(losses.grad, mask.float())  # type: ignore[arg-type]
    half = loss_func(mask, losses.detach().bfloat16())
    assert half[0].dtype == torch.float32 and float(half[0]) == 51.0


@contextmanager
def cpu_backend() -> Iterator[None]:
    """Megatron asks for the GPU that it blames."""
    backend.activate_cpu_backend()
    try:
        yield
    finally:
        backend.deactivate_cpu_backend()


@pytest.mark.parametrize(("wrong", "says"), [("nan", "NaN"), ("inf", "Inf")])
def test_a_loss_that_is_no_number_ends_the_job_where_flags_ask(
    wrong: str, says: str, args: SimpleNamespace
) -> None:
    losses = torch.tensor([[1.0, float(wrong)]])
    with cpu_backend(), pytest.raises(RuntimeError, match=f"found {says} in local forward loss"):
        loss_func(torch.ones(1, 2), losses)
    args.check_for_nan_in_loss_and_grad = False
    assert not torch.isfinite(loss_func(torch.ones(1, 2), losses)[0])


def modules_of(args: SimpleNamespace, **changes: Any) -> set[Any]:
    """All modules of a layer's spec, at any depth."""
    config: Any = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, transformer_impl="local", **changes
    )
    model = SimpleNamespace(
        transformer=config, restore_modelopt_state=False, use_te_op_fuser=False,
        transformer_config=config, normalization="LayerNorm",
    )  # fmt: skip
    found: set[Any] = set()

    def walk(part: Any) -> None:
        if isinstance(part, type):
            found.add(part)
        elif isinstance(part, TransformerBlockSubmodules):
            for layer in part.layer_specs or ():
                walk(layer)
        elif isinstance(part, partial):  # as Megatron has experts
            walk(part.func)
        elif hasattr(part, "module"):
            walk(part.module)
            for own in vars(part.submodules).values() if part.submodules is not None else ():
                walk(own)

    walk(layer_spec(model))
    return found


def test_parts_stand_in_for_megatrons_where_the_job_needs_them(args: SimpleNamespace) -> None:
    plain = modules_of(args)
    assert DotProductAttention in plain and WrappedTorchNorm in plain
    assert plain.isdisjoint({GatheredAttention, PackedAttention, SequenceParallelTorchNorm})
    divided = modules_of(args, context_parallel_size=2)
    assert GatheredAttention in divided and DotProductAttention not in divided
    assert divided - {GatheredAttention} == plain - {DotProductAttention}
    args.dataloader_inter_document_masking = True
    packed = modules_of(args)
    assert PackedAttention in packed and DotProductAttention not in packed


def test_experts_are_always_of_the_kind_that_can_be_dealt_out(
    args: SimpleNamespace, tmp_path: Path
) -> None:
    layout = "tp1:4 @1"

    def check(rank: int) -> None:
        parallel_state.fill(ToyRank(plan(layout), rank, False, overlap=False).groups)
        found = modules_of(args, num_moe_experts=2, add_bias_linear=False)
        assert DealtMoELayer in found and MoELayer not in found
        normed = modules_of(args, num_moe_experts=2, add_bias_linear=False,
                            fp32_residual_connection=True)  # fmt: skip
        assert SequenceParallelTorchNorm in normed and WrappedTorchNorm not in normed

    in_world(layout, check, tmp_path)


class Stub(torch.nn.Module):
    """A model that keeps what it was given."""

    vp_stage = None

    def forward(self, tokens: Any, position_ids: Any, mask: Any, **named: Any) -> Any:
        self.given = {"tokens": tokens, "position_ids": position_ids, "mask": mask, **named}
        return torch.ones(2, 3)


def test_a_tensor_parallel_group_shares_what_its_first_rank_reads(
    args: SimpleNamespace, tmp_path: Path
) -> None:
    """Other ranks read nothing: their iterators are none."""
    batch = {
        "tokens": torch.arange(6).view(2, 3),
        "labels": torch.arange(6).view(2, 3) + 1,
        "loss_mask": torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]]),
        "attention_mask": torch.ones(2, 1, 3, 3, dtype=torch.bool).triu(1),
        "position_ids": torch.arange(3).repeat(2, 1),
    }
    layout = "tp2:4 @1 | tp1:4 @1"

    def check(rank: int) -> None:
        parallel_state.fill(ToyRank(plan(layout), rank, False, overlap=False).groups)
        model = Stub()
        data = iter([batch]) if rank != 1 else None
        output, loss = forward_step(data, model)
        assert torch.equal(model.given["tokens"], batch["tokens"])
        assert torch.equal(model.given["labels"], batch["labels"])
        assert torch.equal(model.given["mask"], batch["attention_mask"])
        assert torch.equal(model.given["position_ids"], batch["position_ids"])
        assert model.given["packed_seq_params"] is None
        total, count, _ = loss(output)
        assert (float(total), int(count)) == (5.0, 5)

    in_world(layout, check, tmp_path)
