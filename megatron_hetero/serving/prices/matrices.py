"""The matrices of a decoder layer on a GPU of a tensor-parallel group, divided as in engines."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hetero.model.spec import ModelSpec


@dataclass(frozen=True)
class Matrix:
    """A matrix that tokens are multiplied with.

    `num_experts` matrices of this size where each token takes `active` of them; 1 and 1 for a dense
    one.
    """

    depth: int
    columns: int
    num_experts: int = 1
    active: int = 1

    @property
    def elements(self) -> int:
        """Return the elements of all of them."""
        return self.depth * self.columns * self.num_experts

    def touched(self, num_tokens: float) -> float:
        """Return how many of the experts some tokens reach, on average, if all are equally
        likely."""
        if self.num_experts == 1:
            return 1.0
        # Each row picks an expert; a row misses a given one with (1 - 1/n).
        rows = num_tokens * self.active
        missed = float((1 - 1 / self.num_experts) ** rows)
        return self.num_experts * (1 - missed)


def layer_matrices(model: ModelSpec, width: int) -> tuple[Matrix, ...]:
    """Return the matrices of a layer of one kind on a GPU of a group.

    Args:
        model: with layers all alike (`ModelSpec.kinds`).
        width: of the group; heads and columns divide by it.
    """
    return (*_attention(model, width), *_mlp(model, width))


def _attention(model: ModelSpec, width: int) -> tuple[Matrix, ...]:
    hidden, heads = model.hidden_size, model.num_attention_heads // width
    query, value = model.head_sizes
    out = Matrix(heads * value, hidden)
    if not model.kv_lora_rank:
        # Fewer groups than ranks are copied, so each rank has one at least.
        groups = -(-model.num_query_groups // width)
        gate = 2 if model.attention_output_gate else 1
        return Matrix(hidden, (heads * gate + 2 * groups) * model.kv_channels), out
    # Projections to the latents are whole on every rank.
    down = Matrix(hidden, model.q_lora_rank + model.kv_lora_rank + model.qk_pos_emb_head_dim)
    up = Matrix(model.q_lora_rank or hidden, heads * query)
    latent = Matrix(model.kv_lora_rank, heads * (model.qk_head_dim + model.v_head_dim))
    return down, up, latent, out


def _mlp(model: ModelSpec, width: int) -> tuple[Matrix, ...]:
    hidden, first = model.hidden_size, 2 if model.gated_mlp else 1
    columns = model.mlp_columns // width
    if not model.num_experts:
        return Matrix(hidden, first * columns), Matrix(columns, hidden)
    sizes = model.num_experts, model.moe_router_topk
    experts = (
        # The router is whole, and its experts are divided like dense columns.
        Matrix(hidden, model.num_experts),
        Matrix(hidden, first * columns, *sizes),
        Matrix(columns, hidden, *sizes),
    )
    shared = model.moe_shared_expert_intermediate_size // width
    if not shared:
        return experts
    return *experts, Matrix(hidden, first * shared), Matrix(shared, hidden)
