"""The small model of a rehearsal, and how many bytes of the real one its tensors stand for.

Every run of decoder layers that has the same holders in all replicas becomes one layer, so that
stages, boundaries and sets of gradient holders stay what they are.  Where gradients are exchanged
during the backward pass, a run becomes up to `OVERLAPPING_PIECES`.  Sizes are shrunk as `verify`
shrinks them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from megatron_hetero.cost.buckets import EMBEDDING
from megatron_hetero.cost.compute import ELEMENT_BYTES
from megatron_hetero.cost.memory import state_bytes
from megatron_hetero.cost.parameters import embedding_params, head_params, layer_params
from megatron_hetero.cost.share import even_share
from megatron_hetero.model.blocks import padded_vocab_size
from megatron_hetero.model.spec import ModelSpec, Workload
from megatron_hetero.plan.chunks import stage_chunks
from megatron_hetero.plan.plan import LayerRange, Plan, Replica
from megatron_hetero.runtime.verify.shrink import Shrunk, shrink

_SMALL_ELEMENT_BYTES = 4
OVERLAPPING_PIECES = 4
"""Layers of the small model for a run in a first stage that overlaps: how finely its exchange can
begin."""


@dataclass(frozen=True)
class SmallModel:
    """`shrunk` has the small plan and flags; the rest says what its tensors stand for.

    `layer_runs`: [small layer] -> real layers.  `activation_ratio`: real bytes for each byte that
    crosses a boundary.  `weight_ratio`: bytes of a new weight for each byte of gradient.
    """

    shrunk: Shrunk
    layer_runs: tuple[int, ...]
    activation_ratio: float
    weight_ratio: float
    _gradient_bytes: int
    _vector_bytes: float
    _matrix_bytes: float
    _embedding_bytes: float
    _positions_bytes: float

    def gradient_bytes(self, name: str) -> float:
        """Real bytes of gradient for each element of parameter `name` of the small model."""
        is_vector = name.endswith(".bias") or "norm" in name
        if name.startswith("decoder.layers."):
            each = self._vector_bytes if is_vector else self._matrix_bytes
            return each * self.layer_runs[int(name.split(".")[2])]
        if is_vector:
            return self._vector_bytes
        if "position_embeddings" in name:
            return self._positions_bytes
        return self._embedding_bytes

    def elements_of(self, num_params: int) -> int:
        """Elements of the small model's matrices that stand for so many real parameters."""
        mean_run = sum(self.layer_runs) / len(self.layer_runs)
        return max(1, round(num_params * self._gradient_bytes / (self._matrix_bytes * mean_run)))

    def real_layer(self, name: str) -> int:
        """The first real layer for which parameter `name` stands; `EMBEDDING` before them, the
        number of layers behind them."""
        if name.startswith("decoder.layers."):
            return sum(self.layer_runs[: int(name.split(".")[2])])
        return EMBEDDING if name.startswith("embedding.") else sum(self.layer_runs)


def small_model(plan: Plan, workload: Workload) -> SmallModel:
    """The rehearsal's model.

    Raises:
        UnsupportedError: the workload asks for what no asymmetric plan trains yet.
    """
    cuts = sorted({0, *(end for replica in plan.replicas for end in _ends(replica))})
    if workload.training.overlap_grad_reduce:
        first_stages = [chunk for r in plan.replicas for chunk in stage_chunks(r.stages[0])]
        cuts = _with_pieces(cuts, first_stages)
    small_plan = replace(
        plan, replicas=tuple(_renumbered(r, cuts) for r in plan.replicas), estimates=None
    )
    num_layers = len(cuts) - 1
    small_workload = replace(workload, model=replace(workload.model, num_layers=num_layers))
    shrunk = shrink(small_plan, small_workload, max_layers=num_layers)
    real, small = workload.model, shrunk.model
    training = workload.training
    widths = plan.layout.tensor_parallel_widths
    rows, small_rows = padded_vocab_size(real, widths), _small_rows(shrunk)
    gradient = state_bytes(training).gradient
    crossing = real.seq_length * real.hidden_size * ELEMENT_BYTES[training.precision]
    small_crossing = small.seq_length * small.hidden_size * _SMALL_ELEMENT_BYTES
    positions = embedding_params(real, 1, 0)
    layer, small_layer = (layer_params(m, even_share(m, 1)) for m in (real, small))
    matrices, small_matrices = _layer_matrices(real), _layer_matrices(small)
    return SmallModel(
        shrunk,
        tuple(b - a for a, b in pairwise(cuts)),
        crossing / small_crossing,
        state_bytes(training).weight / gradient,
        gradient,
        gradient * (layer - matrices) / (small_layer - small_matrices),
        gradient * matrices / small_matrices,
        gradient * head_params(real, 1, rows, False) / head_params(small, 1, small_rows, False),
        gradient * positions / max(embedding_params(small, 1, 0), 1),
    )


def _with_pieces(cuts: list[int], chunks: list[LayerRange]) -> list[int]:
    """Runs inside of any of `chunks` cut into pieces."""
    found = set(cuts)
    for first, last in pairwise(cuts):
        if any(c.first_layer <= first and last <= c.first_layer + c.num_layers for c in chunks):
            num = min(OVERLAPPING_PIECES, last - first)
            found |= {first + (last - first) * i // num for i in range(num)}
    return sorted(found)


def _layer_matrices(model: ModelSpec) -> int:
    """Elements of the four matrices of a layer, two of them once for each expert."""
    query = model.num_attention_heads * model.kv_channels
    query_key_value = query + 2 * model.num_query_groups * model.kv_channels
    mlp = (model.num_experts or 1) * model.mlp_columns * (3 if model.gated_mlp else 2)
    return model.hidden_size * (query_key_value + query + mlp)


def _small_rows(shrunk: Shrunk) -> int:
    from megatron_hetero.runtime.verify.text import VOCAB_SIZE

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
