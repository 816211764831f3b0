"""States of tensors on a group of GPUs, and the collectives that lead from one to another.

A tensor is *whole* on every GPU; *divided* along one of its dimensions, each GPU with its share; or
*partial*, the sum of what the GPUs have.  An operator is written like an einsum, a letter for each
dimension, and its rules follow from the letters alone (`operator`): divided along a dimension, it
needs every input that has this dimension divided and all others whole, and gives every output that
has it divided and all others partial; or it works on whole tensors.  These are the rules of HAP
(arXiv 2401.05965, section 4), which lists them operator by operator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Dimension = Literal["sequences", "tokens", "columns", "elements"]
"""What shares divide: whole sequences; tokens of every sequence; heads or columns; the elements of
a weight, in any order, as GPUs that gather it before use keep it."""
State = Literal["whole", "partial", "sequences", "tokens", "columns", "elements"]
"""A dimension stands for "divided along it"."""
Held = tuple[str, State]
"""A tensor and the state in which it is there."""
Collective = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "slice"]
"""A slice takes its share of what is whole, and moves nothing."""

DIMENSIONS: Mapping[str, Dimension] = {"n": "sequences", "t": "tokens", "c": "columns"}
"""Letters that can be divided.  Others cannot: hidden units (h), keys of all tokens (s)."""


@dataclass(frozen=True)
class Rule:
    """A way to do a step: `needs` before it, `makes` after it; `division` is the dimension along
    which its work is divided."""

    division: State
    needs: tuple[Held, ...]
    makes: tuple[Held, ...]


@dataclass(frozen=True)
class Step:
    """An operator, or a demand that computes nothing; a program follows one rule of each step.

    `is_turn` marks the end of the forward pass, behind which copies that collectives made are
    gone, of all tensors but those of `keeps_copies`.
    """

    name: str
    rules: tuple[Rule, ...]
    computes: bool = True
    is_turn: bool = False
    keeps_copies: tuple[str, ...] = ()

    @property
    def reads(self) -> frozenset[str]:
        """Return the tensors that its rules need."""
        return frozenset(tensor for rule in self.rules for tensor, _ in rule.needs)


@dataclass(frozen=True)
class Graph:
    """Steps in the order in which they run, and the letters of every tensor.

    `weight_gradients` are the sums of a training step: whole ones stay whole.  `along` are the
    dimensions along which activations are divided.  `parts` are names of operators, each in one of
    them, that have few tensors in common: the estimate of the search looks at each by itself.
    """

    steps: tuple[Step, ...]
    letters: Mapping[str, str]
    weight_gradients: frozenset[str] = frozenset()
    along: tuple[Dimension, ...] = ("tokens", "columns")
    parts: tuple[frozenset[str], ...] = ()

    def conversions(self, held: Held) -> Iterator[tuple[Collective, State]]:
        """Yield the collectives that a tensor in a state allows, and the states they lead to."""
        tensor, state = held
        own = [DIMENSIONS[x] for x in self.letters.get(tensor, "") if x in DIMENSIONS]
        divisible: list[State] = [dimension for dimension in own if dimension in self.along]
        if is_of_weight(self.letters.get(tensor, "n")):
            divisible.append("elements")
        if state == "partial":
            yield "all-reduce", "whole"
            for other in divisible:
                yield "reduce-scatter", other
        elif state == "whole":
            if tensor not in self.weight_gradients:
                for other in divisible:
                    yield "slice", other
        elif state in divisible:
            yield "all-gather", "whole"
            for other in divisible:
                if other != state and "elements" not in (state, other):
                    yield "all-to-all", other

    def ways(self, need: Held, there: Collection[Held]) -> list[tuple[Instruction, ...]]:
        """Return the ways to bring a tensor into a state: one collective, or where none leads
        there two, through a third state.

        Args:
            need: the tensor and the state.
            there: what is there.
        """
        tensor, state = need
        single: list[tuple[Instruction, ...]] = []
        double: list[tuple[Instruction, ...]] = []
        for held in there:
            if held[0] != tensor:
                continue
            for kind, to in self.conversions(held):
                first = Instruction(kind, tensor, to, held[1])
                if to == state:
                    single.append((first,))
                    continue
                for further, end in self.conversions((tensor, to)):
                    if end == state and (tensor, to) not in there:
                        double.append((first, Instruction(further, tensor, end, to)))
        return single or double


def is_of_weight(letters: str) -> bool:
    """Return whether a tensor with these dimensions is a weight, or the gradient of one."""
    return not set(letters) & {"n", "t", "s"}


@dataclass(frozen=True)
class Instruction:
    """One line of a program: a step under one of its rules, or a collective on a tensor.

    `state` is the rule's division, or the state that the collective leads to from `before`.
    """

    kind: Literal["compute", "demand"] | Collective
    name: str
    state: State
    before: State = "whole"

    def __str__(self) -> str:
        if self.kind in ("compute", "demand"):
            return f"{self.kind} {self.name} ({self.state})"
        return f"{self.kind} {self.name} ({self.before} -> {self.state})"


LayerProgram = tuple[Instruction, ...]
"""All that the GPUs of a group do for one micro-batch."""


def operator(
    name: str,
    reads: Mapping[str, str],
    writes: Mapping[str, str],
    along: Collection[Dimension] = ("tokens", "columns"),
) -> Step:
    """Return a step with the rules that follow from the letters of its tensors.

    Args:
        name: of the operator.
        reads, writes: tensor -> letters, as this operator sees them.
        along: dimensions along which work may be divided.

    >>> [rule.makes for rule in operator("up", {"x": "th", "w": "hc"}, {"u": "tc"}).rules]
    [(('u', 'whole'),), (('u', 'columns'),), (('u', 'tokens'),)]
    """
    found = [
        Rule(
            "whole",
            tuple((tensor, "whole") for tensor in reads),
            tuple((tensor, "whole") for tensor in writes),
        )
    ]
    for letter in sorted(set("".join(reads.values()))):
        dimension = DIMENSIONS.get(letter)
        if dimension is None or dimension not in along:
            continue
        needs: list[Held] = [(x, dimension if letter in of else "whole") for x, of in reads.items()]
        makes: list[Held] = [
            (x, dimension if letter in of else "partial") for x, of in writes.items()
        ]
        found.append(Rule(dimension, tuple(needs), tuple(makes)))
    return Step(name, tuple(found))
