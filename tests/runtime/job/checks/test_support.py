"""The rules that refuse flags, against the table that the page of flags is printed from."""

from __future__ import annotations

import re

import pytest

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.flags.support.lookup import named_flags, support_of
from megatron_hetero.model.flag_table import flag_table
from megatron_hetero.runtime.job.checks import support
from megatron_hetero.runtime.job.checks.entry_flags import NOT_IN_THIS_ENTRY
from megatron_hetero.runtime.job.checks.refused_flags import REFUSED
from megatron_hetero.runtime.model import fp8
from megatron_hetero.runtime.model.moe import experts
from tests.runtime.test_refusals import LAYOUT, MODEL, refuse

RULES = (*REFUSED, *NOT_IN_THIS_ENTRY, *experts.REFUSED, *fp8.REFUSED)
FLAG = r"--[\w-]+"
# What can be followed, but not in every way: the rule says in which way not.
IN_PART = {
    "--async-save",
    "--ckpt-convert-format",
    "--dataloader-inter-document-masking",
    "--dist-ckpt-optim-fully-reshardable",
    "--dump-param-to-param-group-map",
    "--eval-interval",
    "--fp4-format",
    "--fp8-format",
    "--fp16",
    "--full-validation",
    "--load",
    "--log-max-attention-logit",
    "--moe-router-load-balancing-type",
    "--multi-latent-attention",
    "--multiple-validation-sets",
    "--no-initialization",
    "--non-persistent-ckpt-type",
    "--num-experts",
    "--optimizer",
    "--phase-transition-iterations",
    "--qk-clip",
    "--reset-attention-mask",
    "--reset-position-ids",
    "--save-dgrads-interval",
    "--sft",
    "--sequence-parallel",
    "--recompute-modules",
    "--rerun-mode",
    "--result-rejected-tracker-filename",
    "--step-batch-size-schedule",
    "--test-data-path",
    "--transformer-impl",
    "--train-iters",
    "--train-samples",
    "--use-distributed-optimizer",
    "--valid-data-path",
    "--window-size",
}


@pytest.fixture(autouse=True)
def _world_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")


def test_what_a_rule_refuses_is_refused_in_the_table() -> None:
    table = flag_table().by_name
    for named, *_ in RULES:
        for name in re.findall(FLAG, named):
            if name not in table:
                continue
            status = support_of(table[name]).status
            assert status in ("refused", "the plan's") or name in IN_PART, name


def test_what_the_table_refuses_is_refused_by_a_rule() -> None:
    ruled = {name for named, *_ in RULES for name in re.findall(FLAG, named)}
    for flag in named_flags("refused"):
        assert support_of(flag).by_presence or ruled & set(flag.names), flag.names


@pytest.mark.parametrize(
    "flags",
    [
        ["--use-nccl-ub"],
        ["--pipeline-model-parallel-comm-backend=ucc"],
    ],
    ids=lambda flags: flags[0],
)
def test_a_flag_refused_by_its_presence(flags: list[str]) -> None:
    message = refuse([*MODEL, f"--hetero-layout={LAYOUT}", *flags], UnsupportedError)
    assert flags[0].partition("=")[0] in message


def test_flags_without_effect_give_warnings() -> None:
    given = flag_table().split(["--use-sharp", "--lr=1e-3", "--ddp-bucket-size=5"])
    assert support.check_flags(given) == (
        "--use-sharp has no effect on an asymmetric plan: the plan makes its process groups itself",
        "--ddp-bucket-size has no effect on an asymmetric plan: the gradient sync has buckets of "
        "its own",
    )
