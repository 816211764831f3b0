"""Programs that the runtime executes, as stages and replicas of a plan.

Of all programs of a layer the runtime has these: heads and columns divided (a tensor-parallel
group), tokens divided (context parallelism), and GPUs side by side as replicas, with whole or with
sharded layers.  A program in which an operator is divided otherwise than its form says, which sends
tokens for heads (all-to-all), or which exchanges factors in place of a weight gradient, is proved
equal by tests, and is not executed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

from megatron_hetero.planner.moves.group_shares import FINEST
from tools.referees.hap.layer import SIDE_BY_SIDE, TOGETHER
from tools.referees.hap.prices import ProgramPrices, Shares
from tools.referees.hap.states import (
    Dimension,
    LayerProgram,
    Rule,
    State,
    Step,
)

FormName = Literal[
    "tensor parallel", "context parallel", "replicas", "replicas with sharded layers"
]


@dataclass(frozen=True)
class RuntimeForm:
    """A form of programs that the runtime executes.

    Attributes:
        name: in words.
        along: dimensions of the graph.
        division: of all operators that can be divided so.
        stored: state of the weights.
        boundary: state of what layers hand on, and of operators that cannot be divided so.
        fixed: dimensions whose shares are equal.
    """

    name: FormName
    along: tuple[Dimension, ...]
    division: Dimension
    stored: State
    boundary: State
    fixed: tuple[Dimension, ...] = ()

    def allows(self, step: Step, rule: Rule) -> bool:
        """Return whether a program of this form may follow a rule."""
        if not step.computes:
            wanted = self.stored if "weight" in step.name else self.boundary
            return rule.division == wanted
        can = any(other.division == self.division for other in step.rules)
        return rule.division == (self.division if can else self.boundary)

    def stage(self, shares: Shares) -> str | None:
        """Return the stage of a layout, without its layers, that does programs of this form; None
        of GPUs side by side, which are replicas."""
        parts = whole_shares(shares[self.division])
        table = f"({':'.join(map(str, parts))})" if len(set(parts)) > 1 else ""
        if self.name == "tensor parallel":
            return f"tp{len(parts)}{table}"
        return f"tp1cp{len(parts)}{table}" if self.name == "context parallel" else None


TENSOR = RuntimeForm("tensor parallel", TOGETHER, "columns", "columns", "whole")
TENSOR_AND_SEQUENCE = RuntimeForm(
    "tensor parallel", TOGETHER, "columns", "columns", "tokens", ("tokens",)
)
"""Under sequence parallelism, whose parts are equal."""
CONTEXT = RuntimeForm("context parallel", TOGETHER, "tokens", "whole", "tokens")
REPLICAS = RuntimeForm("replicas", SIDE_BY_SIDE, "sequences", "whole", "sequences")
SHARDED = RuntimeForm(
    "replicas with sharded layers", SIDE_BY_SIDE, "sequences", "elements", "sequences"
)


def runtime_forms(sequence_parallel: bool, distributed_optimizer: bool) -> tuple[RuntimeForm, ...]:
    """Return the forms that a job's runtime executes.

    Args:
        sequence_parallel: `--sequence-parallel`.
        distributed_optimizer: `--use-distributed-optimizer`, which sharded layers need.
    """
    tensor = TENSOR_AND_SEQUENCE if sequence_parallel else TENSOR
    sharded = (SHARDED,) if distributed_optimizer else ()
    return tensor, CONTEXT, REPLICAS, *sharded


def form_of(prices: ProgramPrices, program: LayerProgram) -> RuntimeForm | None:
    """Return the form of a program that the runtime executes; None of any other.

    Args:
        prices: of its graph.
        program: instruction by instruction.
    """
    steps = {step.name: step for step in prices.graph.steps}
    done = [
        (steps[one.name], next(r for r in steps[one.name].rules if r.division == one.state))
        for one in program
        if one.kind in ("compute", "demand")
    ]
    if any(one.kind == "all-to-all" for one in program):
        return None
    for form in (TENSOR, TENSOR_AND_SEQUENCE, CONTEXT, REPLICAS, SHARDED):
        if all(form.allows(step, rule) for step, rule in done):
            return form
    return None


def lacks(prices: ProgramPrices, program: LayerProgram) -> tuple[str, ...]:
    """Return what the runtime lacks for a program, in words; nothing where it executes it.

    Args:
        prices: of its graph.
        program: instruction by instruction.
    """
    if form_of(prices, program) is not None:
        return ()
    found = []
    if sent := [one.name for one in program if one.kind == "all-to-all"]:
        found.append(f"all-to-all of {', '.join(sent)}")
    if weights := exchanged_factors(prices, program):
        found.append(f"exchange of factors for {', '.join(weights)}")
    divisions = {one.state for one in program if one.kind == "compute"} - {"whole"}
    found.append(f"operators divided by {' and '.join(sorted(divisions))} in one layer")
    return tuple(found)


def exchanged_factors(prices: ProgramPrices, program: LayerProgram) -> tuple[str, ...]:
    """Return the weights whose gradient every GPU computes whole from gathered factors, inputs and
    output gradients, in place of a sum over the GPUs.

    Args:
        prices: of its graph.
        program: instruction by instruction.
    """
    gathered = {one.name for one in program if one.kind == "all-gather"}
    steps = {step.name: step for step in prices.graph.steps}
    return tuple(
        made[1:]
        for one in program
        if one.kind == "compute" and one.state == "whole"
        for rule in steps[one.name].rules[:1]
        for made, _ in rule.makes
        if made in prices.graph.weight_gradients and steps[one.name].reads & gathered
    )


def whole_shares(shares: tuple[float, ...]) -> tuple[int, ...]:
    """Return shares as small integers, one at least for each GPU; equal ones where shares differ by
    less than the finest unit.

    >>> whole_shares((0.5, 0.25, 0.25))
    (2, 1, 1)
    >>> whole_shares((0.333, 0.333, 0.334))
    (1, 1, 1)
    """
    if FINEST * (max(shares) - min(shares)) < 1:
        return (1,) * len(shares)
    parts = [max(1, int(FINEST * share)) for share in shares]
    rest = [FINEST * share - part for share, part in zip(shares, parts, strict=True)]
    for _ in range(FINEST - sum(parts)):
        i = rest.index(max(rest))
        parts[i] += 1
        rest[i] -= 1
    return tuple(part // gcd(*parts) for part in parts)
