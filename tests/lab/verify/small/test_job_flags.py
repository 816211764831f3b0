"""The job's flags in a verification: what reaches the runs, and what is said of the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_hetero.errors import UnsupportedError, UsageError
from megatron_hetero.lab.verify.small.job_flags import JobFlags, job_flags
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.plan.plan import Plan
from tests.runtime.workloads import plan, workload

ASYMMETRIC = "tp2:2,tp1:2 @2 | tp1:4 @1"
STOCK = "tp1:2,tp1:2 @2 | tp1:2,tp1:2 @2"


def flags(*args: str, layout: str = ASYMMETRIC, steps: int = 5, **changes: Any) -> JobFlags:
    asked = replace(workload(**changes), megatron_args=args)
    whole: Plan = replace(plan(layout), workload=asked)
    return job_flags(whole, asked, shrink(plan(layout), asked), steps)


def test_what_changes_numbers_reaches_both() -> None:
    given = "--clip-grad 0.3 --weight-decay 0.1 --adam-beta2 0.95 --squared-relu --seed 7"
    found = flags(*given.split())
    assert found.both == tuple(given.split())
    assert found.shrunk == () and found.left_out == ()


def test_how_ranks_work_together_reaches_the_plan() -> None:
    found = flags("--overlap-grad-reduce", "--use-distributed-optimizer")
    assert found.plan == ("--overlap-grad-reduce", "--use-distributed-optimizer")
    assert found.both == ()


@pytest.mark.parametrize(
    ("given", "tokens", "shown"),
    [
        (
            "--train-iters 1000 --lr-warmup-iters 300",
            ("--lr-warmup-iters=2",),
            ("--train-iters 1000 -> 5 steps", "--lr-warmup-iters 300 -> 2 steps"),
        ),
        (
            "--train-samples 1000 --lr-decay-samples 800 --lr-warmup-samples 10",
            ("--lr-decay-iters=5", "--lr-warmup-iters=1"),
            (
                "--train-samples 1000 -> 5 steps",
                "--lr-decay-samples 800 -> 5 steps",
                "--lr-warmup-samples 10 -> 1 steps",
            ),
        ),
        ("--window-size (24,0)", ("--window-size=16,0",), ("--window-size (24,0) -> 16,0",)),
        ("--moe-input-jitter-eps 0.1", (), ("--moe-input-jitter-eps 0.1 -> off",)),
        ("--split 9,1,0", (), ("--split 9,1,0 -> text as bytes",)),
        (
            "--sft",
            ("--dataloader-inter-document-masking",),
            ("--sft -> packed documents of text",),
        ),
    ],
)
def test_shrunk_values_are_both_shown(
    given: str, tokens: tuple[str, ...], shown: tuple[str, ...]
) -> None:
    found = flags(*given.split())
    assert (found.both, found.shrunk) == (tokens, shown)


def test_what_a_cpu_cannot_run_is_named_with_its_reason() -> None:
    found = flags("--tp-comm-overlap", "--transformer-impl", "transformer_engine", layout=STOCK)
    assert found.both == ("--transformer-impl", "transformer_engine")
    assert [flag for flag, _ in found.left_out] == ["--tp-comm-overlap"]
    assert all(reason for _, reason in found.left_out)


def test_what_changes_nothing_is_named_by_class() -> None:
    found = flags("--save", "folder", "--log-throughput")
    assert sorted(found.no_effect.values()) == [("--log-throughput",), ("--save",)]


def test_a_flag_that_megatron_does_not_know_is_refused() -> None:
    with pytest.raises(UsageError, match="--no-such-flag is not a flag of Megatron"):
        flags("--no-such-flag", "2")


def test_what_the_runtime_refuses_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="--delay-wgrad-compute"):
        flags("--delay-wgrad-compute")


def test_precision_goes_by_the_run() -> None:
    found = flags("--bf16", "--grad-reduce-in-bf16", precision="bf16")
    assert (found.both, found.half, found.precision) == ((), ("--grad-reduce-in-bf16",), "bf16")
    assert "--bf16" in found.kept


def test_what_rounds_as_half_precision_does_is_off_in_fp32() -> None:
    """The fused loss rounds its gradient to bf16, which no bound of fp32 allows for."""
    given = "--cross-entropy-loss-fusion"
    half, full = flags("--bf16", given, precision="bf16"), flags(given, precision="fp32")
    assert (half.half, half.shrunk) == ((given,), ())
    assert given in half.kept
    assert (full.half, full.kept, full.shrunk) == ((), (), (f"{given} -> off, in fp32",))


def test_a_stock_plan_that_recomputes_takes_the_place_of_the_job() -> None:
    made = plan(STOCK)
    full = tuple(
        replace(r, stages=tuple(replace(s, recompute="full") for s in r.stages))
        for r in made.replicas
    )
    asked = replace(
        workload(recompute="selective"), megatron_args=("--recompute-granularity", "selective")
    )
    whole = replace(made, replicas=full, workload=asked)
    shrunk = shrink(whole, asked)
    found = job_flags(whole, asked, shrunk, 2)
    assert not [a for a in (*shrunk.model_args, *found.both) if "recompute" in a]


def test_a_list_of_layers_cannot_be_shortened() -> None:
    with pytest.raises(UnsupportedError, match="a list of layers"):
        flags("--window-attn-skip-freq", "[0,1]*12")


GPT3 = """
--use-mcore-models --disable-bias-linear --seq-length 48 --max-position-embeddings 48
--num-layers 4 --hidden-size 96 --num-attention-heads 24 --attention-backend auto
--micro-batch-size 1 --global-batch-size 6 --train-iters 500000 --weight-decay 0.1
--adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5
--lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000
--data-path /data --vocab-file v.json --merge-file m.txt --split 949,50,1 --log-interval 100
--save-interval 10000 --eval-interval 1000 --save /out --load /out --eval-iters 10
--tensorboard-dir /tb --no-save-optim --transformer-impl transformer_engine
"""
MIXTRAL = """
--no-masked-softmax-fusion --position-embedding-type rope --normalization RMSNorm --swiglu
--untie-embeddings-and-output-weights --no-position-embedding --rotary-base 1000000
--group-query-attention --num-query-groups 8 --num-experts 8 --moe-router-topk 2
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-permute-fusion
--moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce
--tokenizer-type Llama2Tokenizer --tokenizer-model /m --use-distributed-optimizer --bf16
--sequence-parallel --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.02
--distributed-timeout-minutes 60 --exit-duration-in-mins 230 --ckpt-format torch_dist
--wandb-project p --wandb-exp-name e --tp-comm-overlap --moe-grouped-gemm
"""


@pytest.mark.parametrize(
    ("script", "left_out"),
    [
        (GPT3, set()),
        (
            MIXTRAL,
            {
                "--moe-permute-fusion",
                "--tp-comm-overlap",
            },
        ),
    ],
)
def test_of_scripts_like_nvidias_kernels_and_overlap_are_left_out(
    script: str, left_out: set[str]
) -> None:
    """Those of Megatron-LM's own examples, GPT-3 and Mixtral."""
    found = flags(*script.split(), layout=STOCK)
    assert {flag.split()[0] for flag, _ in found.left_out} == left_out


def test_every_given_flag_is_somewhere() -> None:
    for script in (GPT3, MIXTRAL):
        given = [word for word in script.split() if word.startswith("--")]
        found = flags(*script.split(), layout=STOCK)
        sizes = (
            *("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length"),
            *("--micro-batch-size", "--max-position-embeddings", "--global-batch-size"),
            *("--num-query-groups", "--num-experts", "--moe-router-topk", "--lr"),
            *("--attention-dropout", "--hidden-dropout"),
        )
        said = [
            *(each.split()[0] for each in (*found.kept, *found.shrunk)),
            *(name for names in found.no_effect.values() for name in names),
            *(flag.split()[0] for flag, _ in found.left_out),
            *sizes,  # in `Shrunk.changes`, or as they are
        ]
        assert set(given) <= set(said)
