"""Random programs of a graph: any that its rules and collectives allow."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tools.referees.hap.prices import after_turn
from tools.referees.hap.states import (
    Graph,
    Held,
    Instruction,
    LayerProgram,
    Rule,
    Step,
)


def random_program(
    graph: Graph, rng: Random, allowed: Callable[[Step, Rule], bool] | None = None
) -> LayerProgram:
    """A walk from step to step: a rule that can be followed, or now and then a collective first."""
    while True:
        program = _walk(graph, rng, allowed)
        if program is not None:
            return program


def _walk(
    graph: Graph, rng: Random, allowed: Callable[[Step, Rule], bool] | None
) -> LayerProgram | None:
    there: dict[Held, bool] = {}
    done: list[Instruction] = []
    for step in graph.steps:
        while True:
            rules = [
                rule
                for rule in step.rules
                if (allowed is None or allowed(step, rule))
                and all(need in there for need in rule.needs)
            ]
            conversions = [
                Instruction(kind, held[0], state, held[1])
                for held in sorted(there)
                if held[0] in step.reads
                for kind, state in graph.conversions(held)
                if (held[0], state) not in there
            ]
            if rules and (not conversions or rng.random() < 0.7):
                rule = rng.choice(rules)
                break
            if not conversions:
                return None
            one = rng.choice(conversions)
            there[one.name, one.state] = True
            done.append(one)
        if step.is_turn:
            there = after_turn(there, step)
        there.update(dict.fromkeys(rule.makes, False))
        kind = "compute" if step.computes else "demand"
        done.append(Instruction(kind, step.name, rule.division))  # type: ignore[arg-type]
    return tuple(done)
