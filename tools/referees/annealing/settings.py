"""Random moves of one plan's settings; its groups of GPUs stay where they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import lcm
from random import Random

from megatron_hetero.cost.choices import may_mix_sizes, micro_batch_sizes, recomputes
from megatron_hetero.cost.memory.device import kept_sends
from megatron_hetero.cost.memory.states import StateHolders
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.planner.completion.stage_lines import StageOption
from megatron_hetero.planner.completion.stage_options import StageOptions
from megatron_hetero.planner.completion.stage_places import StagePlace
from megatron_hetero.planner.division.counts import moved_counts, with_counts
from megatron_hetero.planner.evaluate.canonical import on_devices_of
from megatron_hetero.planner.problem import Problem
from tools.referees.annealing.prices import Replicas


class SettingMoves:
    """Random moves of plans of one problem; None stands for what was drawn and is no move."""

    def __init__(self, problem: Problem, random: Random) -> None:
        self.problem = problem
        self.random = random
        self.own_size = problem.workload.training.micro_batch_size
        self.kinds = recomputes(problem.costs)
        self._options: dict[tuple[int, int, StateHolders], StageOptions] = {}

    def moved(self, replicas: Replicas) -> Replicas | None:
        """Change layers, recompute or launch counts of a replica, maybe of all like it, or the
        shares of the batch."""
        random = self.random
        index = random.randrange(len(replicas))
        if len(replicas) > 1 and random.random() < 0.2:
            return self._batch(replicas, index)
        (change,) = random.choices((self._layers, self._recompute, self._counts), (6, 2, 2))
        changed = change(replicas, replicas[index])
        if changed is None:
            return None
        alike = [index]
        if random.random() < 0.5:
            alike = [i for i, other in enumerate(replicas) if _is_like(other, replicas[index])]
        made = list(replicas)
        for i in alike:
            own = replicas[i]
            made[i] = with_number(on_devices_of(changed, own), own.num_micro_batches)
        return tuple(made)

    def _of_stages(self, replicas: Replicas, size: int) -> StageOptions:
        placement = Placement(replicas)
        costs = self.problem.costs.sharded_as(placement).variant(micro_batch_size=size)
        rows = costs.vocab_rows(placement.widths)
        key = size, rows, costs.holders
        if key not in self._options:
            self._options[key] = StageOptions(costs, rows)
        return self._options[key]

    def _layers(self, replicas: Replicas, replica: PlacedReplica) -> PlacedReplica | None:
        """Give layers of a stage to another, each with as much recompute as it then needs."""
        if len(replica.stages) < 2:
            return None
        random, stages = self.random, list(replica.stages)
        giver, taker = random.sample(range(len(stages)), 2)
        number = random.choice((1, 1, 1, 2, 3))
        options = self._of_stages(replicas, replica.micro_batch_size or self.own_size)
        has_counts = replica.launch_counts is not None
        of_stage = list(places(replica, replica.num_in_flight, has_counts))
        for index, num_layers in (
            (giver, stages[giver].num_layers - number),
            (taker, stages[taker].num_layers + number),
        ):
            found = options.of(of_stage[index])
            if not 1 <= num_layers <= len(found):
                return None
            stages[index] = with_option(stages[index], num_layers, found[num_layers - 1])
        return replace(replica, stages=tuple(stages))

    def _recompute(self, replicas: Replicas, replica: PlacedReplica) -> PlacedReplica | None:
        """Let a stage recompute otherwise."""
        random, stages = self.random, list(replica.stages)
        index = random.randrange(len(stages))
        kind = random.choice(self.kinds)
        own = self.problem.workload.training.recompute
        some = random.randrange(1, stages[index].num_layers + 1) if kind == "full" else None
        stages[index] = replace(
            stages[index],
            recompute=None if kind == own else kind,
            recompute_num_layers=None if some == stages[index].num_layers else some,
        )
        return replace(replica, stages=tuple(stages))

    def _counts(self, replicas: Replicas, replica: PlacedReplica) -> PlacedReplica | None:
        """Let a stage launch more or fewer forwards ahead."""
        random, depth = self.random, len(replica.stages)
        if depth < 2 or not self.problem.costs.has_launch_counts:
            return None
        if random.random() < 0.1:
            return replace(replica, launch_counts=None)
        index, step = random.randrange(depth - 1), random.choice((-2, -1, 1, 1, 2, 4, 8))
        together, most = random.random() < 0.5, replica.num_micro_batches
        counts = moved_counts(replica.num_in_flight, index, step, most, together)
        return None if counts is None else with_counts(replica, counts)

    def _batch(self, replicas: Replicas, index: int) -> Replicas | None:
        """Give micro-batches of a replica to another, or let one have others of its own size."""
        random, made = self.random, list(replicas)
        giver = replicas[index]
        size = giver.micro_batch_size or self.own_size
        if may_mix_sizes(self.problem.costs) and random.random() < 0.3:
            sizes = micro_batch_sizes(self.problem.costs, len(replicas))
            other = random.choice(sizes)
            number, rest = divmod(giver.num_micro_batches * size, other)
            if rest or not number:
                return None
            own_size = None if other == self.own_size else other
            made[index] = replace(with_number(giver, number), micro_batch_size=own_size)
            return tuple(made)
        to = random.choice([i for i in range(len(replicas)) if i != index])
        taker = replicas[to]
        for i, replica, sequences in ((index, giver, -1), (to, taker, 1)):
            step = lcm(size, taker.micro_batch_size or self.own_size)
            number = replica.num_micro_batches + sequences * step // (
                replica.micro_batch_size or self.own_size
            )
            if number < 1:
                return None
            made[i] = with_number(replica, number)
        return tuple(made)


def _is_like(one: PlacedReplica, other: PlacedReplica) -> bool:
    """Return whether both have the same groups, layers and recompute, whatever the GPUs."""
    return [(s.cut, s.num_layers, s.recompute) for s in one.stages] == [
        (s.cut, s.num_layers, s.recompute) for s in other.stages
    ]


def with_number(replica: PlacedReplica, number: int) -> PlacedReplica:
    """Return the replica with so many micro-batches."""
    if number == replica.num_micro_batches:
        return replica
    made = replace(replica, num_micro_batches=number, launch_counts=None)
    counts = replica.launch_counts
    return made if counts is None else with_counts(made, [min(c, number) for c in counts])


def with_option(stage: PlacedStage, num_layers: int, option: StageOption) -> PlacedStage:
    """Return the stage with so many layers, as `option` has them."""
    return replace(
        stage,
        num_layers=num_layers,
        recompute=option.recompute,
        recompute_num_layers=option.num_recomputed,
        expert_shares=option.expert_shares,
    )


def places(
    replica: PlacedReplica, in_flight: Sequence[int], has_counts: bool
) -> Iterator[StagePlace]:
    """Yield what each stage of a replica has to keep when so many micro-batches are in flight
    there.

    `has_counts`: they are launch counts of its own (as in `CostModel.stage_memories`).
    """
    last = len(replica.stages) - 1
    kept = kept_sends(in_flight) if has_counts else [None] * len(replica.stages)
    for index, stage in enumerate(replica.stages):
        parts = stage.state_parts
        yield StagePlace(
            stage.devices,
            stage.shares,
            index == 0,
            index == last,
            in_flight[index],
            kept[index],
            None if parts is None else StateHolders(*(1 / part for part in parts)),
            stage.context_parallel,
            stage.expert_shares,
            stage.context_shares,
        )
