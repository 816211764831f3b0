"""Flexible sequences train as one process of stock Megatron does, document by document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import pytest

from megatron_hetero.lab.verify.processes.record import RankRecord
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.sequences import steps
from megatron_hetero.sequences.step_tokens import GroupTokens, StepTokens
from tests.runtime.sequences.flexible_runs import (
    deal_at_random,
    flexible_job,
    records,
    stock_job,
    token_losses,
    write_cluster,
    write_documents,
)

LLAMA = (
    "--swiglu", "--group-query-attention", "--num-query-groups=2", "--normalization=RMSNorm",
    "--disable-bias-linear", "--position-embedding-type=rope", "--qk-layernorm",
    "--untie-embeddings-and-output-weights",
)  # fmt: skip
FULL = ("--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1")
LENGTHS = (1, 2, 3, 5, 8, 13, 17, 30, 41, 64, 77, 1, 4, 9, 25, 6)
LOSS = 1e-6
GRADIENT, GRADIENT_GATED = 5e-6, 2e-5


@dataclass(frozen=True)
class Case:
    """Machines, flags of both runs, flags of ours, documents of a step; a random deal by `seed`,
    or the search's own; `heads` that its groups exchange, where they do."""

    nodes: dict[str, tuple[str, int]]
    flags: tuple[str, ...] = ()
    ours: tuple[str, ...] = ()
    batch: int = 7
    seed: int | None = 0
    is_slow: bool = field(default=True)
    heads: int = 1

    @property
    def begin(self) -> Callable[[int], None] | None:
        """What a rank does first."""
        return None if self.seed is None else deal_at_random(self.seed, self.heads)


TWO, THREE, FOUR = {"a": ("FAST", 2)}, {"a": ("FAST", 2), "b": ("SLOW", 1)}, {"a": ("FAST", 4)}
MIXED = {"a": ("FAST", 2), "b": ("SLOW", 2)}
CASES: dict[str, Case] = {
    "gated": Case(TWO, LLAMA, is_slow=False),
    "unlike": Case(THREE, seed=1, is_slow=False),
    "four": Case(FOUR, LLAMA, seed=2),
    "four mixed": Case(MIXED, seed=3, batch=8),
    "few sequences": Case(FOUR, LLAMA, seed=4, batch=4),
    "recompute": Case(THREE, (*LLAMA, *FULL), seed=5),
    "recompute attention": Case(THREE, ("--recompute-granularity=selective",), seed=6),
    "divided optimizer": Case(THREE, LLAMA, ("--use-distributed-optimizer",), seed=7),
    "overlap": Case(MIXED, LLAMA, ("--overlap-grad-reduce",), seed=8, batch=5),
    "divided and overlapping": Case(
        MIXED,
        LLAMA,
        ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
        seed=9,
        batch=5,
    ),
    "no positions": Case(TWO, ("--position-embedding-type=none",), seed=10, batch=16),
    "scaled positions": Case(
        THREE, (*LLAMA, "--rotary-percent=0.5", "--use-rope-scaling"), seed=11
    ),
    "one rank": Case({"a": ("FAST", 1)}, LLAMA, seed=12),
    "searched": Case(MIXED, LLAMA, seed=None, batch=8),
    "heads": Case(THREE, LLAMA, seed=40, heads=2, is_slow=False),
    "all heads": Case(FOUR, seed=41, heads=4),
    "heads between unlike": Case(MIXED, LLAMA, seed=42, heads=2, batch=5),
    "heads, recompute": Case(FOUR, FULL, seed=43, heads=4),
    "heads, recompute attention": Case(
        FOUR, (*LLAMA, "--recompute-granularity=selective"), seed=44, heads=2
    ),
    "heads, divided and overlapping": Case(
        FOUR,
        (),
        ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
        seed=45,
        heads=4,
    ),
    "heads with an offset each": Case(FOUR, ("--softmax-type=learnable",), seed=46, heads=4),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * c.is_slow) for n, c in CASES.items()]
)
def test_a_deal_trains_as_one_process(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    ours, one = run(case, case.begin, tmp_path)
    assert_equal(ours, one, GRADIENT_GATED if "--swiglu" in case.flags else GRADIENT)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--overlap-grad-reduce",)], ids=["plain", "overlap"])
def test_ranks_without_a_sequence(flags: tuple[str, ...], tmp_path: Path) -> None:
    """One pair of ranks trains all, of which one member has the tokens; two ranks only wait."""

    def begin(rank: int) -> None:
        def deal(tree: object, documents: steps.Documents) -> steps.Dealt:
            tokens = tuple((len(document["tokens"]), 0) for document in documents)
            group = GroupTokens(0, tuple(range(len(documents))), tokens, 1.0)
            return StepTokens(((group,),)), ""

        steps.dealt_tokens = deal

    ours, one = run(Case(FOUR, LLAMA, flags), begin, tmp_path)
    assert_equal(ours, one, GRADIENT_GATED)


def run(case: Case, begin: Callable[[int], None] | None, folder: Path) -> tuple[LocalJob, LocalJob]:
    """Train a case, and one process beside it."""
    write_documents(folder / "text", LENGTHS)
    cluster = write_cluster(folder / "cluster.yaml", **case.nodes)
    num_ranks = sum(count for _, count in case.nodes.values())
    asked = [*case.flags, f"--data-path={folder / 'text'}", f"--global-batch-size={case.batch}"]
    ours = flexible_job(folder / "ours", cluster, num_ranks, [*asked, *case.ours], begin)
    one = stock_job(folder / "one", asked)
    run_jobs([ours, one], 120)
    return ours, one


def assert_equal(ours: LocalJob, one: LocalJob, limit: float) -> None:
    """The loss of each token and step, and the gradients that every rank has."""
    (reference,) = records(one)
    ranks = records(ours)
    assert ranks[-1].losses == pytest.approx(reference.losses, rel=LOSS)
    mine, theirs = token_losses(ours.directory, ours.num_ranks), token_losses(one.directory, 1)
    assert mine[:, :3].tolist() == theirs[:, :3].tolist()
    assert numpy.abs(mine[:, 3] - theirs[:, 3]).max() <= LOSS * theirs[:, 3].max()
    gradients = {n: a for n, a in reference.arrays.items() if n.startswith("gradient/")}
    assert gradients
    seen = set()
    for record in ranks:
        for name in gradients.keys() & record.arrays.keys():
            whole = gradients[name]
            far = numpy.abs(record.arrays[name] - own_part(record, name, whole)).max()
            assert far <= limit * numpy.abs(whole).max(), name
            seen.add(name)
    assert seen == set(gradients)


def own_part(record: RankRecord, name: str, whole: numpy.ndarray) -> numpy.ndarray:
    """The part of a whole gradient that a rank holds; rows that only fill up have none."""
    shard = record.shards[name.split("/", 2)[2]]
    filled = [(0, 0)] * whole.ndim
    filled[shard.dim] = (0, shard.global_shape[shard.dim] - whole.shape[shard.dim])
    whole = numpy.pad(whole, filled)
    parts = [whole.take(range(a, b), shard.dim) for a, b in shard.intervals]
    return numpy.concatenate(parts, shard.dim)
