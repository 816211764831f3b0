"""Flexible sequences over the replicas of a plan train as one process does: pipelines of unlike
stages and widths, alone and in groups."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import plan_to_data
from megatron_hetero.plan.hosts import hosts_of
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.runtime.sequences import steps
from megatron_hetero.sequences.step_tokens import GroupTokens, StepTokens
from tests.runtime.sequences.flexible_runs import deal_at_random, write_cluster
from tests.runtime.sequences.test_equality import (
    FULL,
    GRADIENT,
    GRADIENT_GATED,
    LLAMA,
    Case,
    assert_equal,
    run,
)

TWINS = "tp1:1,tp1:1 @4 | tp1:1,tp1:1 @3"
WIDE_TWINS = "tp2:1,tp1:1 @4 | tp2:1,tp1:1 @3"
TRIPLETS = "tp1:1,tp1:1 @3 | tp1:1,tp1:1 @2 | tp1:1,tp1:1 @2"
UNLIKE = "tp1:1,tp1:1 @3 | tp1:1,tp1:1 @2 | tp1:2 @2"
DIVIDED = ("--use-distributed-optimizer",)
OVERLAP = ("--overlap-grad-reduce",)
BOTH = (*DIVIDED, *OVERLAP, "--overlap-param-gather")
ATTENTION = ("--recompute-granularity=selective",)
GPT = ("--vocab-size=104",)
"""Learned positions, tied embeddings and biases; rows that two ranks divide evenly."""
GATED = (*LLAMA, *GPT)


def on(
    layout: str, seed: int | None, flags: tuple[str, ...] = GATED, *ours: str, heads: int = 1
) -> Case:
    """A case on a layout; the last two GPUs are slow ones of another machine, where no group of
    tensor-parallel ranks would be on both."""
    count = parse_layout(layout).num_devices
    nodes = {"a": ("FAST", count)}
    if count > 2 and "tp2" not in layout:
        nodes = {"a": ("FAST", count - 2), "b": ("SLOW", 2)}
    return Case(nodes, flags, (f"--hetero-layout={layout}", *ours), seed=seed, heads=heads)


CASES = {
    "groups of pipelines beside another": replace(on(UNLIKE, 1), is_slow=False),
    "one pipeline": on("tp1:1,tp1:1 @7", 2),
    "unlike depths": on("tp1:1,tp1:1 @4 | tp1:2 @3", 3),
    "unlike depths, tied embeddings": on("tp1:1,tp1:1 @4 | tp1:2 @3", 4, GPT),
    "twins": on(TWINS, 5),
    "twins, tied embeddings": on(TWINS, 6, GPT),
    "twins, recomputed": on(TWINS, 7, (*GATED, *FULL)),
    "twins, attention recomputed": on(TWINS, 8, (*GPT, *ATTENTION)),
    "twins, divided optimizer": on(TWINS, 9, GATED, *DIVIDED),
    "twins, overlap": on(TWINS, 10, (*GATED, *OVERLAP)),
    "triplets": on(TRIPLETS, 11),
    "triplets, divided and overlapping": on(TRIPLETS, 12, GATED, *BOTH),
    "no positions": on(UNLIKE, 13, (*GPT, "--position-embedding-type=none")),
    "three stages": on("tp1:1,tp1:1,tp1:1 @4 | tp1:2,tp1:1 @3", 14, (*GATED, "--num-layers=3")),
    "four twins": on(" | ".join(["tp1:1,tp1:1 @2"] * 3 + ["tp1:1,tp1:1 @1"]), 15),
    "wide beside narrow": on("tp2:1,tp1:1 @4 | tp1:2 @3", 16),
    "narrow into wide": on("tp1:1,tp2:1 @4 | tp1:2 @3", 17, GPT),
    "wide twins": on(WIDE_TWINS, 18),
    "wide twins, both optimizers' options": on(WIDE_TWINS, 19, GATED, *BOTH),
    "in sequence": on("tp2:1,tp1:1 @4 | tp1:2 @3", 23, (*GATED, "--sequence-parallel")),
    "wide twins in sequence": on(WIDE_TWINS, 24, (*GATED, "--sequence-parallel"), *BOTH),
    "one wide stage": on("tp2:2 @4 | tp2:2 @3", 20, GATED),
    "one wide stage, recomputed": on("tp2:2 @4 | tp2:2 @3", 21, (*GATED, *FULL)),
    "uneven widths": on("tp2(3:1):1,tp1:1 @4 | tp1:2 @3", 22, GPT),
    "twins, heads": on(TWINS, 50, heads=2),
    "triplets, heads, recomputed": on(TRIPLETS, 51, (*GPT, *FULL), heads=4),
    "wide twins, heads": on(WIDE_TWINS, 52, GPT, *BOTH, heads=2),
    "wide twins in sequence, heads": on(WIDE_TWINS, 53, (*GPT, "--sequence-parallel"), heads=2),
    "searched twins": on(TWINS, None),
    "searched, unlike": on(UNLIKE, None, GATED, *DIVIDED),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * c.is_slow) for n, c in CASES.items()]
)
def test_a_deal_to_replicas_trains_as_one_process(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    ours, one = run(case, case.begin, tmp_path)
    assert_equal(ours, one, GRADIENT_GATED if "--swiglu" in case.flags else GRADIENT)
    if name.startswith(("groups", "twins", "triplets", "wide twins")):
        log = (ours.directory / f"rank-{ours.num_ranks - 1}.log").read_text()
        assert re.search(r"groups of the last step: [^|]*x[23]", log)


@pytest.mark.slow
def test_a_replica_without_a_sequence(tmp_path: Path) -> None:
    """The second of three pipelines has nothing, the first and third all."""

    def begin(rank: int) -> None:
        def deal(tree: object, documents: steps.Documents) -> steps.Dealt:
            whole = [(len(document["tokens"]),) for document in documents]
            groups = [GroupTokens(2 * (k % 2), (k,), (t,), 1.0) for k, t in enumerate(whole)]
            return StepTokens(tuple((group,) for group in groups)), ""

        steps.dealt_tokens = deal

    ours, one = run(on(TRIPLETS, 0, (*GATED, *OVERLAP)), begin, tmp_path)
    assert_equal(ours, one, GRADIENT_GATED)


@pytest.mark.slow
def test_a_plan_with_its_own_launch_counts_and_recomputation(tmp_path: Path) -> None:
    plan = plan_from_layout(parse_layout(TWINS))
    replicas = []
    for r, replica in enumerate(plan.replicas):
        stages = [
            replace(stage, devices=(f"a:{2 * r + s}",), recompute=("none", "full")[s])
            for s, stage in enumerate(replica.stages)
        ]
        stages[0] = replace(stages[0], num_launched_forwards=3)
        replicas.append(replace(replica, stages=tuple(stages)))
    cluster = load_cluster(write_cluster(tmp_path / "cluster.yaml", a=("FAST", 4)))
    plan = replace(
        plan, replicas=tuple(replicas), hosts=hosts_of((f"a:{i}" for i in range(4)), cluster)
    )
    (tmp_path / "plan.json").write_text(json.dumps(plan_to_data(plan)))
    case = Case({"a": ("FAST", 4)}, GATED, (f"--hetero-plan={tmp_path / 'plan.json'}",), seed=30)
    ours, one = run(case, deal_at_random(30), tmp_path)
    assert_equal(ours, one, GRADIENT_GATED)
