"""Groups of ranks that exchange values during training, for the tests on the machines.

The groups are those of the runtime: the tensor-parallel group of each stage, the two stages of each
boundary, the holders of each slice of each layer (gradient sync), and the whole job.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Literal

from megatron_hetero.plan.chunks import chain, stage_chunks
from megatron_hetero.plan.plan import Plan, Stage
from megatron_hetero.plan.ranks import rank_table


@dataclass(frozen=True)
class GroupTest:
    """A group to test: `ranks` exchange values in a collective, or across a boundary.

    At a boundary each of `senders` exchanges with each of the other ranks, both ways.
    """

    name: str
    kind: Literal["collective", "boundary"]
    ranks: tuple[int, ...]
    senders: tuple[int, ...] = ()


def group_tests(plan: Plan) -> tuple[GroupTest, ...]:
    """Return every distinct group of a plan with more than one rank, small groups first."""
    # (replica, stage) -> its ranks, ascending.
    ranks_of: dict[tuple[int, int], list[int]] = {}
    for rank, place in enumerate(rank_table(plan)):
        ranks_of.setdefault((place.replica, place.stage), []).append(rank)
    tests = [
        *_tensor_groups(plan, ranks_of),
        *_boundaries(plan, ranks_of),
        *_gradient_groups(plan, ranks_of),
        GroupTest("the whole job", "collective", tuple(range(plan.layout.num_devices))),
    ]
    # Layers, and stages of one width, often have the same ranks; one test serves all of them.
    seen: set[tuple[str, tuple[int, ...]]] = set()
    kept = []
    for test in tests:
        if len(test.ranks) > 1 and (test.kind, test.ranks) not in seen:
            seen.add((test.kind, test.ranks))
            kept.append(test)
    return tuple(kept)


def _tensor_groups(plan: Plan, ranks_of: dict[tuple[int, int], list[int]]) -> Iterator[GroupTest]:
    """Yield the tensor-parallel groups of each stage, and the context-parallel ones across these.

    The ranks of a stage are those of its first tensor-parallel group, then those of the next.
    """
    for (r, s), ranks in ranks_of.items():
        width = plan.replicas[r].stages[s].shape.tensor_parallel
        where = f"replica {r}, stage {s}"
        for i in range(0, len(ranks), width):
            group = tuple(ranks[i : i + width])
            yield GroupTest(f"tensor parallel, {where}", "collective", group)
        for i in range(width):
            yield GroupTest(f"context parallel, {where}", "collective", tuple(ranks[i::width]))


def _boundaries(plan: Plan, ranks_of: dict[tuple[int, int], list[int]]) -> Iterator[GroupTest]:
    """Yield the two stages of each boundary; an interleaved pipeline goes on from its last stage to
    its first."""
    for r, replica in enumerate(plan.replicas):
        pairs = [(min(pair), max(pair)) for pair in pairwise(chain(replica))]
        for before, after in dict.fromkeys(pairs):
            # Chunks that follow each other on one stage have no boundary between them.
            if before == after:
                continue
            senders, receivers = ranks_of[r, before], ranks_of[r, after]
            yield GroupTest(
                f"boundary between stages {before} and {after} of replica {r}",
                "boundary",
                (*senders, *receivers),
                tuple(senders),
            )


def _gradient_groups(plan: Plan, ranks_of: dict[tuple[int, int], list[int]]) -> Iterator[GroupTest]:
    """Yield the holders of each slice of each layer, one or more ranks in each replica.

    A layer is cut at the union of all shard edges.
    """
    num_layers = plan.layout.replicas[0].num_layers
    for layer in range(num_layers):
        # The stages that hold this layer, one in each replica, with their ranks.
        holders = [
            (stage, ranks_of[r, s])
            for r, replica in enumerate(plan.replicas)
            for s, stage in enumerate(replica.stages)
            for chunk in stage_chunks(stage)
            if chunk.first_layer <= layer < chunk.first_layer + chunk.num_layers
        ]
        # Cut points as parts of the whole, of all replicas together.
        edges = sorted({edge for stage, _ in holders for edge in _edges(stage)})
        for start, stop in pairwise(edges):
            ranks = tuple(
                ranks[context * stage.shape.tensor_parallel + i]
                for stage, ranks in holders
                for context in range(stage.shape.context_parallel)
                for i, (low, high) in enumerate(pairwise(_edges(stage)))
                # The ranks whose own piece has the slice in it, in every context-parallel group.
                if low <= start and stop <= high
            )
            yield GroupTest(f"gradients of layer {layer}", "collective", ranks)


def _edges(stage: Stage) -> tuple[Fraction, ...]:
    """Return the shard edges of a stage, as parts of the whole."""
    shares = stage.shape.shares or (1,) * stage.shape.tensor_parallel
    total = sum(shares)
    return tuple(Fraction(edge, total) for edge in accumulate(shares, initial=0))
