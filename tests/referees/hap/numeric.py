"""A layer's operators in numpy, on one device and as a program has the GPUs of a group do them.

`run` does what a program says, slice by slice: it knows the states of tensors and the collectives,
and nothing of the rules that made the program.  Heads and columns are whole units along the axis
"c"; what lies within a head stands behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tools.referees.hap.layer import WEIGHTS
from tools.referees.hap.states import (
    DIMENSIONS,
    Graph,
    LayerProgram,
    is_of_weight,
)

Array = npt.NDArray[np.float64]
Edges = Mapping[str, Sequence[int]]
"""Dimension -> where each GPU's part begins, and the end."""

SEQUENCES, TOKENS, HIDDEN, HEADS, CHANNELS = 3, 8, 5, 6, 2
SHAPES = {
    "X": (SEQUENCES, TOKENS, HIDDEN), "Y": (SEQUENCES, TOKENS, HIDDEN),
    "dG": (SEQUENCES, TOKENS, HIDDEN), "dY": (SEQUENCES, TOKENS, HIDDEN),
    "QKV": (HIDDEN, HEADS, 3, CHANNELS), "PROJ": (HEADS, CHANNELS, HIDDEN),
    "UP": (HIDDEN, HEADS), "DOWN": (HEADS, HIDDEN),
}  # fmt: skip
SIZES = {"sequences": SEQUENCES, "tokens": TOKENS, "columns": HEADS}


def _norm(x: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1.0)


def _norm_gradient(dn: Array, x: Array) -> Array:
    r = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + 1.0)
    return r * dn - x * r**3 * (dn * x).mean(-1, keepdims=True)


def _active(u: Array) -> Array:
    return np.tanh(u)


def _slope(u: Array) -> Array:
    return 1 - np.tanh(u) ** 2


def _weights_of_attention(q: Array, k: Array, first: int) -> Array:
    scores = np.einsum("ntcd,nscd->ncts", q, k)
    later = np.arange(k.shape[1])[None] > (first + np.arange(q.shape[1]))[:, None]
    scores = np.where(later, -np.inf, scores)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(scores / scores.sum(-1, keepdims=True))


def _core(q: Array, kv: Array, first: int) -> Array:
    p = _weights_of_attention(q, kv[..., 0, :], first)
    return np.einsum("ncts,nscd->ntcd", p, kv[..., 1, :])


def _core_gradients(do: Array, q: Array, kv: Array, first: int) -> tuple[Array, Array]:
    k, v = kv[..., 0, :], kv[..., 1, :]
    p = _weights_of_attention(q, k, first)
    dv = np.einsum("ncts,ntcd->nscd", p, do)
    dp = np.einsum("ntcd,nscd->ncts", do, v)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True))
    dk = np.einsum("ncts,ntcd->nscd", ds, q)
    return np.einsum("ncts,nscd->ntcd", ds, k), np.stack([dk, dv], axis=-2)


Operate = Callable[[Mapping[str, Array], int], Mapping[str, Array]]
"""Inputs and the first of the own tokens -> outputs."""


def _projected(x: Mapping[str, Array], _: int) -> Mapping[str, Array]:
    made = np.einsum("nth,hckd->ntckd", x["N"], x["QKV"])
    return {"Q": made[..., 0, :], "KV": made[..., 1:, :]}


def _dqkv(x: Mapping[str, Array]) -> Array:
    return np.concatenate([x["dQ"][..., None, :], x["dKV"]], axis=-2)


OPERATORS: dict[str, Operate] = {
    "norm of attention": lambda x, _: {"N": _norm(x["X"])},
    "query, key, value": _projected,
    "core attention": lambda x, first: {"O": _core(x["Q"], x["KV"], first)},
    "projection": lambda x, _: {"F": np.einsum("ntcd,cdh->nth", x["O"], x["PROJ"])},
    "norm of MLP": lambda x, _: (
        {"Y": x["X"] + x["F"], "M": _norm(x["X"] + x["F"])} if "X" in x else {"M": _norm(x["Y"])}
    ),
    "up": lambda x, _: {"U": x["M"] @ x["UP"]},
    "down": lambda x, _: {"G": _active(x["U"]) @ x["DOWN"]},
    "gradient of U": lambda x, _: {"dU": (x["dG"] @ x["DOWN"].T) * _slope(x["U"])},
    "gradient of DOWN": lambda x, _: {"dDOWN": np.einsum("ntc,nth->ch", _active(x["U"]), x["dG"])},
    "gradient of M": lambda x, _: {"dM": x["dU"] @ x["UP"].T},
    "gradient of UP": lambda x, _: {"dUP": np.einsum("nth,ntc->hc", x["M"], x["dU"])},
    "gradient of norm of MLP": lambda x, _: {"dY": _norm_gradient(x["dM"], x["Y"]) + x["dG"]},
    "gradient of context": lambda x, _: {"dO": np.einsum("nth,cdh->ntcd", x["dY"], x["PROJ"])},
    "gradient of PROJ": lambda x, _: {"dPROJ": np.einsum("ntcd,nth->cdh", x["O"], x["dY"])},
    "gradient of core attention": lambda x, first: dict(
        zip(("dQ", "dKV"), _core_gradients(x["dO"], x["Q"], x["KV"], first), strict=True)
    ),
    "gradient of N": lambda x, _: {"dN": np.einsum("ntckd,hckd->nth", _dqkv(x), x["QKV"])},
    "gradient of QKV": lambda x, _: {"dQKV": np.einsum("nth,ntckd->hckd", x["N"], _dqkv(x))},
    "gradient of norm of attention": lambda x, _: {"dX": _norm_gradient(x["dN"], x["X"]) + x["dY"]},
}


def given(seed: int) -> dict[str, Array]:
    """Inputs, weights and output gradients."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape) for name, shape in SHAPES.items()}


def on_one_device(graph: Graph, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """All tensors of the graph, whole."""
    there = dict(inputs)
    for step in graph.steps:
        if step.computes:
            there.update(OPERATORS[step.name]({t: there[t] for t in step.reads}, 0))
    return there


def own_part(whole: Array, letters: str, dimension: str, edges: Edges, gpu: int) -> Array:
    """A GPU's part of a tensor that is divided."""
    start, stop = edges[dimension][gpu], edges[dimension][gpu + 1]
    if dimension == "elements":
        start, stop = (whole.size * edge // edges[dimension][-1] for edge in (start, stop))
        return whole.reshape(-1)[start:stop]
    axis = next(i for i, letter in enumerate(letters) if DIMENSIONS.get(letter) == dimension)
    return np.take(whole, range(start, stop), axis)


def axis_of(letters: str, dimension: str) -> int:
    return next(i for i, letter in enumerate(letters) if DIMENSIONS.get(letter) == dimension)


class Exchange:
    """Collectives among GPUs that one process plays, all of them: a tensor is what each has."""

    def __init__(self, edges: Edges, num_gpus: int) -> None:
        self.edges, self.gpus = edges, list(range(num_gpus))

    def convert(
        self, parts: Sequence[Array], letters: str, before: str, after: str, shape: tuple[int, ...]
    ) -> list[Array]:
        """A collective or a slice: what every GPU has behind it.

        `shape` is that of a whole weight."""
        if before == "whole":
            whole = list(parts)
        else:
            whole = [self._joined(parts, letters, before, shape)] * len(self.gpus)
        if after == "whole":
            return whole
        pairs = zip(whole, self.gpus, strict=True)
        return [own_part(one, letters, after, self.edges, gpu) for one, gpu in pairs]

    def _joined(
        self, parts: Sequence[Array], letters: str, before: str, shape: tuple[int, ...]
    ) -> Array:
        if before == "partial":
            return np.asarray(sum(parts))
        if before == "elements":
            return np.concatenate(list(parts)).reshape(shape)
        return np.concatenate(list(parts), axis_of(letters, before))


def run(
    graph: Graph, program: LayerProgram, inputs: Mapping[str, Array], exchange: Exchange
) -> dict[tuple[str, str], list[Array]]:
    """Do a program; returns (tensor, state) -> what each played GPU has, of all that is there."""
    letters, edges = graph.letters, exchange.edges
    there: dict[tuple[str, str], list[Array]] = {}
    originals: set[tuple[str, str]] = set()
    steps = iter(graph.steps)
    for one in program:
        if one.kind not in ("compute", "demand"):
            is_weight = is_of_weight(letters[one.name])
            shape = SHAPES[one.name.removeprefix("d")] if is_weight else ()
            there[one.name, one.state] = exchange.convert(
                there[one.name, one.before], letters[one.name], one.before, one.state, shape
            )
            continue
        step = next(steps)
        assert step.name == one.name
        rule = next(rule for rule in step.rules if rule.division == one.state)
        assert all(need in there or need[0] not in letters for need in rule.needs)
        if step.is_turn:
            there = {
                held: own
                for held, own in there.items()
                if held in originals or held[0] in step.keeps_copies
            }
        originals.update(rule.makes)
        if one.kind == "demand":
            for tensor, state in rule.makes:
                if tensor in letters:
                    whole = [inputs[tensor] for _ in exchange.gpus]
                    if state != "whole":
                        whole = [
                            own_part(of, letters[tensor], state, edges, gpu)
                            for of, gpu in zip(whole, exchange.gpus, strict=True)
                        ]
                    there[tensor, state] = whole
            continue
        results = []
        for place, gpu in enumerate(exchange.gpus):
            own = {tensor: there[tensor, state][place] for tensor, state in rule.needs}
            first = edges["tokens"][gpu] if one.state == "tokens" else 0
            results.append(OPERATORS[one.name](own, first))
        for tensor, state in rule.makes:
            there[tensor, state] = [result[tensor] for result in results]
    return there


def edges_of(units: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Dimension -> edges, from the units of each GPU."""
    return {d: [0, *np.cumsum(own).tolist()] for d, own in units.items()}


def largest_error(
    graph: Graph, program: LayerProgram, inputs: Mapping[str, Array], exchange: Exchange
) -> float:
    """The largest relative error of all that leaves a part: its output, the gradient of its input,
    and those of its weights, each in the state in which the program leaves it."""
    expected = on_one_device(graph, inputs)
    found = run(graph, program, inputs, exchange)
    worst, checked = 0.0, set()
    demands = [step for step in graph.steps if not step.computes]
    outputs = {tensor for step in demands for tensor in step.reads}
    for (tensor, state), parts in found.items():
        if tensor not in outputs or tensor not in expected or state == "partial":
            continue
        checked.add(tensor)
        whole, letters = expected[tensor], graph.letters[tensor]
        for gpu, part in zip(exchange.gpus, parts, strict=True):
            own = whole
            if state != "whole":
                own = own_part(whole, letters, state, exchange.edges, gpu)
            assert part.shape == own.shape
            if own.size:
                worst = max(worst, float(np.abs(part - own).max() / np.abs(whole).max()))
    read = {tensor for step in graph.steps for tensor in step.reads}
    assert checked >= {f"d{weight}" for of in WEIGHTS.values() for weight in of if weight in read}
    return worst
