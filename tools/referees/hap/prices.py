"""Seconds and bytes of a program at given shares.

GPUs compute side by side and wait for each other in every collective, so a program lasts as long as
its slowest GPU between two collectives, summed over them, and the collectives.  A step takes a GPU
`fixed + slope * share` seconds, a collective what `cost.network.seconds` says: unlike shares are
filled up to the largest (`runtime.parallel.context_attention`).  Gradients of weights that each GPU
keeps whole are summed once in a training step, for all micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cost.network.collectives import (
    ring_all_gather_s,
    ring_all_reduce_s,
    ring_reduce_scatter_s,
)
from tools.referees.hap.states import (
    Dimension,
    Graph,
    Held,
    Instruction,
    LayerProgram,
    Rule,
    State,
    Step,
)

Shares = Mapping[Dimension, tuple[float, ...]]
"""Part of each GPU along each dimension; the parts of a dimension sum to 1."""
Line = tuple[float, float]
"""What there is at a share of 0, and what a share of 1 adds to it."""
Seconds = tuple[float, ...]
"""Of each GPU."""


@dataclass(frozen=True)
class ProgramPrices:
    """Prices of the steps of a graph on the GPUs of a group.

    Attributes:
        graph: the steps.
        compute_s: seconds of a step under a division, of each GPU; the share of a whole step is 1.
        num_bytes: of each whole tensor on its way.
        link: the slowest between two of the GPUs.
        all_to_all: seconds of an all-to-all for each byte of the tensor in equal shares, latency.
        num_micro_batches: of a training step, that share the sum of a weight gradient.
        stored_bytes: what a demand under a division takes of a GPU: weights and their states.
        kept_bytes: what a whole tensor takes from the forward to the backward pass.
        room_bytes: what each GPU has for all of this.
        side_by_side: GPUs have micro-batches of their own; a share is their part of all.
    """

    graph: Graph
    compute_s: Mapping[tuple[str, State], tuple[Line, ...]]
    num_bytes: Mapping[str, float]
    link: Link
    all_to_all: Line
    num_micro_batches: int = 1
    stored_bytes: Mapping[tuple[str, State], Line] = field(default_factory=dict)
    kept_bytes: Mapping[str, float] = field(default_factory=dict)
    room_bytes: tuple[float, ...] = ()
    side_by_side: bool = False

    @property
    def num_gpus(self) -> int:
        """Return the number of GPUs."""
        return len(self.room_bytes)

    def step_s(self, name: str, division: State, shares: Shares) -> Seconds:
        """Return the seconds of a step on each GPU.

        Args:
            name, division: of the step and of the rule that it follows.
            shares: of the GPUs.
        """
        own = self.compute_s.get((name, division))
        if own is None:
            return (0.0,) * self.num_gpus
        parts = share_of(shares, division, self.num_gpus)
        return tuple([fixed + slope * x for (fixed, slope), x in zip(own, parts, strict=True)])

    def collective_s(self, instruction: Instruction, shares: Shares) -> float:
        """Return the seconds of a collective in a micro-batch."""
        fixed_s, terms = self.collective_terms(instruction)
        return fixed_s + sum(
            slope * max(max(share_of(shares, d, self.num_gpus)) for d in of) for of, slope in terms
        )

    def collective_terms(
        self, instruction: Instruction
    ) -> tuple[float, tuple[tuple[tuple[State, ...], float], ...]]:
        """Return the seconds of a collective as a constant and (dimensions, seconds for the largest
        share along any of them)."""
        count, link = self.num_gpus, self.link
        size = self.num_bytes.get(instruction.name, 0.0)
        kind, ends = instruction.kind, (instruction.before, instruction.state)
        if kind == "slice" or count == 1:
            return 0.0, ()
        if kind == "all-to-all":
            per_byte, latency_s = self.all_to_all
            return (count - 1) * latency_s, ((ends, per_byte * size * count),)
        time_s = {
            "all-reduce": ring_all_reduce_s,
            "reduce-scatter": ring_reduce_scatter_s,
            "all-gather": ring_all_gather_s,
        }[kind]
        whole_s, empty_s = time_s(size, count, link), time_s(0.0, count, link)
        if self.is_summed_once(instruction):
            return whole_s / self.num_micro_batches, ()
        if "elements" in ends and self.side_by_side:
            # There are as many gathers as the GPU with the most micro-batches has.
            return 0.0, ((("sequences",), whole_s),)
        divided = [state for state in ends if state not in ("whole", "partial")]
        if not divided or "elements" in ends:
            return whole_s, ()
        return empty_s, (((divided[0],), (whole_s - empty_s) * count),)

    def is_summed_once(self, instruction: Instruction) -> bool:
        """Return whether a collective makes a weight gradient whole, which waits for the end of
        the training step."""
        return instruction.name in self.graph.weight_gradients and instruction.state == "whole"

    def bytes_of(self, held: Held, is_stored: bool, shares: Shares) -> Seconds:
        """Return the bytes that a stored part, or a tensor kept for the backward pass, takes of
        each GPU.

        Args:
            held: the demand and its division, or the tensor and its state.
            is_stored: which of both.
            shares: of the GPUs.
        """
        fixed, slope = self.memory_line(held, is_stored)
        parts = share_of(shares, held[1], self.num_gpus)
        return tuple([fixed + slope * x for x in parts])

    def memory_line(self, held: Held, is_stored: bool) -> Line:
        """Return `bytes_of` as a line over the share."""
        if is_stored:
            return self.stored_bytes.get(held, (0.0, 0.0))
        size = self.kept_bytes.get(held[0], 0.0)
        # A GPU with micro-batches of its own keeps all of each.
        return (size, 0.0) if self.side_by_side else (0.0, size)


def share_of(shares: Shares, division: State, num_gpus: int) -> tuple[float, ...]:
    """Return the shares along a dimension; 1 of what is whole or partial.

    Args:
        shares: along each dimension.
        division: a dimension, or whole or partial.
        num_gpus: of the group.
    """
    match division:
        case "whole" | "partial":
            return (1.0,) * num_gpus
    return shares[division]


@dataclass(frozen=True)
class ProgramTerms:
    """A program as the price sees it: its segments, its collectives, and what it keeps in memory.

    `kept`: (tensor, state, is stored), each with its bytes on every GPU (`ProgramPrices.bytes_of`).
    """

    segments: tuple[tuple[Held, ...], ...]
    collectives: tuple[Instruction, ...]
    kept: tuple[tuple[Held, bool], ...]


def terms_of(program: LayerProgram, prices: ProgramPrices) -> ProgramTerms:
    """Return the terms of a program.

    Args:
        program: instruction by instruction.
        prices: of its graph; they decide in which collectives the GPUs meet.
    """
    steps = iter(prices.graph.steps)
    segments: list[list[Held]] = [[]]
    collectives, stored = [], []
    there: dict[Held, bool] = {}  # whether it is a copy
    kept: list[tuple[Held, bool]] = []
    for instruction in program:
        if instruction.kind not in ("compute", "demand"):
            collectives.append(instruction)
            there.setdefault((instruction.name, instruction.state), True)
            if instruction.kind != "slice" and not prices.is_summed_once(instruction):
                segments.append([])
            continue
        step = next(steps)
        held: Held = (step.name, instruction.state)
        if step.computes:
            segments[-1].append(held)
        elif held in prices.stored_bytes:
            stored.append((held, True))
        if step.is_turn:
            there = after_turn(there, step)
            kept = [(one, False) for one in there]
        there.update(dict.fromkeys(rule_of(step, instruction.state).makes, False))
    read = {t for step in _behind_turn(prices.graph) for t in step.reads}
    kept = [one for one in kept if one[0][0] in read]
    return ProgramTerms(tuple(map(tuple, segments)), tuple(collectives), (*stored, *kept))


def after_turn(there: Mapping[Held, bool], step: Step) -> dict[Held, bool]:
    """Return what is left behind the forward pass: all that is no copy, and copies that stay.

    Args:
        there: what is there, and whether it is a copy.
        step: the turn.
    """
    return {held: False for held, copy in there.items() if not copy or held[0] in step.keeps_copies}


def rule_of(step: Step, division: State) -> Rule:
    """Return the rule of a step with this division."""
    return next(rule for rule in step.rules if rule.division == division)


def _behind_turn(graph: Graph) -> Iterable[Step]:
    turns = [i for i, step in enumerate(graph.steps) if step.is_turn]
    return graph.steps[turns[0] + 1 :] if turns else ()


def program_s(program: LayerProgram, prices: ProgramPrices, shares: Shares) -> float:
    """Return the seconds of a program for one micro-batch.

    Args:
        program: instruction by instruction.
        prices: of its graph on the group.
        shares: of the GPUs.
    """
    terms = terms_of(program, prices)
    total = sum(prices.collective_s(one, shares) for one in terms.collectives)
    for segment in terms.segments:
        own = [prices.step_s(name, division, shares) for name, division in segment]
        total += max((sum(of) for of in zip(*own, strict=True)), default=0.0)
    return total


def program_bytes(
    program: LayerProgram, prices: ProgramPrices, shares: Shares
) -> tuple[float, ...]:
    """Return the bytes that a program takes of each GPU.

    Args:
        program: instruction by instruction.
        prices: of its graph on the group.
        shares: of the GPUs.
    """
    kept = terms_of(program, prices).kept
    own = [prices.bytes_of(held, is_stored, shares) for held, is_stored in kept]
    return tuple(sum(of) for of in zip(*own, strict=True)) or (0.0,) * prices.num_gpus
