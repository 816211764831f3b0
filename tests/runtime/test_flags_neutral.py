"""Flags that are said to change no numbers change none, on a plan as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.flags.support.lookup import support_of
from megatron_hetero.model.flag_table import flag_table
from megatron_hetero.runtime.job.local.launch import run_jobs
from tests.runtime.flag_effects import EXPERTS
from tests.runtime.flag_runs import one_process_job, plan_and_one, plan_job, read_log

LOSS, NORM = 3e-6, 3e-3
"""The log prints seven digits of a loss and three of a norm's decimals."""

DENSE = (
    "--apply-query-key-layer-scaling", "--attention-softmax-in-fp32", "--attention-backend=unfused",
    "--disable-jit-fuser", "--no-bias-dropout-fusion",
    "--no-bias-gelu-fusion", "--no-clone-scatter-output-in-embedding",
    "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-persist-layer-norm",
    "--no-rope-fusion", "--manual-gc", "--manual-gc-interval=1", "--no-manual-gc-eval",
    "--mlp-chunks-for-training=2", "--enable-experimental", "--disable-gloo-process-groups",
    "--no-create-attention-mask-in-dataloader", "--mid-level-dataset-surplus=0.1",
    "--openai-gelu", "--mup-width-mult=3", "--apply-residual-connection-post-layernorm",
    "--data-parallel-random-init",
    "--check-for-large-grads", "--dump-param-to-param-group-map=map",
    "--log-throughput", "--timing-log-level=2", "--logging-level=20", "--log-memory-interval=1",
    "--no-check-for-nan-in-loss-and-grad", "--num-dataset-builder-threads=2",
    "--dist-ckpt-optim-fully-reshardable", "--decoder-seq-length=16", "--decoder-num-layers=4",
)  # fmt: skip
SPARSE = (
    "--moe-router-dtype=fp64", "--moe-layer-recompute", "--moe-per-layer-logging",
    "--moe-enable-routing-replay",
)  # fmt: skip
ROPE = ("--position-embedding-type=rope", "--use-rope-scaling", "--init-method-std=0.3")
SELECTIVE = ("--recompute-activations", "--recompute-modules", "core_attn")
NO_BIASES = ("--disable-bias-linear",)
FUSED_LOSS = "--cross-entropy-loss-fusion"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "context"),
    [
        (DENSE, ()),
        (SPARSE, EXPERTS),
        (SELECTIVE, ()),
        ((*SELECTIVE, "mlp"), NO_BIASES),
        (("--rope-scaling-factor=3",), ROPE),
    ],
    ids=["dense", "experts", "recomputation", "recomputed-mlp", "rope"],
)
def test_nothing_changes(flags: tuple[str, ...], context: tuple[str, ...], tmp_path: Path) -> None:
    ours, one = plan_and_one(tmp_path, [*context, *flags])
    without = one_process_job(tmp_path / "without", context)
    run_jobs([without], 120)
    plain = read_log(without)
    for log in (ours, one):
        assert len(log.losses) == 3
        assert log.losses == pytest.approx(plain.losses, rel=LOSS)
        assert log.norms == pytest.approx(plain.norms, rel=NORM)


@pytest.mark.slow
def test_the_fused_loss_rounds_as_bf16_does(tmp_path: Path) -> None:
    """Its gradient of the logits is bf16 in every precision, so in fp32 it is another training."""
    asked = {"bf16": ("--bf16",), "fused": ("--bf16", FUSED_LOSS), "fp32": (FUSED_LOSS,)}
    jobs = [one_process_job(tmp_path / name, flags) for name, flags in asked.items()]
    jobs.append(one_process_job(tmp_path / "plain", ()))
    run_jobs(jobs, 120)
    bf16, fused, fp32, plain = map(read_log, jobs)
    assert len(bf16.losses) == 3
    assert (fused.losses, fused.norms) == (bf16.losses, bf16.norms)
    assert fp32.losses[-1] != pytest.approx(plain.losses[-1], rel=LOSS)


@pytest.mark.slow
def test_replicas_draw_masks_of_their_own(tmp_path: Path) -> None:
    """`--data-parallel-random-init` under dropout."""
    jobs = [
        plan_job(tmp_path / name, ["--hidden-dropout=0.1", *flags])
        for name, flags in (("alike", []), ("own", ["--data-parallel-random-init"]))
    ]
    run_jobs(jobs, 120)
    alike, own = map(read_log, jobs)
    assert len(own.losses) == 3
    assert own.losses[0] != pytest.approx(alike.losses[0], rel=2 * LOSS)


def test_what_is_compared_here_is_not_refused() -> None:
    table = flag_table().by_name
    for word in (*DENSE, *SPARSE, *SELECTIVE):
        if word.startswith("--"):
            assert support_of(table[word.partition("=")[0]]).status != "refused", word
