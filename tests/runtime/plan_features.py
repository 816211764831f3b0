"""The features of generated plans: their values, and which pairs no plan has, and why."""

from __future__ import annotations

from collections.abc import Mapping

from tests.runtime.all_pairs import Exclusion, Space

FACTORS: Mapping[str, tuple[str, ...]] = {
    "replicas": ("1", "2", "3"),
    "stages": ("1", "2", "3", "4"),
    "depths": ("equal", "unlike"),
    "widest": ("1", "2", "3", "4"),
    "widths": ("one", "mixed"),
    "shares": ("even", "uneven"),
    "sizes": ("divide", "do not divide"),
    "micro-batches": ("equal", "unlike"),
    "micro-batch size": ("1", "2", "of each replica"),
    "schedule": ("1F1B", "ahead", "one at a time", "interleaved", "zero bubble"),
    "sequence parallel": ("off", "on"),
    "context parallel": ("off", "on"),
    "recompute": ("none", "selective", "full", "of each stage"),
    "gradient sync": ("after", "overlapped"),
    "optimizer state": ("whole", "divided", "divided, gathers overlapped"),
    "loss": ("per micro-batch", "per token"),
    "embeddings": ("tied", "untied"),
    "MLP": ("GELU", "SwiGLU", "experts"),
    "attention": ("all heads", "grouped"),
    "qk-norm": ("off", "on"),
    "biases": ("all", "none", "QKV"),
    "positions": ("learned", "rotary"),
    "norm": ("LayerNorm", "RMSNorm"),
    "optimizer": ("adam", "sgd"),
    "weight decay": ("0", "0.1"),
    "clipping": ("off", "0.1", "10"),
    "resume": ("no", "same plan", "another plan"),
}
"""`stages` are the deepest replica's, `widest` is the widest stage's width, and `widths` says
whether all stages have one."""

_ONE_REPLICA = "one replica has nothing to differ from"
_ONE_DEVICE = "one device divides nothing"
_ONE_STAGE = "one stage has no schedule"
_ON_A_GROUP = "refused: Megatron trains experts on a group only with sequence parallelism"
_SGD = "refused: Megatron cannot load the state of SGD from torch_dist"

EXCLUSIONS = (
    Exclusion(("depths", "unlike"), ("replicas", "1"), _ONE_REPLICA),
    Exclusion(("depths", "unlike"), ("stages", "1"), "no replica is shallower than one stage"),
    Exclusion(("widths", "mixed"), ("widest", "1"), "no stage is narrower than one device"),
    Exclusion(("shares", "uneven"), ("widest", "1"), _ONE_DEVICE),
    Exclusion(("sizes", "do not divide"), ("widest", "1"), _ONE_DEVICE),
    Exclusion(("sizes", "do not divide"), ("shares", "even"), "refused: equal parts must fit"),
    Exclusion(("micro-batches", "unlike"), ("replicas", "1"), _ONE_REPLICA),
    Exclusion(("micro-batch size", "of each replica"), ("replicas", "1"), _ONE_REPLICA),
    Exclusion(
        ("micro-batch size", "of each replica"),
        ("loss", "per micro-batch"),
        "refused: micro-batches of unlike size need --calculate-per-token-loss",
    ),
    Exclusion(("schedule", "ahead"), ("stages", "1"), _ONE_STAGE),
    Exclusion(("schedule", "one at a time"), ("stages", "1"), _ONE_STAGE),
    Exclusion(("schedule", "interleaved"), ("stages", "1"), _ONE_STAGE),
    Exclusion(("schedule", "zero bubble"), ("stages", "1"), _ONE_STAGE),
    Exclusion(
        ("schedule", "zero bubble"),
        ("gradient sync", "overlapped"),
        "refused: a gradient is taken for complete when its backward pass is",
    ),
    Exclusion(("MLP", "experts"), ("sequence parallel", "off"), _ON_A_GROUP),
    Exclusion(
        ("MLP", "experts"),
        ("context parallel", "on"),
        "unlike shares are refused; equal ones: `test_experts_over_replicas`",
    ),
    Exclusion(
        ("MLP", "experts"), ("biases", "all"), "refused: Megatron's local experts fail with them"
    ),
    Exclusion(
        ("MLP", "experts"),
        ("micro-batch size", "of each replica"),
        "refused: the loss balances experts within a micro-batch",
    ),
    Exclusion(
        ("schedule", "zero bubble"),
        ("optimizer state", "divided, gathers overlapped"),
        "Megatron wants --overlap-grad-reduce with it, which these orders refuse",
    ),
    Exclusion(
        ("optimizer state", "divided, gathers overlapped"),
        ("gradient sync", "after"),
        "Megatron wants --overlap-grad-reduce with --overlap-param-gather",
    ),
    Exclusion(("resume", "same plan"), ("optimizer", "sgd"), _SGD),
    Exclusion(("resume", "another plan"), ("optimizer", "sgd"), _SGD),
)

SPACE = Space(FACTORS, EXCLUSIONS)


def _with_transformer_engine() -> Space:
    """The space of plans that Transformer Engine's layers train: no backward passes in two parts,
    which `runtime.job.checks.refused_flags` refuses."""
    split = "zero bubble"
    factors = {name: tuple(v for v in values if v != split) for name, values in FACTORS.items()}
    kept = [e for e in EXCLUSIONS if split not in (e.first[1], e.second[1])]
    return Space(factors, kept)


TRANSFORMER_ENGINE_SPACE = _with_transformer_engine()
