"""The program of a layer and its shares, each found for the other in turn.

At given shares A* finds the fastest program that fits (`search`), and for a given program the
linear programme finds the best shares that fit (`shares`).  Each takes what the other has found and
makes it no worse, so they alternate until nothing gains, as HAP does.  That may stop beside the
best pair, so it starts three times: from equal shares, from shares by speed and from shares by
memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

from megatron_hetero.cost.memory.states import state_bytes
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.network.collectives import ring_all_reduce_s
from megatron_hetero.cost.network.seconds import slowest_link
from megatron_hetero.cost.parameters import layer_params
from megatron_hetero.cost.placement import PlacedStage
from megatron_hetero.cost.share import even_share
from megatron_hetero.rounding import below
from tools.referees.hap.costed import LayerGroup, layer_prices
from tools.referees.hap.forms import (
    RuntimeForm,
    lacks,
    runtime_forms,
    whole_shares,
)
from tools.referees.hap.layer import SIDE_BY_SIDE, TOGETHER
from tools.referees.hap.prices import (
    ProgramPrices,
    Shares,
    program_bytes,
    program_s,
)
from tools.referees.hap.search import Allowed, ProgramSearch
from tools.referees.hap.shares import best_shares
from tools.referees.hap.states import Dimension, LayerProgram

_DIMENSIONS: tuple[Dimension, ...] = ("sequences", "tokens", "columns", "elements")


@dataclass(frozen=True)
class Synthesis:
    """A program with its shares, and its seconds for one micro-batch."""

    program: LayerProgram
    shares: Shares
    seconds: float


def synthesise(
    prices: ProgramPrices,
    allowed: Allowed | None = None,
    fixed: Collection[Dimension] = (),
    least: Mapping[Dimension, float] | None = None,
    starts: Iterable[Shares] | None = None,
) -> Synthesis | None:
    """Return the fastest program and shares that the alternation finds; None where nothing fits.

    Args:
        prices: of the steps on the group.
        allowed: which rules programs may follow; None is all.
        fixed: dimensions whose shares stay equal.
        least: that a GPU has along a dimension; 0 where nothing is said.
        starts: shares to begin with; None is `starting_shares`.
    """
    best: Synthesis | None = None
    for start in starting_shares(prices, fixed) if starts is None else starts:
        for found in _alternated(prices, start, allowed, fixed, least):
            if best is None or found.seconds < best.seconds:
                best = found
    return best


def starting_shares(prices: ProgramPrices, fixed: Collection[Dimension] = ()) -> Iterator[Shares]:
    """Yield equal shares, shares by speed, and by memory.

    Args:
        prices: of the group.
        fixed: dimensions whose shares stay equal.
    """
    count = prices.num_gpus
    whole_s = [
        sum(prices.step_s(s.name, "whole", {})[i] for s in prices.graph.steps) for i in range(count)
    ]
    weights = [[1.0] * count]
    if all(whole_s):
        weights.append([1 / seconds for seconds in whole_s])
    if all(0 < room < inf for room in prices.room_bytes):
        weights.append(list(prices.room_bytes))
    for own in weights:
        parts = tuple(weight / sum(own) for weight in own)
        yield {d: (1 / count,) * count if d in fixed else parts for d in _DIMENSIONS}


def _alternated(
    prices: ProgramPrices,
    shares: Shares,
    allowed: Allowed | None,
    fixed: Collection[Dimension],
    least: Mapping[Dimension, float] | None,
) -> Iterator[Synthesis]:
    last_s = inf
    while True:  # never twice with one program, of which there are so many
        found = ProgramSearch(prices, shares, allowed).best()
        if found is None:
            # Nothing fits at these shares: the fastest of all, at shares with which it fits.
            anywhere = replace(prices, room_bytes=(inf,) * prices.num_gpus)
            found = ProgramSearch(anywhere, shares, allowed).best()
        if found is None:
            return
        better = best_shares(found.program, prices, shares, fixed, least)
        if better is None:
            return
        seconds = program_s(found.program, prices, better)
        if not below(seconds, last_s):
            return
        yield Synthesis(found.program, better, seconds)
        last_s, shares = seconds, better


@dataclass(frozen=True)
class LayerOption:
    """A way to divide a layer among the GPUs of a group.

    Attributes:
        form: as which the runtime executes it; None where it does not.
        synthesis: program, shares and seconds.
        priced_s: seconds of the stage in whole shares by the price list of plans, with its part of
            the sum of weight gradients; None where the form is no stage.
        lacking: what the runtime lacks.
        bytes: that the layers take of each GPU.
    """

    form: RuntimeForm | None
    synthesis: Synthesis
    priced_s: float | None
    lacking: tuple[str, ...]
    bytes: tuple[float, ...]


def layer_options(costs: CostModel, place: LayerGroup) -> tuple[LayerOption, ...]:
    """Return the fastest program of each form that the runtime executes and that fits, fastest
    first, and behind them the fastest of all programs where it is none of them and faster.

    Args:
        costs: of the job.
        place: the group, and what it holds.
    """
    training = costs.workload.training
    forms = runtime_forms(training.sequence_parallel, training.use_distributed_optimizer)
    prices = {along: layer_prices(costs, place, along) for along in (TOGETHER, SIDE_BY_SIDE)}
    least = _least_shares(costs)
    found = []
    for form in forms:
        own = prices[form.along]
        if form.division == "tokens":
            own = layer_prices(costs, place, form.along, by_tokens=True)
        made = synthesise(own, form.allows, form.fixed, least)
        if made is not None:
            found.append(_option(costs, place, own, made, form))
    found.sort(key=lambda option: option.synthesis.seconds)
    # All programs are many: they start where those of the forms have ended.
    starts = [o.synthesis.shares for o in found if o.form is not None and o.form.along is TOGETHER]
    free = synthesise(prices[TOGETHER], least=least, starts=starts or None)
    best_s = found[0].synthesis.seconds if found else inf
    if free is not None and below(free.seconds, best_s) and lacks(prices[TOGETHER], free.program):
        found.append(_option(costs, place, prices[TOGETHER], free, None))
    return tuple(found)


def _least_shares(costs: CostModel) -> dict[Dimension, float]:
    """Return one unit of each dimension: a query group, two chunks of tokens."""
    model = costs.workload.model
    return {"columns": 1 / model.num_query_groups, "tokens": 2 / model.seq_length}


def _option(
    costs: CostModel,
    place: LayerGroup,
    prices: ProgramPrices,
    made: Synthesis,
    form: RuntimeForm | None,
) -> LayerOption:
    stage = None if form is None else placed(place, form, made.shares)
    return LayerOption(
        form,
        made,
        None if stage is None else placed_layer_s(costs, stage, place.num_micro_batches),
        () if form is not None else lacks(prices, made.program),
        program_bytes(made.program, prices, made.shares),
    )


def placed(place: LayerGroup, form: RuntimeForm, shares: Shares) -> PlacedStage | None:
    """Return the stage that executes programs of a form, in whole shares; None of GPUs side by
    side, which are replicas.

    Args:
        place: the group, and what it holds.
        form: of the program.
        shares: of its GPUs.
    """
    parts = whole_shares(shares[form.division])
    own = parts if len(set(parts)) > 1 else None
    match form.name:
        case "tensor parallel":
            return PlacedStage(place.devices, place.num_layers, own)
        case "context parallel":
            count = len(place.devices)
            return PlacedStage(
                place.devices, place.num_layers, context_parallel=count, context_shares=own
            )
    return None


def placed_layer_s(costs: CostModel, stage: PlacedStage, num_micro_batches: int) -> float:
    """Return the seconds of a layer on a stage by the price list of plans, for one micro-batch,
    with its part of the sum of weight gradients among context-parallel ranks.

    Args:
        costs: of the job.
        stage: on its GPUs; full recompute does not count.
        num_micro_batches: of a training step.
    """
    costs = costs.on_devices(stage.devices)
    model, training = costs.workload.model, costs.workload.training
    if training.recompute == "full":
        costs = costs.variant(recompute="none")
    layer_s = costs.stage_pieces(stage, costs.vocab_rows((stage.width,))).layer.total_s
    if stage.context_parallel == 1:
        return layer_s
    num_params = layer_params(model, even_share(model, 1)) / stage.width
    summed_s = ring_all_reduce_s(
        num_params * state_bytes(training).gradient,
        stage.context_parallel,
        slowest_link(costs.cluster, stage.devices),
    )
    return layer_s + summed_s / num_micro_batches
