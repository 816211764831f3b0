"""Referee C: HexGen-3's estimator of a fully disaggregated serving plan, written from its formulas.

Source [code]: `scheduler/simulator` of Relaxed-System-Lab/HexGen-3 at `efa3ed9`: `scheduling/
estimator.py` over `core/model_analyzer.py`, a roofline of every operator.  A plan gives each GPU
type's cards to prefill, attention of decode and feed-forward of decode; a role's cards are replicas
of some width, and the feed-forward's have a degree of expert parallelism.  The score is the
throughput of the slowest role.  Attention and feed-forward have equally many replicas.  What we
would not do is kept as it is: a batch of 4 requests for each GPU of a replica, no memory, no links,
experts priced as a dense layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

ROLES = ("pre", "attn", "ffn")
NODE_GPUS = 8
_LINK_BYTES_PER_S = 100e9
_ELEMENT_BYTES = 2.0
_REQUESTS_PER_GPU = 4
_SYNCHRONISATION = 0.05
"""Part of an activation's transfer that each further rank of expert parallelism costs."""


@dataclass(frozen=True)
class Card:
    """A GPU of its table: bytes/s, FLOP/s in 16 bits, on-chip bytes, price."""

    memory_bytes_per_s: float
    flops_per_s: float
    on_chip_bytes: float
    price_per_hour: float


CARDS: Mapping[str, Card] = {
    "H100": Card(3072e9, 1979e12 / 2, 33792e3, 1.56),
    "H20": Card(4096e9, 148e12, 34560e3, 2.0),
    "A100-80GB": Card(2039e9, 312e12, 27648e3, 0.68),
    "L40S": Card(864e9, 181e12, 36352e3, 0.44),
    "RTX-3090": Card(936e9, 71e12, 18432e3, 0.13),
}


@dataclass(frozen=True)
class Shape:
    """A model as the analyzer sees it: a dense Llama."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int


LLAMA_8B = Shape(32, 4096, 14336, 32, 8, 128256)
QWEN3_30B = Shape(48, 2048, 6144, 32, 4, 151936)


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of requests, rounded as its `WorkloadProfile` does."""

    mean_input: int
    mean_output: int

    @property
    def mean_context(self) -> int:
        """Return the tokens that decode attends to on average."""
        return max(1, self.mean_input + max(1, self.mean_output // 2))


def mean_lengths(inputs: Sequence[int], outputs: Sequence[int]) -> Lengths:
    """Return the means of a trace."""
    return Lengths(
        max(1, round(sum(inputs) / len(inputs))), max(1, round(sum(outputs) / len(outputs)))
    )


@dataclass(frozen=True)
class Replica:
    """Cards of one type in one role: width and degree of expert parallelism."""

    role: str
    card: str
    width: int
    experts: int = 1


@dataclass(frozen=True)
class HexGen3:
    """The estimator for one model and one workload."""

    shape: Shape
    lengths: Lengths

    def throughput(self, replica: Replica) -> float:
        """Return the requests per second of a replica; 0 where the model does not divide."""
        shape, width = self.shape, replica.width
        if any(
            size % width for size in (shape.hidden_size, shape.ffn_hidden_size, shape.num_kv_heads)
        ):
            return 0.0
        batch = _REQUESTS_PER_GPU * width
        if replica.role == "pre":
            return batch / self._prefill_s(replica, batch)
        activation_s = shape.hidden_size * batch * _ELEMENT_BYTES / _LINK_BYTES_PER_S
        attention_s, ffn_s = self._decode_layer_s(replica, batch, self.lengths.mean_context)
        if replica.role == "attn":
            kv_bytes = (
                2 * shape.num_layers * shape.num_kv_heads * (shape.hidden_size // shape.num_heads)
            ) * 2
            kv_s = kv_bytes * self.lengths.mean_input * batch / _LINK_BYTES_PER_S
            token_s = (attention_s + activation_s) * shape.num_layers
            return batch / (kv_s + self.lengths.mean_output * token_s)
        if replica.experts > 1:
            ffn_s = ffn_s / replica.experts
            ffn_s += activation_s * _SYNCHRONISATION * (replica.experts - 1)
        return batch / (self.lengths.mean_output * (ffn_s + activation_s) * shape.num_layers)

    def score(self, counts: Mapping[Replica, int]) -> float:
        """Return the requests per second of a plan: those of its slowest role."""
        return min(
            sum(n * self.throughput(replica) for replica, n in counts.items() if replica.role == r)
            for r in ROLES
        )

    def _prefill_s(self, replica: Replica, batch: int) -> float:
        tokens = self.lengths.mean_input
        layer_s = self._layer_s(replica, batch, tokens, queries=tokens)
        shape, card = self.shape, CARDS[replica.card]
        head = shape.hidden_size * shape.vocab_size
        head_bytes = (head + shape.hidden_size + shape.vocab_size) * _ELEMENT_BYTES
        head_s = _roofline_s(card, float(batch * head), head_bytes)
        return sum(layer_s) * shape.num_layers + head_s

    def _decode_layer_s(self, replica: Replica, batch: int, context: int) -> tuple[float, float]:
        return self._layer_s(replica, batch, context, queries=1)

    def _layer_s(
        self, replica: Replica, batch: int, context: int, queries: int
    ) -> tuple[float, float]:
        """Time the two parts of a layer: each request has `queries` new tokens after which
        `context` tokens are there."""
        shape, card, width = self.shape, CARDS[replica.card], replica.width
        rows = batch * queries
        hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
        kv = hidden * shape.num_kv_heads // shape.num_heads // width

        def product_s(inner: int, outer: int) -> float:
            moved = inner * outer + rows * (inner + outer)
            return _roofline_s(card, 2.0 * rows * inner * outer, moved * _ELEMENT_BYTES)

        def elements_s(operations: float, moved: float) -> float:
            return _roofline_s(card, rows * hidden * operations, rows * hidden * moved * 2.0)

        attention_s = (
            product_s(hidden, hidden // width)
            + 2 * product_s(hidden, kv)
            + product_s(hidden // width, hidden)
            + self._scores_s(card, batch, context, queries)
            + elements_s(1, 2)
            + elements_s(7, 2)
        )
        ffn_s = (
            2 * product_s(hidden, ffn // width)
            + product_s(ffn // width, hidden)
            + elements_s(2, 3)
            + elements_s(1, 2)
            + elements_s(7, 2)
        )
        return attention_s, ffn_s

    def _scores_s(self, card: Card, batch: int, context: int, queries: int) -> float:
        """Time fused attention, whole on every card whatever the width."""
        shape = self.shape
        head_size = shape.hidden_size // shape.num_heads
        pairs = batch * shape.num_heads * queries * context
        rows = min(ceil(card.on_chip_bytes / (_ELEMENT_BYTES * head_size)), head_size)
        kv_read = ceil(queries / rows) * context * head_size * batch * shape.num_kv_heads * 2
        query = queries * head_size * batch * shape.num_heads
        moved = (query + 2 * pairs + kv_read) * _ELEMENT_BYTES
        return _roofline_s(card, pairs * (4.0 * head_size + 5), moved)


def _roofline_s(card: Card, flops: float, num_bytes: float) -> float:
    return max(flops / card.flops_per_s, num_bytes / card.memory_bytes_per_s)
