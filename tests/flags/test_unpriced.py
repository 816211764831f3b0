"""Flags without a price are named, and every flag that may change a step was looked at."""

from __future__ import annotations

import pytest

from megatron_hetero.flags.notes import plan_notes
from megatron_hetero.flags.support.lookup import support_of
from megatron_hetero.flags.unpriced import UNPRICED, unpriced_words
from megatron_hetero.model.flag_table import flag_table
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --vocab-size 128 --global-batch-size 8 --micro-batch-size 1 "
)
STOCK, ASYMMETRIC = "tp1:2,tp1:2 @8", "tp2:3,tp1:1 @8"
PRICED = (
    "--recompute-activations --attention-backend --fp8-format --no-gradient-accumulation-fusion "
    "--cross-entropy-loss-fusion --cross-entropy-fusion-impl --recompute-modules "
    "--moe-layer-recompute --moe-permute-fusion --moe-router-dtype"
)
"""Flags of kernels and GPUs that prices read (`model.training_flags`)."""
TIMELESS = """
--apply-layernorm-1p --local-rank --manual-gc --manual-gc-interval --no-manual-gc-eval
--enable-experimental --mlp-chunks-for-training
--no-clone-scatter-output-in-embedding --no-create-attention-mask-in-dataloader
--te-rng-tracker --inference-rng-tracker --no-stream-ckpt-dequant --save-tokens-per-expert-interval
--mrope-section
"""
"""Others of these that change no step by more than rounding: details, or ends of a run."""


def _words(flags: str, layout: str = STOCK) -> str:
    job = load_workload(None, (MODEL + flags).split())
    return unpriced_words(plan_from_layout(parse_layout(layout), job), job)


def test_every_flag_that_chooses_kernels_was_looked_at() -> None:
    """A new flag of Megatron has to be priced, named, or said to change no step."""
    known = {name for entry in UNPRICED for name in entry.names.split()}
    known |= {*PRICED.split(), *TIMELESS.split()}
    kernels = [
        flag
        for flag in flag_table().flags
        # The exchanges under products are priced one by one.
        if support_of(flag).neutral in ("kernels", "GPU") and "-tp-comm-" not in flag.names[0]
    ]
    assert [flag.names[0] for flag in kernels if not known & {*flag.names}] == []
    # And none is named that Megatron has not.
    assert known <= {name for flag in flag_table().flags for name in flag.names}


def test_a_flag_is_in_one_entry() -> None:
    names = [name for entry in UNPRICED for name in entry.names.split()]
    assert len(names) == len({*names})
    assert not {*names} & {*PRICED.split(), *TIMELESS.split()}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", ""),
        ("--deterministic-mode", "longer with --deterministic-mode"),
        (
            "--window-size 4,0 --log-params-norm --sft --qk-clip",
            "longer with --log-params-norm, --qk-clip; shorter with --window-size, --sft",
        ),
        # What a job cannot have changes nothing in it.
        ("--no-bias-swiglu-fusion", ""),
        ("--no-bias-swiglu-fusion --swiglu", "longer with --no-bias-swiglu-fusion"),
        ("--no-rope-fusion", ""),
        ("--moe-router-fusion", ""),
        ("--moe-router-fusion --num-experts 4", "shorter with --moe-router-fusion"),
        ("--num-experts 4 --moe-token-dispatcher-type alltoall", ""),
        (
            "--num-experts 4 --moe-token-dispatcher-type flex",
            "longer or shorter with --moe-token-dispatcher-type",
        ),
        ("--no-masked-softmax-fusion", ""),
        (
            "--no-masked-softmax-fusion --transformer-impl local",
            "longer with --no-masked-softmax-fusion",
        ),
        # Values that are the default's, or priced.
        ("--timing-log-level 0 --rerun-mode disabled --cp-comm-type p2p", ""),
        ("--cp-comm-type a2a", ""),
        ("--cp-comm-type all_gather", ""),
        ("--cp-comm-type a2a a2a a2a a2a", ""),
        ("--cp-comm-type a2a p2p a2a p2p", "longer or shorter with --cp-comm-type"),
        ("--rerun-mode report_stats --timing-log-level 2", "longer with --rerun-mode, --timing-"),
        ("--recompute-activations --disable-bias-linear --recompute-modules core_attn mlp", ""),
        # The last of two counts.
        ("--timing-log-level 2 --timing-log-level 0", ""),
    ],
)
def test_a_flag_that_changes_a_step_beside_its_price_is_named(flags: str, said: str) -> None:
    words = _words(flags)
    assert (said in words) if said else not words


def test_flags_that_an_asymmetric_plan_refuses_or_overrules_are_left_to_their_own_lines() -> None:
    for flag in ("--delay-wgrad-compute", "--use-sharp", "--optimizer-cpu-offload"):
        assert flag in _words(flag)
        assert _words(flag, ASYMMETRIC) == ""
    assert "--log-params-norm" in _words("--log-params-norm", ASYMMETRIC)


def test_the_notes_of_a_plan_have_the_line_once() -> None:
    job = load_workload(None, (MODEL + "--log-params-norm --deterministic-mode").split())
    notes = plan_notes(plan_from_layout(parse_layout(STOCK), job))
    assert [note for note in notes if "no price" in note] == [
        "no price counts these flags of the job: a step takes longer with --deterministic-mode, "
        "--log-params-norm than predicted"
    ]
