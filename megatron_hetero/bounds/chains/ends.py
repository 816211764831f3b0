"""The cases of the lower bound: stages that hold the word embedding are on one node, on several
nodes of one site, or anywhere.

The first stage of every replica holds the embedding, and the last one too if it is tied.  Its
exchange waits for the first stages of all replicas, so it follows all pipelines.  If its holders
are apart, the exchange crosses a link between nodes or sites.  If they are together, only the other
stages may take any GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_hetero.bounds.chains.kinds import GpuClass
from megatron_hetero.bounds.chains.stages import PLACES, ChainStageOptions
from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.network.lines import most_bytes_per_s
from megatron_hetero.cost.sync.least import Cut


@dataclass(frozen=True)
class EndsCase:
    """Plans with the word embedding on `classes`. The step lasts at least `least_s`, and `extra_s`
    longer than pipelines and update. `has_last`: the classes hold the first and the last stages,
    not only the first. `is_inside`: all stages are of these classes.
    """

    classes: frozenset[int]
    extra_s: float = 0.0
    least_s: float = 0.0
    has_last: bool = True
    is_inside: bool = False

    def limited(self, options: ChainStageOptions) -> ChainStageOptions:
        """Return the options of such plans."""
        # [kind]: whether the kind is of the classes of the case.
        allowed = np.isin(options.gpu_class, sorted(self.classes))
        places = np.array(
            [self.is_inside or first or (last and self.has_last) for first, last in PLACES]
        )
        # [kind, place]: kinds elsewhere, at places that hold the embedding.
        none = ~allowed[:, None] & places[None, :]
        return replace(
            options,
            time_s=np.where(none[:, :, None, None], np.inf, options.time_s),
            rate_s=np.where(none[:, :, None, None], np.inf, options.rate_s),
        )


def ends_cases(
    costs: CostModel,
    classes: Sequence[GpuClass],
    num_replicas: tuple[int, int],
    least_inside_s: Callable[[str, bool], float] = lambda site, has_last: 0.0,
) -> list[EndsCase]:
    """Return cases such that every plan of `num_replicas` replicas belongs to a case; none if cases
    would not raise the bound.

    Args:
        least_inside_s: the least step of plans whose ends are on a site (`bounds.sites`).
    """
    # With one replica and untied embeddings there is nothing to exchange between ends.
    tied = costs.workload.model.tied_embeddings
    if not tied and num_replicas[0] == 1:
        return []
    found: dict[tuple[frozenset[int], bool], EndsCase] = {}
    # Express each case by classes of GPUs instead of nodes.
    for nodes, case in _all_cases(costs, classes, num_replicas):
        own = frozenset(i for i, c in enumerate(classes) if nodes & {n.name for n in c.nodes})
        sites = {costs.cluster.node_by_name[name].site for name in nodes}
        # Plans with their ends on one site have a bound of their own.
        if len(sites) == 1:
            inside_s = least_inside_s(min(sites), tied)
            case = replace(case, least_s=max(case.least_s, inside_s))
        case = replace(case, classes=own, has_last=tied)
        key = own, case.is_inside
        # Nodes that no class tells apart have one case, the weakest.
        held = found.get(key, case)
        found[key] = replace(
            case,
            extra_s=min(case.extra_s, held.extra_s),
            least_s=min(case.least_s, held.least_s),
        )
    # A case that says nothing makes all others useless: the weakest decides.
    everything = EndsCase(frozenset(range(len(classes))), has_last=tied)
    says_nothing = any(replace(case, is_inside=False) == everything for case in found.values())
    return [] if says_nothing else list(found.values())


def _all_cases(
    costs: CostModel, classes: Sequence[GpuClass], num_replicas: tuple[int, int]
) -> Iterator[tuple[frozenset[str], EndsCase]]:
    """Yield nodes of the ends, and what follows for such plans."""
    fewest, most = num_replicas
    # One replica with tied ends has two holders, its first stage and its last.
    num_holders = max(2, fewest)
    nodes = {node.name: node for c in classes for node in c.nodes}
    sites: dict[str, list[Node]] = {}
    for node in nodes.values():
        sites.setdefault(node.site, []).append(node)
    none: frozenset[int] = frozenset()
    for name in nodes:
        if most > 1:
            yield frozenset((name,)), EndsCase(none)
        else:  # the one pipeline stays on the node, or leaves it and comes back
            yield frozenset((name,)), EndsCase(none, is_inside=True)
            if len(nodes) > 1:
                yield frozenset((name,)), EndsCase(none, least_s=_there_and_back_s(costs, name))
    # Holders apart: on several nodes of one site, or on several sites.
    parts_of: list[tuple[list[str], list[list[str]]]] = [
        ([node.name for node in own], [[node.name] for node in own]) for own in sites.values()
    ]
    parts_of.append((list(nodes), [[node.name for node in own] for own in sites.values()]))
    # A part is a node in the first case and a site in the second one.
    for names, parts in parts_of:
        cut = _cut(costs, parts)
        if cut is not None:
            extra_s = costs.least_ends_sync(num_holders, cut)
            yield frozenset(names), EndsCase(none, extra_s)


def _cut(costs: CostModel, parts: Sequence[Sequence[str]]) -> Cut | None:
    """Return the links between nodes of unlike parts; None where there are none."""
    cluster = costs.cluster
    links = cluster.node_links
    # [part] -> pairs (node of the part, node of another part) that have a link.
    leaving = [
        [
            (a, b)
            for a in part
            for other in parts
            for b in other
            if other is not part and (a, b) in links
        ]
        for part in parts
    ]
    every = [links[pair] for of_part in leaving for pair in of_part]
    if not every:
        return None
    return Cut(
        max(link.bytes_per_s for link in every),
        max(most_bytes_per_s(cluster, of_part) for of_part in leaving),
        min(link.latency_s for link in every),
    )


def _there_and_back_s(costs: CostModel, name: str) -> float:
    """Return the seconds in which a single pipeline uses the paths out of a node on the way out and
    back: the activations of a boundary and the gradients of another, for every micro-batch."""
    training = costs.workload.training
    cluster = costs.cluster
    speed = most_bytes_per_s(cluster, [pair for pair in cluster.node_links if pair[0] == name])
    num_bytes = costs.activation_bytes / training.micro_batch_size * training.global_batch_size
    return 2 * num_bytes / speed
