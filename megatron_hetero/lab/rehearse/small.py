"""The small model of a rehearsal, and the real bytes behind the small tensors.

Every run of decoder layers with the same holders in all replicas becomes one layer, so that stages,
boundaries and sets of gradient holders stay as they are. Where the number of buckets matters
(gradients exchanged during the backward pass; the distributed optimizer, which has as many buckets
under way), a run becomes as many layers as the real buckets need. Sizes are shrunk as in `verify`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron_hetero.cost.memory.states import state_bytes
from megatron_hetero.cost.parameters import embedding_params, head_params, layer_params
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.sync.buckets import EMBEDDING, MAX_BUCKET_ELEMENTS
from megatron_hetero.errors import UnsupportedError
from megatron_hetero.lab.verify.small.shrink import Shrunk, shrink
from megatron_hetero.model.blocks import padded_vocab_size
from megatron_hetero.model.spec import ModelSpec, Workload
from megatron_hetero.plan.chunks import stage_chunks
from megatron_hetero.plan.plan import LayerRange, Plan, Replica

_SMALL_ELEMENT_BYTES = 4
_PIECES_OF_BUCKET = 4
"""Least layers of the small model in a bucket, where a single real layer does not fill a bucket."""


@dataclass(frozen=True)
class SmallModel:
    """The small plan and flags (`shrunk`), and the meaning of the small model's tensors.

    `layer_runs` is [small layer] -> real layers. `activation_ratio` is the real bytes for each byte
    that crosses a boundary, `weight_ratio` the bytes of a new weight for each byte of gradient.
    """

    shrunk: Shrunk
    layer_runs: tuple[int, ...]
    activation_ratio: float
    weight_ratio: float
    _gradient_bytes: int
    _vector_bytes: float
    _matrix_bytes: Mapping[str, float]
    _mean_matrix_bytes: float
    _embedding_bytes: float
    _positions_bytes: float

    def gradient_bytes(self, name: str) -> float:
        """Return the real bytes of gradient for each element of the small parameter `name`."""
        is_vector = name.endswith(".bias") or "norm" in name
        if name.startswith("decoder.layers."):
            # A matrix of a layer, or else a vector of the layer.
            (each,) = [
                num_bytes
                for matrix, num_bytes in self._matrix_bytes.items()
                if matrix in name and not is_vector
            ] or [self._vector_bytes]
            return each * self.layer_runs[int(name.split(".")[2])]
        if is_vector:
            return self._vector_bytes
        if "position_embeddings" in name:
            return self._positions_bytes
        return self._embedding_bytes

    def real_elements(self, name: str, num_elements: int) -> int:
        """Return the number of real parameters that elements of parameter `name` stand for."""
        return round(num_elements * self.gradient_bytes(name) / self._gradient_bytes)

    def elements_of(self, num_params: int) -> int:
        """Return the elements of the small model's matrices that stand for `num_params`."""
        # A small layer stands for a run of real layers, of this length on average.
        mean_run = sum(self.layer_runs) / len(self.layer_runs)
        stands_for = self._mean_matrix_bytes * mean_run / self._gradient_bytes
        return max(1, round(num_params / stands_for))

    def real_layer(self, name: str) -> int:
        """Return the first real layer that parameter `name` stands for.

        Parameters before the layers give `EMBEDDING`, those behind them the number of layers.
        """
        if name.startswith("decoder.layers."):
            return sum(self.layer_runs[: int(name.split(".")[2])])
        return EMBEDDING if name.startswith("embedding.") else sum(self.layer_runs)


def small_model(plan: Plan, workload: Workload) -> SmallModel:
    """Build the rehearsal's model.

    Raises:
        UnsupportedError: the model's layers have other matrices than those whose messages are
            sized here.
    """
    _refuse_other_matrices(plan, workload.model)
    # Cut wherever a stage of any replica ends: one small layer for each run between cuts.
    cuts = sorted({0, *(end for replica in plan.replicas for end in _ends(replica))})
    # Where buckets count, cut further, for as many of them as the real model has.
    chunks = _with_counted_buckets(plan, workload)
    if chunks:
        layer = layer_params(workload.model, even_share(workload.model, 1))
        cuts = _with_pieces(cuts, chunks, MAX_BUCKET_ELEMENTS // (_PIECES_OF_BUCKET * layer))
    small_plan = replace(
        plan, replicas=tuple(_renumbered(r, cuts) for r in plan.replicas), estimates=None
    )
    num_layers = len(cuts) - 1
    small_workload = replace(workload, model=replace(workload.model, num_layers=num_layers))
    # Shrink the sizes too.
    shrunk = shrink(small_plan, small_workload, max_layers=num_layers)
    real, small = workload.model, shrunk.model
    training = workload.training
    widths = plan.layout.tensor_parallel_widths
    # Ratios of real to small bytes: activations, then each kind of gradient.
    rows, small_rows = padded_vocab_size(real, widths), _small_rows(shrunk)
    gradient = state_bytes(training).gradient
    crossing = real.seq_length * real.hidden_size * training.element_bytes
    small_crossing = small.seq_length * small.hidden_size * _SMALL_ELEMENT_BYTES
    positions = embedding_params(real, 1, 0)
    layer, small_layer = (layer_params(m, even_share(m, 1)) for m in (real, small))
    sizes, small_sizes = _layer_matrices(real), _layer_matrices(small)
    matrices, small_matrices = sum(sizes.values()), sum(small_sizes.values())
    return SmallModel(
        shrunk,
        tuple(b - a for a, b in pairwise(cuts)),
        crossing / small_crossing,
        state_bytes(training).weight / gradient,
        gradient,
        gradient * (layer - matrices) / (small_layer - small_matrices),
        {name: gradient * size / small_sizes[name] for name, size in sizes.items()},
        gradient * matrices / small_matrices,
        gradient * head_params(real, 1, rows, False) / head_params(small, 1, small_rows, False),
        gradient * positions / max(embedding_params(small, 1, 0), 1),
    )


def _refuse_other_matrices(plan: Plan, model: ModelSpec) -> None:
    """Refuse models whose gradients travel in other messages than those of four matrices."""
    shapes = [stage.shape for replica in plan.replicas for stage in replica.stages]
    dealt = any(shape.expert_shares or shape.expert_groups for shape in shapes)
    found = {
        "multi-latent attention": model.kv_lora_rank > 0,
        "dense layers among layers with experts": bool(model.moe_layer_freq),
        "a shared expert": model.moe_shared_expert_intermediate_size > 0,
        "experts dealt out (ep)": dealt,
    }
    named = [what for what, is_there in found.items() if is_there]
    if named:
        raise UnsupportedError(
            f"a job with {' and '.join(named)} cannot be rehearsed yet: the messages of its "
            "gradients have other sizes than those of a plain layer. `simulate` prices it, and "
            "`verify` trains it."
        )


def _with_counted_buckets(plan: Plan, workload: Workload) -> list[LayerRange]:
    """Return the layers with as many buckets in the small model as in the real model."""
    training = workload.training
    return [
        chunk
        for replica in plan.replicas
        for s, stage in enumerate(replica.stages)
        for chunk in stage_chunks(stage)
        if training.use_distributed_optimizer or (training.overlap_grad_reduce and s == 0)
    ]


def _with_pieces(cuts: list[int], chunks: list[LayerRange], most_layers: int) -> list[int]:
    """Cut the runs inside any of `chunks` into pieces of at most `most_layers` layers (or one)."""
    found = set(cuts)
    # Only runs that lie whole in a chunk whose buckets count.
    for first, last in pairwise(cuts):
        if any(c.first_layer <= first and last <= c.first_layer + c.num_layers for c in chunks):
            found |= set(range(first, last, max(1, most_layers)))
    return sorted(found)


def _layer_matrices(model: ModelSpec) -> dict[str, int]:
    """Return the elements of the four matrices of a layer, by a part of their names in Megatron.

    Two of them hold all experts together. Vectors and a router are small beside them.
    """
    query = model.num_attention_heads * model.kv_channels
    gated = query if model.attention_output_gate else 0
    query_key_value = query + gated + 2 * model.num_query_groups * model.kv_channels
    # Experts of a layer together are one wide MLP.
    columns = (model.num_experts or 1) * model.mlp_columns
    return {
        "linear_qkv": model.hidden_size * query_key_value,
        "linear_proj": model.hidden_size * query,
        "linear_fc1": model.hidden_size * columns * (2 if model.gated_mlp else 1),
        "linear_fc2": model.hidden_size * columns,
    }


def _small_rows(shrunk: Shrunk) -> int:
    from megatron_hetero.lab.verify.small.text import VOCAB_SIZE

    return -(-VOCAB_SIZE // shrunk.vocab_multiple) * shrunk.vocab_multiple


def _ends(replica: Replica) -> list[int]:
    return [
        chunk.first_layer + chunk.num_layers
        for stage in replica.stages
        for chunk in stage_chunks(stage)
    ]


def _renumbered(replica: Replica, cuts: list[int]) -> Replica:
    stages = []
    for stage in replica.stages:
        chunks = []
        for chunk in stage_chunks(stage):
            # Every end of a chunk is a cut, so that the index exists.
            first = cuts.index(chunk.first_layer)
            end = cuts.index(chunk.first_layer + chunk.num_layers)
            chunks.append(LayerRange(first, end - first))
        shape = replace(stage.shape, num_layers=sum(chunk.num_layers for chunk in chunks))
        stages.append(
            replace(
                stage,
                first_layer=chunks[0].first_layer,
                shape=shape,
                recompute_num_layers=_fewer(stage.recompute_num_layers, shape.num_layers),
                chunks=tuple(chunks) if stage.chunks else (),
            )
        )
    return replace(replica, stages=tuple(stages))


def _fewer(num_recomputed: int | None, num_layers: int) -> int | None:
    return None if num_recomputed is None else min(num_recomputed, num_layers)
