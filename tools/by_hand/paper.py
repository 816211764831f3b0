"""The job and the plan, read from plan.json without megatron_hetero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import lcm
from typing import Any


class NotByHandError(Exception):
    """Something that the sheet of paper has no formula for; the text names it."""


_NOT_BY_HAND = (
    "--qk-layernorm", "--add-qkv-bias", "--fp8-format", "--fp8-hybrid", "--multi-latent-attention",
    "--moe-shared-expert-intermediate-size", "--moe-layer-freq", "--squared-relu",
    "--grad-reduce-in-bf16", "--mtp-num-layers", "--no-bias-swiglu-fusion", "--rotary-percent",
    "--use-distributed-optimizer-fp8", "--moe-router-topk-limited-devices", "--moe-grouped-gemm",
    "--no-gradient-accumulation-fusion",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What is trained, by Megatron's own flags."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_size: int
    sequence: int
    positions: int
    vocabulary: int
    pad_to: int
    matrices: int
    experts: int
    top_k: int
    norm_vectors: int
    has_bias: bool
    is_tied: bool
    is_rope: bool
    is_local: bool
    hidden_dropout: bool
    attention_dropout: bool
    element: int
    precision: str
    batch: int
    micro_batch: int
    recompute: str
    sequence_parallel: bool
    divides_states: bool
    overlaps: bool

    @property
    def query(self) -> int:
        """Return the width of all queries."""
        return self.heads * self.head_size

    @property
    def key(self) -> int:
        """Return the width of all keys."""
        return self.groups * self.head_size

    @property
    def attention_weights(self) -> int:
        """Count the weights of the two products around attention."""
        return self.hidden * (2 * self.query + 2 * self.key)

    @property
    def mlp_weights(self) -> int:
        """Count the weights of one MLP or one expert."""
        return self.matrices * self.hidden * self.ffn

    @property
    def whole_layer(self) -> int:
        """Count the parameters of a layer that every GPU of a group holds: norms, biases after the
        second products, the router."""
        whole = 2 * self.norm_vectors * self.hidden + self.experts * self.hidden
        return whole + (2 * self.hidden if self.has_bias else 0)

    @property
    def divided_layer(self) -> tuple[int, int]:
        """Count the parameters of a layer that a group divides: by heads, by columns of the MLP."""
        by_head = self.attention_weights + (self.query + 2 * self.key if self.has_bias else 0)
        first_bias = (self.matrices - 1) * self.ffn if self.has_bias else 0
        return by_head, (self.experts or 1) * (self.mlp_weights + first_bias)


def read_job(args: Sequence[str]) -> Job:
    """Read a job from Megatron's flags, with Megatron's defaults.

    Raises:
        NotByHandError: a flag for which there is no formula here.
    """
    found: dict[str, str] = {}
    name = ""
    for arg in args:
        if arg.startswith("--"):
            name, _, value = arg.partition("=")
            found[name] = value
        elif name:
            found[name] = found[name] or arg
    for flag in _NOT_BY_HAND:
        if flag in found:
            raise NotByHandError(f"the job has {flag}")

    def number(flag: str, default: int) -> int:
        return int(found.get(flag, default))

    hidden, heads = number("--hidden-size", 0), number("--num-attention-heads", 0)
    gated = "--swiglu" in found
    # Megatron: 4 h, or with SwiGLU two thirds of it, rounded to 64.
    ffn = number("--ffn-hidden-size", int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden)
    experts = number("--num-experts", 0)
    precision = "bf16" if "--bf16" in found else "fp16" if "--fp16" in found else "fp32"
    if experts and "--disable-bias-linear" not in found:
        raise NotByHandError("experts with biases")
    if found.get("--moe-token-dispatcher-type", "allgather") != "allgather":
        raise NotByHandError("tokens that go to their experts alone")
    groups = number("--num-query-groups", heads) if "--group-query-attention" in found else heads
    return Job(
        layers=number("--num-layers", 0),
        hidden=hidden,
        ffn=number("--moe-ffn-hidden-size", ffn) if experts else ffn,
        heads=heads,
        groups=groups,
        head_size=number("--kv-channels", hidden // heads),
        sequence=number("--seq-length", 0),
        positions=number("--max-position-embeddings", 0),
        vocabulary=number("--vocab-size", 0),
        pad_to=number("--make-vocab-size-divisible-by", 128),
        matrices=3 if gated else 2,
        experts=experts,
        top_k=number("--moe-router-topk", 2) if experts else 0,
        norm_vectors=1 if found.get("--normalization") == "RMSNorm" else 2,
        has_bias="--disable-bias-linear" not in found,
        is_tied="--untie-embeddings-and-output-weights" not in found,
        is_rope=found.get("--position-embedding-type") == "rope",
        is_local=found.get("--transformer-impl") == "local",
        hidden_dropout=float(found.get("--hidden-dropout", 0.1)) > 0,
        attention_dropout=float(found.get("--attention-dropout", 0.1)) > 0,
        element=4 if precision == "fp32" else 2,
        precision=precision,
        batch=number("--global-batch-size", 0),
        micro_batch=number("--micro-batch-size", 1),
        recompute=found.get("--recompute-granularity", "none"),
        sequence_parallel="--sequence-parallel" in found,
        divides_states="--use-distributed-optimizer" in found,
        overlaps="--overlap-grad-reduce" in found,
    )


@dataclass(frozen=True)
class Stage:
    """Layers `first` to `end` on a tensor-parallel group of one node."""

    devices: tuple[str, ...]
    first: int
    end: int
    shares: tuple[int, ...]
    ahead: int
    recomputed: int
    recompute: str
    state_share: int

    @property
    def width(self) -> int:
        """Count the GPUs of the group."""
        return len(self.devices)

    @property
    def layers(self) -> int:
        """Count the layers that it holds."""
        return self.end - self.first

    @property
    def node(self) -> str:
        """Return the node of its first GPU."""
        return self.devices[0].partition(":")[0]

    def parts(self, count: int) -> list[int]:
        """Divide `count` heads or columns among the GPUs."""
        total, edges, done = sum(self.shares), [0], 0
        for share in self.shares:
            done += share
            edges.append((2 * count * done + total) // (2 * total))
        return [after - before for before, after in pairwise(edges)]


@dataclass(frozen=True)
class Replica:
    """A pipeline and its part of the batch."""

    stages: tuple[Stage, ...]
    micro_batches: int
    size: int


@dataclass(frozen=True)
class Paper:
    """The plan as it is written down: job, replicas, GPUs in the order of their ranks."""

    job: Job
    replicas: tuple[Replica, ...]
    ranks: dict[str, int]
    groups: tuple[tuple[str, ...], ...] = ()
    """Of machines, inside which gradients are reduced first; empty: one exchange among all."""
    uplinks: Mapping[str, int] = field(default_factory=dict)
    """Relative bandwidths of the machines of the groups; empty: all own equal parts."""

    @property
    def rows(self) -> int:
        """Count the rows of the embedding: the vocabulary, padded so that every width divides
        it."""
        widths = [s.width for r in self.replicas for s in r.stages]
        multiple = self.job.pad_to * lcm(*widths)
        return -(-self.job.vocabulary // multiple) * multiple


def read_plan(plan: dict[str, Any]) -> Paper:
    """Read the content of plan.json.

    Raises:
        NotByHandError: the plan does something for which there is no formula here.
    """
    job = read_job(plan["workload"]["megatron_args"])
    replicas = []
    for replica in plan["replicas"]:
        count = replica["num_micro_batches"]
        stages = []
        for index, stage in enumerate(replica["stages"]):
            shape = stage["shape"]
            if stage["chunks"] or stage["order"]:
                raise NotByHandError("model chunks or an order of its own")
            if shape["context_parallel"] > 1:
                raise NotByHandError("context parallelism")
            if len({device.partition(":")[0] for device in stage["devices"]}) > 1:
                raise NotByHandError("a tensor-parallel group on several nodes")
            num_layers = shape["num_layers"]
            recompute = stage["recompute"] or job.recompute
            some = stage["recompute_num_layers"]
            ahead = stage["num_launched_forwards"] or len(replica["stages"]) - index
            stages.append(
                Stage(
                    tuple(stage["devices"]),
                    stage["first_layer"],
                    stage["first_layer"] + num_layers,
                    tuple(shape["shares"] or (1,) * shape["tensor_parallel"]),
                    min(ahead, count),
                    num_layers if some is None else some,
                    recompute,
                    stage["optimizer_share"] or 1,
                )
            )
        size = replica["micro_batch_size"] or job.micro_batch
        replicas.append(Replica(tuple(stages), count, size))
    ranks: dict[str, int] = {}
    for host in plan["hosts"]:
        for gpu in host["gpu_indices"]:
            ranks[f"{host['node']}:{gpu}"] = len(ranks)
    groups = tuple(map(tuple, plan.get("exchange_groups") or ()))
    uplinks = {
        machine: uplink
        for names, own in zip(groups, plan.get("exchange_uplinks") or (), strict=False)
        for machine, uplink in zip(names, own, strict=True)
    }
    return Paper(job, tuple(replicas), ranks, groups, uplinks)
