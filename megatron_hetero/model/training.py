"""Settings of the training in Megatron's words: batch, precision, optimizer, exchanges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from megatron_hetero.hashed import hashed_once

Precision = Literal["fp32", "bf16", "fp16"]
Sends = Literal["as-run", "buffered", "rendezvous"]
Fp8Recipe = Literal["tensorwise", "delayed", "blockwise", "mxfp8"]
TokenDispatcher = Literal["allgather", "alltoall", "flex"]
"""Megatron's `--moe-token-dispatcher-type`."""
CpCommType = Literal["p2p", "a2a", "all_gather"]
"""Megatron's `--cp-comm-type`, the same for all layers."""
TensorOverlap = Literal["gather", "scatter", "bulk_dgrad", "bulk_wgrad", "scatter_dgrad"]
"""Exchanges of a tensor-parallel group under products: Megatron's `tp_comm_overlap_ag`,
`tp_comm_overlap_rs`, `tp_comm_bulk_dgrad`, `tp_comm_bulk_wgrad` and `tp_comm_overlap_rs_dgrad`."""
FusedScores = Literal["nowhere", "divided", "everywhere"]
FusedLoss = Literal["", "native", "te"]
"""Megatron's `--cross-entropy-fusion-impl`; empty without `--cross-entropy-loss-fusion`."""
ONLY_IF_SET: Mapping[str, bool] = {"only_if_set": True}
"""Metadata of a field written only if not at the default: older files keep bytes and hashes."""


def unset_fields(data: Any) -> set[str]:
    """Return the fields of a dataclass that are written only if set, and are not."""
    return {
        each.name
        for each in fields(data)
        if each.metadata.get("only_if_set") and getattr(data, each.name) == each.default
    }


_ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@hashed_once
@dataclass(frozen=True)
class TrainingSpec:
    """Settings of the training on which time, memory and equality depend.

    `global_batch_size` and `micro_batch_size` are in sequences.  `recompute` is Megatron's
    granularity, `recompute_modules` what "selective" means (`model.recompute`).
    `fused_activation`: bias and activation of the MLP are one kernel, which keeps less than torch's
    own operations do.  `fp8`: Transformer Engine's products in fp8 by `fp8_recipe`, Megatron's,
    weights and activations as `precision` has them.  `grouped_experts`: the experts of a rank are
    one call (`--moe-grouped-gemm`).  `fp32_residual_connection`: what layers hand on is in fp32.
    `mixes_precisions`: a plan may let stages whose GPUs lack `precision` compute in fp16 or fp32;
    gradients are in fp32 then.  `sends`: predictions have stages send "as-run", as the trainer of
    the plan does (stock Megatron waits for its sends), "buffered", as trainers do that go on after
    a send, or "rendezvous", as trainers do that wait for the receiver of a large message.
    `fused_scores`: where attention stores no scores without `flash_attention` too
    (`runtime.parallel.fused_rows`): on stages that divide sequences, or everywhere, as of flexible
    sequences.  `token_dispatcher`: how tokens go to experts that are dealt out over replicas.
    `tp_comm_overlap`: exchanges under products; empty where the flag is off, or hides nothing.
    `local_layers`: Megatron's own, not Transformer Engine's.  `unfused_gradients`: a product writes
    the gradient of its weight, which is then added to the main gradient
    (`--no-gradient-accumulation-fusion`).  `fused_loss`: whose fused kernels compute the cross
    entropy.  `state_widths`: bytes of a main weight and of both moments of it under
    `--use-precision-aware-optimizer`; empty without.  `cp_comm_type`: what
    Transformer Engine's attention to parts of sequences sends; unlike kinds count as "p2p".
    `fp8_param_gather`: the weights of layers are kept in fp8 alone, and gathered so.
    `pads_routing`: routers send each expert as many tokens as fp8 takes
    (`--moe-router-padding-for-quantization`), where experts would pad by themselves.
    `fuses_permutation`: tokens are sorted to experts by Transformer Engine's kernels
    (`--moe-permute-fusion`).  `router_bytes`: of an element of the router's product
    (`--moe-router-dtype`); 0 is the job's own.
    """

    global_batch_size: int
    micro_batch_size: int
    precision: Precision = "fp32"
    sequence_parallel: bool = False
    optimizer: Literal["adam", "sgd"] = "adam"
    recompute: Literal["none", "selective", "full"] = "none"
    use_distributed_optimizer: bool = False
    per_token_loss: bool = False
    flash_attention: bool = True
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1
    fused_activation: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    grad_reduce_in_bf16: bool = False
    fp8: bool = False
    fp8_recipe: Fp8Recipe = field(default="tensorwise", metadata=ONLY_IF_SET)
    grouped_experts: bool = field(default=False, metadata=ONLY_IF_SET)
    mixes_precisions: bool = field(default=False, metadata=ONLY_IF_SET)
    fp32_residual_connection: bool = field(default=False, metadata=ONLY_IF_SET)
    sends: Sends = field(default="as-run", metadata=ONLY_IF_SET)
    fused_scores: FusedScores = field(default="nowhere", metadata=ONLY_IF_SET)
    token_dispatcher: TokenDispatcher = field(default="allgather", metadata=ONLY_IF_SET)
    tp_comm_overlap: tuple[TensorOverlap, ...] = field(default=(), metadata=ONLY_IF_SET)
    local_layers: bool = field(default=False, metadata=ONLY_IF_SET)
    unfused_gradients: bool = field(default=False, metadata=ONLY_IF_SET)
    fused_loss: FusedLoss = field(default="", metadata=ONLY_IF_SET)
    state_widths: tuple[int, ...] = field(default=(), metadata=ONLY_IF_SET)
    recompute_modules: tuple[str, ...] = field(default=(), metadata=ONLY_IF_SET)
    cp_comm_type: CpCommType = field(default="p2p", metadata=ONLY_IF_SET)
    fp8_param_gather: bool = field(default=False, metadata=ONLY_IF_SET)
    pads_routing: bool = field(default=False, metadata=ONLY_IF_SET)
    fuses_permutation: bool = field(default=False, metadata=ONLY_IF_SET)
    router_bytes: int = field(default=0, metadata=ONLY_IF_SET)

    @property
    def stock_waits(self) -> bool:
        """Return whether stock Megatron is priced with waiting sends."""
        return self.sends == "as-run"

    @property
    def waits_for_receivers(self) -> bool:
        """Return whether all plans are priced with sends that wait for their receivers."""
        return self.sends == "rendezvous"

    @property
    def hides_gathers(self) -> bool:
        """Return whether new weights travel while first forward passes compute; Megatron asks for
        all three flags."""
        divides = self.use_distributed_optimizer and self.overlap_grad_reduce
        return divides and self.overlap_param_gather

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of a main gradient: fp32, but of the job's elements where fp16 sums its
        own, or `--grad-reduce-in-bf16` asks for it."""
        sums_own = self.precision == "fp16" or self.grad_reduce_in_bf16
        is_own = sums_own and self.precision != "fp32" and not self.mixes_precisions
        return self.element_bytes if is_own else 4

    @property
    def element_bytes(self) -> int:
        """Return the bytes of a weight in products, and of an activation."""
        return _ELEMENT_BYTES[self.precision]

    @property
    def product_input_bytes(self) -> float:
        """Return the bytes of an element that a product of a layer keeps of its input: in fp8 the
        cast of it alone, with its scale (`inputmat.update_usage`, Transformer Engine 2.20)."""
        if not self.fp8:
            return self.element_bytes
        # 4 bytes for 128 elements, or one byte for 32.
        return 1 + 1 / 32 if self.has_block_scales else 1

    @property
    def has_block_scales(self) -> bool:
        """Return whether fp8 tensors have a scale for each block of elements, not one in all."""
        return self.fp8 and self.fp8_recipe in ("blockwise", "mxfp8")

    @property
    def has_fp8_weights(self) -> bool:
        """Return whether the matrices of layers are kept in fp8 alone, with no copy in 16 bits."""
        return self.fp8 and self.fp8_param_gather

    @property
    def gathers_fp8(self) -> bool:
        """Return whether new matrices of layers travel in fp8: those of `mxfp8` have scales that
        Transformer Engine lays out in no buffer, so they travel in 16 bits, through the gradients'
        (`_ParamAndGradBuffer`, `shared_buffer`)."""
        return self.has_fp8_weights and self.fp8_recipe != "mxfp8"

    @property
    def padded_rows(self) -> float:
        """Return the rows that fp8 adds to an expert's on average: those up to the next multiple of
        what its recipe takes (`get_fp8_align_size`, Megatron-core 0.19)."""
        if not self.fp8:
            return 0.0
        return ((32 if self.fp8_recipe == "mxfp8" else 16) - 1) / 2

    @property
    def updates_in_place(self) -> bool:
        """Return whether Adam itself writes the weights, from gradients as they are: no kernel of
        Megatron's copies either."""
        return self.state_widths[:1] == (2,)

    @property
    def residual_bytes(self) -> int:
        """Return the bytes of an element of what layers, and stages, hand on."""
        return 4 if self.fp32_residual_connection else self.element_bytes
