"""Megatron's own checks of a job's start: it is believed about flags, not about this machine."""

from __future__ import annotations

from functools import partial

import pytest

from megatron_hetero.preflight.finding import Finding
from megatron_hetero.preflight.job import make_job
from megatron_hetero.preflight.start import StartAnswer, why_not_to_ask
from tests.preflight.asked import answers
from tests.preflight.jobs import with_flags, with_width
from tests.preflight.test_check import DIVIDED, UNLIKE, WIDE, Job

MODEL = (
    "--num-layers=8", "--hidden-size=1024", "--num-attention-heads=8", "--vocab-size=1000",
    "--seq-length=256", "--max-position-embeddings=256", "--global-batch-size=16",
    "--micro-batch-size=1", "--bf16",
)  # fmt: skip
STOCK = partial(with_width, (("a", "A100-80GB", 2),), "tp1:4,tp1:4 @16")
EXPERTS = (
    "--num-experts=4", "--moe-grouped-gemm", "--moe-permute-fusion",
    "--moe-token-dispatcher-type=alltoall",
)  # fmt: skip

# Flags of jobs that start, some of them only on machines with packages and files of their own.
SOUND: tuple[tuple[Job, tuple[str, ...]], ...] = (
    (STOCK, ()),
    (STOCK, ("--position-embedding-type=rope", "--rotary-percent=0.5", *EXPERTS)),
    (STOCK, ("--transformer-impl=local", "--qk-layernorm")),
    (STOCK, ("--tokenizer-type=HuggingFaceTokenizer", "--tokenizer-model=/no/such/folder",
             "--wandb-project=x", "--wandb-exp-name=x", "--wandb-save-dir=x",
             "--tensorboard-dir=x")),
    (DIVIDED, ("--position-embedding-type=rope",)),
    (WIDE, ()),
    (UNLIKE, ("--position-embedding-type=rope", "--tokenizer-type=HuggingFaceTokenizer",
              "--tokenizer-model=/no/such/folder", "--load=/no/such/folder",
              "--exit-on-missing-checkpoint")),
    (partial(with_width, (("b", "B200", 2),), "tp2:8 @16"), ("--fp8-format=hybrid",
                                                             "--fp8-recipe=mxfp8")),
    (partial(with_width, (("m", "MI300X", 2),), "tp2:8 @16"), ()),
)  # fmt: skip

# (job, flags, variables, id, where, words of the finding)
REFUSED = (
    (STOCK, ("--fp8-param-gather",), (), "megatron-refuses", "--fp8-param-gather",
     "only supported with distributed optimizer"),
    (STOCK, ("--min-lr=1",), (), "megatron-refuses", "--min-lr --lr",
     "assert args.min_lr <= args.lr"),
    (STOCK, ("--save=x",), (), "megatron-refuses", "--save-interval",
     "args.save_interval is not None"),
    (STOCK, ("--window-size=x",), (), "megatron-refuses", "--window-size",
     "invalid tuple_type value"),
    (STOCK, ("--num-experts=4", "--moe-router-group-topk=1"), (), "megatron-refuses",
     "--moe-router-num-groups", "moe_router_num_groups must be specified"),
    (STOCK, ("--adlr-autoresume",), (), "megatron-refuses", "--adlr-autoresume",
     "NVIDIA's own cluster"),
    (UNLIKE, ("--fp8-param-gather",), (), "megatron-refuses", "--fp8-param-gather",
     "only supported with distributed optimizer"),
    (UNLIKE, ("--optimizer-cpu-offload", "--use-precision-aware-optimizer"), (),
     "plug-in-refuses", "--optimizer-cpu-offload", "not supported on an asymmetric plan"),
    # Rank 4 is the first on its machine.
    (WIDE, (), ("b:CUDA_DEVICE_MAX_CONNECTIONS=8",), "megatron-refuses", "(rank 4)",
     "CUDA_DEVICE_MAX_CONNECTIONS"),
)  # fmt: skip

# What only the machines of the job can answer.
UNTOLD = (
    (STOCK, ("--non-persistent-ckpt-type=local", "--non-persistent-local-ckpt-dir=x")),
    (STOCK, ("--enable-msc",)),
)

ALL = (
    *((job, flags, ()) for job, flags in SOUND),
    *((job, flags, variables) for job, flags, variables, *_ in REFUSED),
    *((job, flags, ()) for job, flags in UNTOLD),
)


@pytest.fixture(scope="module")
def said() -> list[StartAnswer]:
    jobs = []
    for job, flags, variables in ALL:
        plan, cluster = job()
        jobs.append(make_job(with_flags(plan, *MODEL, *flags), cluster, variables))
    return answers(jobs)


@pytest.mark.parametrize("number", range(len(SOUND)))
def test_sound_jobs_start(number: int, said: list[StartAnswer]) -> None:
    answer = said[number]
    assert (answer.findings, answer.because) == ((), "")
    assert answer.release is not None


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_ends_the_start_is_said_before(number: int, said: list[StartAnswer]) -> None:
    *_, id_, where, what = REFUSED[number]
    (finding,) = said[len(SOUND) + number].findings
    assert (finding.id, finding.severity) == (id_, "error")
    assert where in finding.where
    assert what in finding.what
    assert "\n" not in finding.what


@pytest.mark.parametrize("number", range(len(UNTOLD)))
def test_what_depends_on_the_machine_is_no_finding(number: int, said: list[StartAnswer]) -> None:
    answer = said[len(SOUND) + len(REFUSED) + number]
    assert (answer.findings, answer.release) == ((), None)
    assert answer.because.startswith("its answer depends on this machine: ")


def test_megatron_is_not_asked_about_what_is_known() -> None:
    def found(id_: str, severity: str) -> Finding:
        return Finding(id_, severity, "x", "x", "x")  # type: ignore[arg-type]

    assert why_not_to_ask([found("flags-exclude", "error")]) is not None
    assert why_not_to_ask([found("flag-left-out", "warning")]) is not None
    assert why_not_to_ask([found("overlap-without-partner", "warning")]) is None
    assert why_not_to_ask([found("memory-exceeded", "error")]) is None
