"""Measured steps of an engine, which win over the prices of tables.

A measured step lasts some multiple of what the tables say of the same step.  Between measured steps
the logarithm of this ratio is interpolated over the logarithms of tokens and lengths; beyond them
the ratio of the nearest edge holds.  So a price is exact where it was measured, has the tables'
shape in between, and is the tables' price in the measured scale outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Literal

import numpy as np

from megatron_hetero.errors import ProfileError, UsageError, some_of
from megatron_hetero.serving.prices.served import ServedModel
from megatron_hetero.serving.prices.work import StepWork, pairs_of

StepPhase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class EngineStep:
    """A step of an engine on GPUs that divide every layer.

    Attributes:
        width: GPUs that divide a layer.
        tokens: new ones of each request; 1 in decode.
        context: tokens of each request before the step.
        batch: requests in the step.
        num_layers: layers that were measured alone, without embedding, head and host; None: a whole
            step of the whole model.
        where: file and line, for messages.
    """

    gpu: str
    engine: str
    version: str
    model: str
    width: int
    weights: str
    keys_values: str
    phase: StepPhase
    tokens: int
    context: float
    batch: int
    num_layers: int | None
    seconds: float
    where: str

    @property
    def work(self) -> StepWork:
        """Return what the step does without windows of attention."""
        return self.work_within(None)

    def work_within(self, window: int | None) -> StepWork:
        """Return what the step does, in layers with a window of so many tokens too."""
        number, new = float(self.batch), float(self.tokens)
        if self.phase == "decode":
            work = StepWork(number, number, 0.0, number * self.context)
            near = 0.0, number * min(self.context, window or 0)
        else:
            work = StepWork(number * new, number, number * pairs_of(self.context, new))
            near = number * pairs_of(self.context, new, window), 0.0
        return work if window is None else work._replace(near_pairs=near[0], near_context=near[1])


class LogSurface:
    """Values over points of a plane: exact at the points, on straight lines between points that lie
    in a row, and constant beyond the box around all points.

    A weighted sum of the distances to the points (Hardy's multiquadric without its constant).

    Args:
        points: at least one; the values of a point given twice are averaged.
        values: one of each point.
    """

    def __init__(self, points: Sequence[tuple[float, float]], values: Sequence[float]) -> None:
        together: dict[tuple[float, float], list[float]] = {}
        for point, value in zip(points, values, strict=True):
            together.setdefault(point, []).append(value)
        self._points = np.array(list(together))
        self._low, self._high = self._points.min(axis=0), self._points.max(axis=0)
        # Weights that add up to 0, and a constant: solvable for all distinct points.
        number = len(together)
        system = np.ones((number + 1, number + 1))
        system[number, number] = 0.0
        system[:number, :number] = np.linalg.norm(
            self._points[:, None, :] - self._points[None, :, :], axis=2
        )
        wanted = [sum(given) / len(given) for given in together.values()]
        solved = np.linalg.solve(system, np.array([*wanted, 0.0]))
        self._weights, self._constant = solved[:number], float(solved[number])

    def at(self, point: tuple[float, float]) -> float:
        """Return the value at a point."""
        inside = np.clip(np.array(point), self._low, self._high)
        distances = np.linalg.norm(self._points - inside, axis=1)
        return float(self._weights @ distances) + self._constant


@dataclass(frozen=True)
class StepRatios:
    """Measured over modelled seconds of a GPU type and width, by phase; None: not measured."""

    prefill: LogSurface | None
    decode: LogSurface | None

    def seconds(self, work: StepWork, modelled_s: Callable[[StepWork], float]) -> float:
        """Price a step.

        Args:
            work: of the step.
            modelled_s: its price by tables.
        """
        # A mixed step takes each phase's ratio, by what that phase alone would last.
        parts = [part for part in work.apart() if part.tokens > 0]
        if len(parts) == 1:
            return modelled_s(work) * self._ratio(parts[0])
        alone_s = [modelled_s(part) for part in parts]
        scaled_s = sum(s * self._ratio(part) for s, part in zip(alone_s, parts, strict=True))
        return modelled_s(work) * scaled_s / sum(alone_s)

    def _ratio(self, part: StepWork) -> float:
        surface = self.decode if part.context else self.prefill
        return exp(surface.at(_place(part))) if surface else 1.0


class StepProfile:
    """The measured steps that count for an engine and a model.

    Args:
        steps: of one engine, precision and model.
    """

    def __init__(self, steps: Sequence[EngineStep]) -> None:
        self.steps = tuple(steps)
        self._known: dict[tuple[object, ...], StepRatios] = {}

    def measured(self, gpu: str, width: int, phase: StepPhase) -> tuple[EngineStep, ...]:
        """Return the steps that price a phase on a GPU type: those of the nearest width."""
        steps = [step for step in self.steps if step.gpu == gpu and step.phase == phase]
        if not steps:
            return ()
        nearest = min({s.width for s in steps}, key=lambda w: (abs(log(w / width)), w))
        return tuple(step for step in steps if step.width == nearest)

    def ratios(
        self,
        gpu: str,
        width: int,
        case: tuple[object, ...],
        ratio_of: Callable[[EngineStep], float],
    ) -> StepRatios:
        """Return how measured steps compare with modelled ones.

        Args:
            gpu, width: of the stage to price.
            case: all else that its price depends on.
            ratio_of: a step's measured seconds over those of the tables.
        """
        key = gpu, width, *case
        if key not in self._known:
            prefill = self._surface(gpu, width, "prefill", ratio_of)
            self._known[key] = StepRatios(prefill, self._surface(gpu, width, "decode", ratio_of))
        return self._known[key]

    def _surface(
        self, gpu: str, width: int, phase: StepPhase, ratio_of: Callable[[EngineStep], float]
    ) -> LogSurface | None:
        steps = self.measured(gpu, width, phase)
        if not steps:
            return None
        return LogSurface(
            [_place(step.work) for step in steps],
            [log(ratio_of(step)) for step in steps],
        )


def profile_for(
    steps: Sequence[EngineStep], engine: str, served: ServedModel
) -> StepProfile | None:
    """Choose the steps that count for an engine and a model; None of none.

    Args:
        steps: those of the files.
        engine: "vllm", "sglang", or "any", which takes vLLM's.
        served: the model and its formats.
    Raises:
        UsageError: none counts, or they are of two models or of two versions on one GPU type.
        ProfileError: a step that the model cannot have taken.
    """
    if not steps:
        return None
    name = "sglang" if engine == "sglang" else "vllm"
    formats = served.weights, served.keys_values
    own = [s for s in steps if s.engine == name and (s.weights, s.keys_values) == formats]
    if not own:
        there = sorted({f"{s.engine} with {s.weights} weights, {s.keys_values} KV" for s in steps})
        raise UsageError(
            f"--profile: no step is of {name} with {formats[0]} weights and {formats[1]} KV; the "
            f"steps are of {some_of(there, '; ')}; plan with the --engine, --weights and --kv of "
            "the steps, or leave --profile out"
        )
    # Steps of unlike runs are no profile of one.
    models = sorted({step.model for step in own})
    if len(models) > 1:
        raise UsageError(f"--profile: steps of {some_of(models)}; give those of the served model")
    for gpu in sorted({step.gpu for step in own}):
        versions = sorted({step.version for step in own if step.gpu == gpu})
        if len(versions) > 1:
            raise UsageError(
                f"--profile: steps of {gpu} by {name} {' and '.join(versions)}; give one version"
            )
    for step in own:
        _check(step, served)
    return StepProfile(own)


def _check(step: EngineStep, served: ServedModel) -> None:
    layers = served.model.num_layers
    if step.num_layers is not None and step.num_layers > layers:
        raise ProfileError(
            f"{step.where}: layers {step.num_layers}; the model {served.source} has {layers}"
        )
    if not served.allows_width(step.width):
        raise ProfileError(
            f"{step.where}: width {step.width}; heads and columns of {served.source} do not divide "
            "by it"
        )


def _place(work: StepWork) -> tuple[float, float]:
    """Return the logarithms of a step's tokens, and of the tokens that each of them attends to."""
    attended = (work.context or work.pairs) / work.tokens
    return log(work.tokens), log(max(1.0, attended))
