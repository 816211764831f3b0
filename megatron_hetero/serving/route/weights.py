"""Shares of replicas in the requests of a class, from a serving plan, and turns by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_hetero.errors import UnsupportedError, UsageError
from megatron_hetero.serving.fleet.plan import ServingPlan


@dataclass(frozen=True)
class RoutedReplica:
    """A replica that answers whole requests.

    Attributes:
        rates: class -> requests per second that the plan gives it.
    """

    name: str
    url: str
    rates: Mapping[str, float]


def targets_of(plan: ServingPlan, urls: Mapping[str, str]) -> tuple[RoutedReplica, ...]:
    """Return the replicas of a plan that have an address.

    Args:
        plan: the plan.
        urls: replica -> its address.
    Raises:
        UnsupportedError: prefill is apart, which an engine's own router handles.
        UsageError: an address is of no replica, or a replica has none.
    """
    if plan.has_prefill_apart:
        raise UnsupportedError(
            "this router hands on whole requests; with prefill apart start the engine's own "
            "(`launch serve.json --for vllm` writes its command)"
        )
    names = [replica.name for replica in plan.replicas]
    strange = sorted(set(urls) - set(names))
    if strange or set(names) - set(urls):
        raise UsageError(
            f"--replica NAME=URL: one for each of {', '.join(names)}"
            + (f"; {strange[0]} is none of them" if strange else "")
        )
    classes = [kind.name for kind in plan.classes]
    return tuple(
        RoutedReplica(r.name, _base(urls[r.name]), dict(zip(classes, r.rates, strict=True)))
        for r in plan.replicas
    )


def _base(url: str) -> str:
    """Return the address without the `/v1` that servers print it with, and that paths have."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass
class ReplicaTurns:
    """Whose turn it is, so that replicas get their shares and requests of one are spread evenly.

    Each turn adds a replica's weight to its credit; who has most credit serves and pays the sum of
    all weights (smooth weighted round robin). Replicas in `avoided` get no turn, and their shares
    go to the others in proportion.
    """

    targets: Sequence[RoutedReplica]
    _credits: dict[tuple[str | None, str], float] = field(default_factory=dict)

    def next(
        self, kind: str | None = None, avoided: frozenset[str] = frozenset()
    ) -> RoutedReplica | None:
        """Return the replica of the next request; None if all are avoided.

        Args:
            kind: its class; None, or one that the plan does not have, for the sum of all.
            avoided: names of replicas that do not answer.
        """
        # A class that the plan does not know goes by the sum of all classes.
        known = kind if kind in self.targets[0].rates else None
        weights = {t.name: self._weight(t, known) for t in self.targets if t.name not in avoided}
        if not weights:
            return None
        total = sum(weights.values())
        if total == 0:
            # The plan sends this class to replicas that are gone: the others share it evenly.
            weights, total = dict.fromkeys(weights, 1.0), float(len(weights))
        # Each earns its weight; the replica with most credit serves, and pays the sum.
        for name, weight in weights.items():
            self._credits[known, name] = self._credits.get((known, name), 0.0) + weight
        best = max((n for n in weights if weights[n] > 0), key=lambda n: self._credits[known, n])
        self._credits[known, best] -= total
        return next(target for target in self.targets if target.name == best)

    def _weight(self, target: RoutedReplica, kind: str | None) -> float:
        return sum(target.rates.values()) if kind is None else target.rates[kind]
