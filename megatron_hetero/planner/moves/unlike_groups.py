"""Stages joined into one of unlike GPUs in unequal shares: of tensors, or of sequences.

Other moves cut every node into groups that divide the model evenly, and sequences into equal parts.
Here neighbouring stages become one: a tensor-parallel group on one node, where their GPUs together
do not divide the model (three GPUs and 40 heads), or over unlike GPUs, where the limits allow it;
or their groups divide each sequence, where the job's layers allow it.  Shares are by speed and
memory (`group_shares`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import lcm

from megatron_hetero.cluster.names import machine_of
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.choices import may_choose, shares_tokens
from megatron_hetero.cost.placement import PlacedStage
from megatron_hetero.plan.layout import MAX_CONTEXT_PARALLEL
from megatron_hetero.planner.completion.stage_places import StagePlace
from megatron_hetero.planner.moves.group_shares import FINEST, GroupShares, Shares
from megatron_hetero.planner.problem import Problem, equal_units
from megatron_hetero.planner.units import Chain, Structure, Unit, unit_on

_LONGEST = 4
"""Stages that are joined at most."""
_MAX_OPTIONS = 2
"""Shares of a group that are tried."""
_MAX_STRUCTURES = 16

Layers = Sequence[Sequence[int]]
"""Layers of each stage, [replica][stage]."""


def joined(
    problem: Problem, structure: Structure, layers: Layers, shape: Callable[[Chain], object]
) -> Iterator[Structure]:
    """Yield structures with a run of stages joined into a single stage; equal replicas change
    together.

    Args:
        layers: that the stages have about, by which shares are found.
        shape: equal for replicas that are alike (`Completer.shape`).
    """
    if not may_choose(problem.costs, "shares"):
        return
    joins = _Joins(problem, structure, layers, [shape(own) for own in structure])
    # Two stages at least make a group; one stage of several groups may divide sequences.
    yield from islice(joins.of_runs(2, joins.in_tensor_shares), _MAX_STRUCTURES)
    if problem.divides_sequences and shares_tokens(problem.costs):
        yield from islice(joins.of_runs(1, joins.in_token_shares), _MAX_STRUCTURES)


def in_unlike_parts(problem: Problem) -> Iterator[Structure]:
    """Yield structures of replicas with a single stage each, whose groups divide sequences in
    unequal shares. No other seed has a number of groups that does not divide the length of a
    sequence.
    """
    if problem.divides_sequences and shares_tokens(problem.costs):
        yield from islice(_in_unlike_parts(problem), _MAX_STRUCTURES)


def _in_unlike_parts(problem: Problem) -> Iterator[Structure]:
    for width in sorted({w for node in problem.nodes for w in problem.widths[node.name]}):
        units = [unit for node in problem.nodes for unit in equal_units(problem, node, width)]
        for count in problem.replica_counts():
            size, rest = divmod(len(units), count)
            if size < 2 or rest:
                continue
            along = tuple(tuple(units[r * size : (r + 1) * size]) for r in range(count))
            across = tuple(tuple(units[r::count]) for r in range(count))
            for runs in dict.fromkeys((along, across)):
                # Layers matter only for shares: every replica is one stage with all of them.
                whole = [[problem.num_layers]] * count
                joins = _Joins(problem, runs, whole, runs)
                options = [joins.in_token_shares(run, problem.num_layers, 0, 1) for run in runs]
                for chosen in zip(*options, strict=False):
                    yield tuple((unit,) for unit in chosen)


Ways = Callable[[Chain, int, int, int], Iterator[Unit]]
"""Units in the place of a run with so many layers, which starts at stage so many of so many."""


class _Joins:
    """Runs of stages joined into single stages, in one structure; equal replicas have equal
    `shapes`."""

    def __init__(
        self, problem: Problem, structure: Structure, layers: Layers, shapes: Sequence[object]
    ) -> None:
        self.problem = problem
        self.structure = structure
        self.layers = layers
        self.shapes = shapes
        self.rows = problem.costs.vocab_rows(sorted({u.width for own in structure for u in own}))

    def of_runs(self, shortest: int, ways: Ways) -> Iterator[Structure]:
        """Yield structures with one stage in the place of a run of at least so many."""
        for shape in dict.fromkeys(self.shapes):
            r = self.shapes.index(shape)
            own, depth = self.structure[r], len(self.structure[r])
            for start in range(depth):
                # Runs from `start`, up to `_LONGEST` stages.
                for stop in range(start + shortest, min(start + _LONGEST, depth) + 1):
                    num_layers = sum(self.layers[r][start:stop])
                    if not self._is_one_kind(shape, start, stop):
                        continue
                    for one in ways(own[start:stop], num_layers, start, depth):
                        # In another replica of the shape, the run may cross nodes that limits keep
                        # apart.
                        if one.context_parallel == 1 and not self._may_all(shape, start, stop):
                            continue
                        yield tuple(
                            _with_one(c, start, stop, one) if of == shape else c
                            for c, of in zip(self.structure, self.shapes, strict=True)
                        )

    def _runs(self, shape: object, start: int, stop: int) -> list[tuple[Device, ...]]:
        """Return the GPUs of the run in each replica of a shape."""
        same = zip(self.structure, self.shapes, strict=True)
        return [_devices(chain[start:stop]) for chain, of in same if of == shape]

    def _is_one_kind(self, shape: object, start: int, stop: int) -> bool:
        """Return whether the run has the same GPUs in the same order in each replica of a shape."""
        gpu_type, runs = self.problem.cluster.gpu_type, self._runs(shape, start, stop)
        return len({tuple(gpu_type(device).name for device in run) for run in runs}) == 1

    def _may_all(self, shape: object, start: int, stop: int) -> bool:
        """Return whether the run may be a single group in each replica of a shape."""
        return all(_may_be_a_group(self.problem, run) for run in self._runs(shape, start, stop))

    def in_tensor_shares(
        self, run: Chain, num_layers: int, start: int, depth: int
    ) -> Iterator[Unit]:
        """Yield a run as one tensor-parallel group in shares, the fastest first; nothing where its
        GPUs may not or need not be one in unequal shares."""
        problem, place = self.problem, _place(run, 1, start, depth)
        devices = place.devices
        if any(u.shares or u.context_parallel > 1 for u in run) or not _may_be_a_group(
            problem, devices
        ):
            return
        # Unlike GPUs get shares by speed and memory.
        if len({problem.cluster.gpu_type(device).name for device in devices}) > 1:
            for shares in self._options(place, num_layers):
                yield _as_one(run, 1, shares)
            return
        # Of equal GPUs, only what the other moves do not make.
        nodes = {device.node for device in devices}
        one_machine = len({machine_of(node) for node in nodes}) == 1
        known = len(nodes) == 1 and len(devices) in problem.widths[devices[0].node]
        if one_machine and not known:
            yield _as_one(run, 1, (1,) * len(devices))

    def in_token_shares(
        self, run: Chain, num_layers: int, start: int, depth: int
    ) -> Iterator[Unit]:
        """Yield a run as a single stage whose groups divide sequences in unequal shares, the
        fastest first. Yield nothing if the groups may not or need not divide sequences."""
        groups = [group for unit in run for group in unit.stage.groups]
        if any(unit.shares for unit in run) or not _may_divide_a_sequence(self.problem, groups):
            return
        for shares in self._options(_place(run, len(groups), start, depth), num_layers):
            if len(set(shares)) > 1:
                yield _as_one(run, len(groups), shares)

    def _options(self, place: StagePlace, num_layers: int) -> tuple[Shares, ...]:
        own = self.problem.costs.on_devices(place.devices)
        return GroupShares(own, self.rows).options(place, num_layers)[:_MAX_OPTIONS]


def _with_one(replica: Chain, start: int, stop: int, one: Unit) -> Chain:
    """Return a replica with a run joined into a single unit, as `one` is in a replica of the same
    shape."""
    joined_run = _as_one(replica[start:stop], one.context_parallel, one.shares)
    return (*replica[:start], joined_run, *replica[stop:])


def _as_one(run: Chain, context_parallel: int = 1, shares: Shares = ()) -> Unit:
    """Return the GPUs of a run as one unit; arguments as of `unit_on`."""
    return unit_on((d for unit in run for d in unit.devices), context_parallel, shares)


def _devices(run: Chain) -> tuple[Device, ...]:
    """Return the GPUs of a run, grouped by node."""
    return _as_one(run).devices


def _place(run: Chain, context_parallel: int, start: int, depth: int) -> StagePlace:
    left = depth - start - len(run)
    return StagePlace(
        _devices(run), None, start == 0, not left, left + 1, context_parallel=context_parallel
    )


def _may_divide_a_sequence(problem: Problem, groups: Sequence[PlacedStage]) -> bool:
    """Return whether model and limits allow the groups unequal shares of each sequence, and unlike
    GPUs make the shares useful."""
    training, seq_length = problem.workload.training, problem.workload.model.seq_length
    widths = {group.width for group in groups}
    kinds = {tuple(problem.cluster.gpu_type(d).name for d in group.devices) for group in groups}
    # Equal GPUs divide a sequence equally, for which there are other moves.
    if len(widths) > 1 or len(kinds) == 1 or len(groups) > MAX_CONTEXT_PARALLEL:
        return False
    if len(groups) > min(FINEST, seq_length // lcm(2, *widths)):
        return False  # shares are found in no finer units
    unit = lcm(2, *widths) if training.sequence_parallel else 2
    if seq_length % unit or seq_length < unit * len(groups):
        return False
    nodes = {device.node for group in groups for device in group.devices}
    return len(nodes) == 1 or not _is_pinned(problem)


def _may_be_a_group(problem: Problem, devices: tuple[Device, ...]) -> bool:
    """Return whether model and limits allow the devices as a tensor-parallel group."""
    limits, model = problem.cluster.limits, problem.workload.model
    width = len(devices)
    # Every GPU has one query group and one column of each kind at least.
    if width > min(model.num_query_groups, *model.column_kinds):
        return False
    # Latents are divided in equal parts only.
    if any(size % width for size in model.divided_latents):
        return False
    if limits.max_tensor_parallel is not None and width > limits.max_tensor_parallel:
        return False
    if problem.workload.training.sequence_parallel and model.seq_length % width:
        return False
    nodes = {device.node for device in devices}
    forbidden = limits.no_tensor_parallel_across
    if nodes & set(forbidden):
        return False
    sites = {problem.cluster.node_by_name[node].site for node in nodes}
    machines = {machine_of(node) for node in nodes}
    across_machines = len(machines) > 1 and "nodes" in forbidden
    if across_machines or (len(nodes) > 1 and _is_pinned(problem)):
        return False
    return not (len(sites) > 1 and "sites" in forbidden)


def _is_pinned(problem: Problem) -> bool:
    """Return whether ends of pipelines have to be on certain nodes; groups over nodes leave that
    be."""
    limits = problem.cluster.limits
    return bool(limits.first_stage_nodes or limits.last_stage_nodes)
