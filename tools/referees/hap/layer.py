"""The parts of a decoder layer as operators: attention, MLP, and both as one layer.

Forward and backward passes are operators alike, so weight gradients are found as all else is.  A
part begins with its norm and leaves what is added to the residual; its backward pass ends with the
gradient of the part's input, the residual's own gradient added.  Norms have no weights here: theirs
are too small to be divided.  The activation of the MLP is computed where it is read.

Letters: n sequences, t tokens, s tokens as keys, h hidden units, c heads (with their key-value
groups) or MLP columns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Literal

from tools.referees.hap.states import (
    Dimension,
    Graph,
    Held,
    Rule,
    State,
    Step,
    operator,
)

Part = Literal["attention", "mlp"]
TOGETHER: tuple[Dimension, ...] = ("tokens", "columns")
"""All GPUs of the group work on one micro-batch."""
SIDE_BY_SIDE: tuple[Dimension, ...] = ("sequences",)
"""Each GPU has micro-batches of its own, as replicas have."""

_LETTERS = {
    "X": "nth", "N": "nth", "QKV": "hc", "Q": "ntc", "KV": "ntc", "O": "ntc", "PROJ": "ch",
    "F": "nth", "Y": "nth", "M": "nth", "UP": "hc", "U": "ntc", "DOWN": "ch", "G": "nth",
    "dG": "nth", "dU": "ntc", "dDOWN": "ch", "dM": "nth", "dUP": "hc", "dY": "nth",
    "dO": "ntc", "dPROJ": "ch", "dQ": "ntc", "dKV": "ntc", "dN": "nth", "dQKV": "hc", "dX": "nth",
}  # fmt: skip
"""Weights in capitals of several letters; dW is the gradient of W.  X, Y: inputs of attention and
of the MLP; F, G: what they add to the residual; N, M: their norms."""

WEIGHTS: dict[Part, tuple[str, str]] = {"attention": ("QKV", "PROJ"), "mlp": ("UP", "DOWN")}

_FORWARD: dict[Part, tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]] = {
    "attention": (
        ("norm of attention", ("X",), ("N",)),
        ("query, key, value", ("N", "QKV"), ("Q", "KV")),
        ("core attention", ("Q", "KV"), ("O",)),
        ("projection", ("O", "PROJ"), ("F",)),
    ),
    "mlp": (
        ("norm of MLP", ("Y",), ("M",)),
        ("up", ("M", "UP"), ("U",)),
        ("down", ("U", "DOWN"), ("G",)),
    ),
}
_BACKWARD: dict[Part, tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]] = {
    "attention": (
        ("gradient of context", ("dY", "PROJ"), ("dO",)),
        ("gradient of PROJ", ("O", "dY"), ("dPROJ",)),
        ("gradient of core attention", ("dO", "Q", "KV"), ("dQ", "dKV")),
        ("gradient of N", ("dQ", "dKV", "QKV"), ("dN",)),
        ("gradient of QKV", ("N", "dQ", "dKV"), ("dQKV",)),
        ("gradient of norm of attention", ("dN", "X", "dY"), ("dX",)),
    ),
    "mlp": (
        ("gradient of U", ("dG", "DOWN", "U"), ("dU",)),
        ("gradient of DOWN", ("U", "dG"), ("dDOWN",)),
        ("gradient of M", ("dU", "UP"), ("dM",)),
        ("gradient of UP", ("M", "dU"), ("dUP",)),
        ("gradient of norm of MLP", ("dM", "Y", "dG"), ("dY",)),
    ),
}
_PARTS = tuple(
    frozenset(name for name, _, _ in (*_FORWARD[part], *_BACKWARD[part])) for part in WEIGHTS
)


def part_graph(part: Part, along: tuple[Dimension, ...] = TOGETHER) -> Graph:
    """Return one part of a layer, forward and backward.

    Args:
        part: attention or MLP.
        along: dimensions along which its work may be divided.
    """
    into, out = ("X", "F") if part == "attention" else ("Y", "G")
    gradients = ("dY", "dX") if part == "attention" else ("dG", "dY")
    return Graph(
        (
            _entered(into, along),
            _stored(part, along),
            *_operators(_FORWARD[part], along),
            _turn(out, gradients[0], along),
            *_operators(_BACKWARD[part], along),
            _left(gradients[1], along),
            _gradients_given(part, along),
        ),
        _LETTERS,
        frozenset(f"d{weight}" for own in WEIGHTS.values() for weight in own),
        along,
        _PARTS,
    )


def layer_graph(along: tuple[Dimension, ...] = TOGETHER) -> Graph:
    """Return a whole layer: forward of attention and MLP, then backward the other way round.

    Args:
        along: dimensions along which its work may be divided.
    """
    first, *mlp = _FORWARD["mlp"]
    # The norm of the MLP adds what attention gives to the residual first.
    with_residual = (first[0], ("X", "F"), ("Y", "M"))
    return Graph(
        (
            _entered("X", along),
            *[_stored(part, along) for part in WEIGHTS],
            *_operators((*_FORWARD["attention"], with_residual, *mlp), along),
            _turn("G", "dG", along),
            *_operators((*_BACKWARD["mlp"], *_BACKWARD["attention"]), along),
            _left("dX", along),
            *[_gradients_given(part, along) for part in WEIGHTS],
        ),
        _LETTERS,
        frozenset(f"d{weight}" for own in WEIGHTS.values() for weight in own),
        along,
        _PARTS,
    )


def _operators(
    steps: Collection[tuple[str, tuple[str, ...], tuple[str, ...]]], along: Collection[Dimension]
) -> list[Step]:
    return [
        operator(
            name,
            {tensor: _read(name, tensor) for tensor in reads},
            {tensor: _read(name, tensor) for tensor in writes},
            along,
        )
        for name, reads, writes in steps
    ]


def _read(name: str, tensor: str) -> str:
    """Return the letters of a tensor as an operator sees it: queries meet the keys of all
    tokens."""
    is_core = name in ("core attention", "gradient of core attention")
    return "nsc" if is_core and tensor in ("KV", "dKV") else _LETTERS[tensor]


def _entered(tensor: str, along: Collection[Dimension]) -> Step:
    """Return the demand that gives a layer its input; it leaves in the same state."""
    states = _boundary_states(along)
    return _demand("input", [((), ((tensor, s), ("boundary", s))) for s in states], states)


def _boundary_states(along: Collection[Dimension]) -> list[State]:
    """Return the states in which layers hand on: divided as tokens are, or whole."""
    states: list[State] = ["whole"] if "sequences" not in along else []
    states += [dimension for dimension in along if dimension in ("sequences", "tokens")]
    return states


def _stored(part: Part, along: Collection[Dimension]) -> Step:
    states: list[State] = ["whole", "elements"]
    states += ["columns"] if "columns" in along else []
    made = [((), (*[(w, s) for w in WEIGHTS[part]], (f"{part} as stored", s))) for s in states]
    return _demand(f"weights of {part}", made, states)


def _turn(output: str, gradient: str, along: Collection[Dimension]) -> Step:
    """Return the end of the forward pass, behind which the output's gradient is there.

    Keys and values that were gathered stay (`runtime.parallel.context_attention`); all else is
    gathered again, as Megatron does under sequence parallelism.
    """
    states = _boundary_states(along)
    rules = [(((output, s), ("boundary", s)), ((gradient, s),)) for s in states]
    return replace(_demand("turn", rules, states), is_turn=True, keeps_copies=("KV",))


def _left(gradient: str, along: Collection[Dimension]) -> Step:
    states = _boundary_states(along)
    return _demand(
        "input gradient", [(((gradient, s), ("boundary", s)), ()) for s in states], states
    )


def _gradients_given(part: Part, along: Collection[Dimension]) -> Step:
    """Return the demand that weight gradients end as their weights are stored."""
    states: list[State] = ["whole", "elements"]
    states += ["columns"] if "columns" in along else []
    rules = [
        ((*[(f"d{w}", s) for w in WEIGHTS[part]], (f"{part} as stored", s)), ()) for s in states
    ]
    return _demand(f"weight gradients of {part}", rules, states)


def _demand(
    name: str,
    rules: Iterable[tuple[tuple[Held, ...], tuple[Held, ...]]],
    states: Iterable[State],
) -> Step:
    made = tuple(Rule(s, needs, makes) for s, (needs, makes) in zip(states, rules, strict=True))
    return Step(name, made, computes=False)
