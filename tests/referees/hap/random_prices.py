"""Random graphs and prices of groups, for the search and the linear programme."""

from __future__ import annotations

from random import Random

from megatron_hetero.cluster.node_links import Link
from tools.referees.hap.prices import ProgramPrices, Shares
from tools.referees.hap.states import (
    Dimension,
    Graph,
    Held,
    Rule,
    State,
    Step,
    operator,
)

DIMENSIONS: tuple[Dimension, ...] = ("sequences", "tokens", "columns", "elements")


def random_graph(rng: Random, num_operators: int) -> Graph:
    """A chain of operators on tensors of tokens (t), hidden units (h) and columns (c), with weights
    and gradients of weights, an input, an output and mostly a turn in the middle."""
    letters = {"A0": "th", "W0": "hc", "W1": "ch"}
    boundary: tuple[State, ...] = ("whole", "tokens")
    stored: tuple[State, ...] = ("whole", "columns", "elements")
    steps = [
        _demand("input", [((), (("A0", s), ("boundary", s))) for s in boundary], boundary),
        _demand(
            "weights", [((), (("W0", s), ("W1", s), ("as stored", s))) for s in stored], stored
        ),
    ]
    there, gradients = ["A0"], []
    turn = rng.randrange(1, num_operators) if num_operators > 2 and rng.random() < 0.8 else None
    for number in range(num_operators):
        if number == turn:
            steps.append(_turn(there[-1], rng))
        reads = [there[-1]]
        if rng.random() < 0.3 and len(there) > 1:
            reads.append(rng.choice(there[:-1]))
        if number > 2 and rng.random() < 0.35 and len(gradients) < 2:
            name, of = f"dW{len(gradients)}", letters[f"W{len(gradients)}"]
            gradients.append(name)
        else:
            if rng.random() < 0.6:
                reads.append(rng.choice(("W0", "W1")))
            name, of = f"A{number + 1}", rng.choice(("th", "tc"))
            there.append(name)
        letters[name] = of
        seen = {
            t: "sc" if letters[t] == "tc" and rng.random() < 0.15 else letters[t] for t in reads
        }
        steps.append(operator(f"step {number}", seen, {name: of}))
    steps.append(
        _demand("output", [(((there[-1], s), ("boundary", s)), ()) for s in boundary], boundary)
    )
    if gradients:
        ends = [((*[(g, s) for g in gradients], ("as stored", s)), ()) for s in stored]
        steps.append(_demand("gradients", ends, stored))
    names = [step.name for step in steps if step.computes]
    first = frozenset(name for name in names if rng.random() < 0.5)
    parts = (first, frozenset(names) - first) if rng.random() < 0.7 else (frozenset(names),)
    return Graph(tuple(steps), letters, frozenset(gradients), parts=parts)


def _demand(
    name: str,
    rules: list[tuple[tuple[Held, ...], tuple[Held, ...]]],
    states: tuple[State, ...],
) -> Step:
    made = tuple(Rule(s, needs, makes) for s, (needs, makes) in zip(states, rules, strict=True))
    return Step(name, made, computes=False)


def _turn(tensor: str, rng: Random) -> Step:
    rules = (Rule("tokens", ((tensor, "tokens"),), ()), Rule("whole", ((tensor, "whole"),), ()))
    keeps = (tensor,) if rng.random() < 0.5 else ()
    return Step("turn", rules, computes=False, is_turn=True, keeps_copies=keeps)


def random_prices(rng: Random, graph: Graph, num_gpus: int) -> ProgramPrices:
    """Steps, collectives and memory of about the same size; every third group is short of it."""
    lines = {}
    for step in graph.steps:
        if not step.computes:
            continue
        work = [rng.uniform(0.5, 2) * 10 ** rng.uniform(-0.5, 0.5) for _ in range(num_gpus)]
        for rule in step.rules:
            fixed = [rng.uniform(0, 0.1) for _ in work]
            if rule.division == "whole":
                own = [(f + w, 0.0) for f, w in zip(fixed, work, strict=True)]
            else:
                own = list(zip(fixed, work, strict=True))
            lines[step.name, rule.division] = tuple(own)
    scale = 10 ** rng.uniform(-1.5, 0.7)
    link = Link(1.0, rng.uniform(0, 0.02), reduce_bytes_per_s=rng.choice((float("inf"), 20.0)))
    size = {tensor: scale * rng.uniform(0.3, 2) for tensor in graph.letters}
    stored: dict[tuple[str, State], tuple[float, float]] = {
        ("weights", "whole"): (3.0, 0.0),
        ("weights", "columns"): (0.2, 3.0),
        ("weights", "elements"): (0.5, 3.0),
    }
    kept = {tensor: rng.uniform(0, 1) for tensor in graph.letters if tensor.startswith("A")}
    room = float("inf") if rng.random() < 0.67 else rng.uniform(2.0, 5.0)
    return ProgramPrices(
        graph,
        lines,
        size,
        link,
        (1 / num_gpus, link.latency_s),
        rng.choice((1, 4, 16)),
        stored,
        kept,
        tuple(room * rng.uniform(0.7, 1.3) for _ in range(num_gpus)),
    )


def random_shares(rng: Random, num_gpus: int) -> Shares:
    """Shares along every dimension."""
    found = {}
    for dimension in DIMENSIONS:
        parts = [rng.uniform(0.2, 1) for _ in range(num_gpus)]
        found[dimension] = tuple(part / sum(parts) for part in parts)
    return found
