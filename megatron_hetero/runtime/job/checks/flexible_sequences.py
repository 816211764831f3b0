"""Flags that a job of flexible sequences cannot follow yet, by name."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.errors import UsageError
from megatron_hetero.flags.support.rules import Rule, is_packed
from megatron_hetero.runtime.job.rank_arguments import given_number

ADDED = ("--micro-batch-size=1", "--calculate-per-token-loss")
"""Flags set for every such job: Megatron counts in sequences, and tokens count alike, in any deal.
"""

REFUSED: tuple[Rule, ...] = (
    # Divided sequences have an attention of their own, in local layers.
    (
        "--transformer-impl transformer_engine",
        lambda a: a.transformer_impl != "local",
        "use --transformer-impl local; Transformer Engine divides sequences in equal shares",
    ),
    ("--spec", lambda a: a.spec is not None, "leave it out; its attention is not ours"),
    (
        "--multi-latent-attention",
        lambda a: a.multi_latent_attention,
        "train a model with ordinary attention",
    ),
    (
        "--num-experts",
        lambda a: a.num_experts is not None,
        "train a dense model; routers would balance what a deal put together",
    ),
    (
        "--attention-backend unfused / local",
        lambda a: a.attention_backend.name in ("unfused", "local"),
        "leave it out; attention of divided sequences stores no scores",
    ),
    ("--mtp-num-layers", lambda a: a.mtp_num_layers is not None, "leave it out"),
    ("--window-size", lambda a: a.window_size is not None, "leave it out"),
    (
        "--position-embedding-type",
        lambda a: a.position_embedding_type not in ("rope", "learned_absolute", "none"),
        "use rope, learned_absolute or none",
    ),
    # A document is a sequence, whole, and its length is known at the start.
    (
        "--sft / --dataloader-inter-document-masking",
        is_packed,
        "leave it out; every document is a sequence of its own already",
    ),
    (
        "--reset-attention-mask / --reset-position-ids",
        lambda a: a.reset_attention_mask or a.reset_position_ids,
        "leave it out; every document is a sequence of its own already",
    ),
    ("--mock-data", lambda a: a.mock_data, "give --data-path; lengths are those of documents"),
    ("--fim-data", lambda a: a.fim_data, "leave it out"),
    (
        "--dataloader-fast-cache-load",
        lambda a: a.dataloader_fast_cache_load,
        "leave it out; the lengths of documents are read at the start",
    ),
    # A deal decides what the micro-batches of a step are.
    (
        "--full-validation / --multiple-validation-sets",
        lambda a: a.full_validation or a.multiple_validation_sets,
        "leave it out; --eval-iters steps are validated on",
    ),
    (
        "--step-batch-size-schedule",
        lambda a: a.step_batch_size_schedule is not None,
        "give --global-batch-size",
    ),
    (
        "--phase-transition-iterations",
        lambda a: bool(a.phase_transition_iterations),
        "leave it out",
    ),
    ("--fp8-format", lambda a: a.fp8 is not None, "train in bf16"),
    (
        "--recompute-granularity selective",
        lambda a: (
            a.recompute_granularity == "selective"
            and set(a.recompute_modules or ("core_attn",)) != {"core_attn"}
        ),
        "recompute core_attn alone, or use --recompute-granularity full",
    ),
)
"""Flags refused with `--hetero-sequences`."""


def check_words(megatron: Sequence[str], shuffles: bool) -> None:
    """Refuse what `ADDED` and the order of documents contradict.

    Args:
        megatron: the user's flags.
        shuffles: whether `--dataloader-type cyclic` is among them.
    Raises:
        UsageError: the message says what to leave out.
    """
    size = given_number(megatron, "--micro-batch-size")
    if size not in (None, 1):
        raise UsageError(
            f"--micro-batch-size {size}: with --hetero-sequences every deal decides how many "
            "sequences a micro-batch has; leave it out. --global-batch-size counts documents."
        )
    if shuffles:
        raise UsageError(
            "--dataloader-type cyclic: with --hetero-sequences documents are shuffled anew in "
            "every epoch already; leave it out"
        )
