"""The price of sequences on a group of a described cluster.

A group is one or several domains, each of equal GPUs.  Inside a domain heads are exchanged all to
all (Ulysses); between domains keys and values are gathered, or go round in a ring behind attention
(USP, and HexiSeq for unlike domains).  A domain of one GPU exchanges nothing inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.parameters import attention_sizes
from megatron_hetero.cost.share import even_share
from megatron_hetero.model.recompute import recomputed
from megatron_hetero.model.spec import ModelSpec, Workload
from megatron_hetero.sequences.price.exchange import all_to_all_s, into_domains_s
from megatron_hetero.sequences.price.group_price import Floats
from megatron_hetero.sequences.price.shares import balanced_shares, pairs_per_token
from megatron_hetero.sequences.price.token_rates import TokenRates

Between = Literal["gather", "ring"]
ShareRule = Literal["balanced", "equal"]
Exchange = Literal["gather", "ring", "all-to-all"]
EVERY: tuple[Exchange, ...] = ("gather", "ring", "all-to-all")
TRAINED: tuple[Exchange, ...] = ("gather", "all-to-all")
"""Exchanges that training runs; rings are priced alone."""
EXCHANGED = 4
"""All-to-alls of a layer's pass: queries, keys, values, and back the context."""


@dataclass(frozen=True)
class Domain:
    """`width` equal GPUs of a group; `exchange_s` is what a token of the domain adds for the
    all-to-alls of all layers, `latency_s` what each packed forward and backward adds."""

    rates: TokenRates
    width: int
    exchange_s: float = 0.0
    latency_s: float = 0.0


@dataclass(frozen=True)
class ModelledPrice:
    """The price on a group of domains.

    Attributes:
        between: how keys and values reach other domains; of no meaning with one domain.
        key_value_s: seconds of each domain to receive a token's keys and values of all layers, in
            all passes, from other domains.
        key_value_bytes: that a gather keeps for each token of a sequence on each GPU.
        round_s: latency of all rounds of a packed forward and backward.
        window: keys that a query sees at most; None is all before it.
        rule: of the shares of unlike domains.
    """

    domains: tuple[Domain, ...]
    between: Between
    key_value_s: tuple[float, ...]
    key_value_bytes: float
    round_s: float
    window: int | None = None
    rule: ShareRule = "balanced"

    @property
    def name(self) -> str:
        """Return the exchanges, and the shares where there are unlike GPUs."""
        words = ["all-to-all"] if self.domains[0].width > 1 else []
        if len(self.domains) > 1:
            words.append(self.between)
        unlike = len({d.rates.gpu_name for d in self.domains}) > 1
        return (" + ".join(words) or "alone") + (f", {self.rule} shares" if unlike else "")

    @property
    def is_trained(self) -> bool:
        """Return whether training runs this exchange."""
        return len(self.domains) == 1 or self.between in TRAINED

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return sum(domain.width for domain in self.domains)

    @property
    def fixed_s(self) -> float:
        """Return the seconds of a packed forward and backward, however little is in it."""
        return self.round_s + max(d.rates.fixed_s + d.latency_s for d in self.domains)

    @property
    def room(self) -> tuple[float, ...]:
        """Return the bytes that a GPU of each domain has for activations."""
        return tuple(domain.rates.room_bytes for domain in self.domains)

    def shares(self, lengths: Floats) -> Floats:
        """Return the tokens of each domain, shape [domain, sequence]; not a number where a sequence
        does not fit."""
        widths = np.array([float(d.width) for d in self.domains])[:, None]
        if self.rule == "equal":
            return np.asarray(widths / self.size * lengths)
        return balanced_shares(self._token_seconds(lengths), self.caps(lengths), lengths)

    def seconds(self, lengths: Floats) -> Floats:
        """Return the seconds that each sequence adds, shape [sequence]; infinite where it does not
        fit alone."""
        shares = self.shares(lengths)
        computing = shares * self._token_seconds(lengths)
        waiting = self._waiting(lengths, shares)
        found = computing.max(axis=0) + waiting
        fits = (shares <= self.caps(lengths) * (1 + 1e-9)).all(axis=0)
        return np.asarray(np.where(fits & np.isfinite(found), found, np.inf))

    def memory(self, lengths: Floats) -> Floats:
        """Return the bytes of each sequence on a GPU of each domain, shape [domain, sequence]."""
        shares = np.nan_to_num(self.shares(lengths), nan=np.inf)
        own = [
            share / d.width * (d.rates.token_bytes + d.rates.pair_bytes * lengths)
            for share, d in zip(shares, self.domains, strict=True)
        ]
        return np.asarray(np.array(own) + self._gathered(lengths))

    def _gathered(self, lengths: Floats) -> Floats:
        return self.key_value_bytes * lengths

    def caps(self, lengths: Floats) -> Floats:
        """Return the tokens of each sequence that each domain could hold alone, shape [domain,
        sequence]."""
        left = [
            d.width
            * np.maximum(d.rates.room_bytes - self._gathered(lengths), 0.0)
            / (d.rates.token_bytes + d.rates.pair_bytes * lengths)
            for d in self.domains
        ]
        return np.asarray(left)

    def _token_seconds(self, lengths: Floats) -> Floats:
        """Return the seconds of each domain for one own token, shape [domain, sequence]."""
        found = []
        for d in self.domains:
            # Only fused attention leaves out what a window hides; others compute all keys.
            window = self.window if d.rates.is_fused else None
            pairs = pairs_per_token(lengths, window)
            found.append((d.rates.token_s + d.rates.pair_s * pairs) / d.width + d.exchange_s)
        return np.asarray(found)

    def _waiting(self, lengths: Floats, shares: Floats) -> Floats:
        """Return the seconds of the slowest domain's wait for foreign keys and values.

        In a ring they travel while attention works on those that are there: all rounds but the
        first hide that long.
        """
        if len(self.domains) == 1:
            return np.zeros(len(lengths))
        travelling = np.array(self.key_value_s)[:, None] * (lengths[None, :] - shares)
        # Gathered keys and values are needed before attention begins: nothing hides their way.
        if self.between == "gather":
            return np.asarray(travelling.max(axis=0))
        hidden = (len(self.domains) - 1) / len(self.domains)
        attention = [
            share * d.rates.pair_s * pairs_per_token(lengths, self.window) / d.width
            for share, d in zip(shares, self.domains, strict=True)
        ]
        return np.asarray(np.maximum(travelling - hidden * np.array(attention), 0.0).max(axis=0))


def modelled_prices(
    workload: Workload,
    cluster: Cluster,
    devices: Sequence[Device],
    rates: Sequence[TokenRates],
    window: int | None = None,
    rule: ShareRule = "balanced",
    *,
    exchanges: Sequence[Exchange] = EVERY,
) -> tuple[ModelledPrice, ...]:
    """Price sequences on a group in every way that heads and GPUs allow.

    Domains are single GPUs; or equal GPUs of one node, as many as divide the query groups; or the
    whole group, where its GPUs are equal.  The GPUs of a domain follow each other in the group.

    Args:
        workload: model and training.
        cluster: whose links join them.
        devices: the group, in rank order.
        rates: of each device.
        window: keys that a query sees at most; None is all before it.
        rule: of the shares of unlike domains; "balanced" makes prices with equal ones too.
        exchanges: that are allowed; "gather" always is.
    """
    # Ways to divide the group: each GPU by itself, or domains that exchange heads.
    divisions: list[list[list[int]]] = [[[i] for i in range(len(devices))]]
    if "all-to-all" in exchanges:
        divisions += _with_all_to_alls(workload, devices, rates)
    # Rings need fused attention on all GPUs.
    betweens: tuple[Between, ...] = ("gather", "ring")
    if "ring" not in exchanges or not all(r.is_fused for r in rates):
        betweens = ("gather",)
    made = []
    # Each division once, with each exchange and each rule of shares.
    for division in [d for i, d in enumerate(divisions) if d not in divisions[:i]]:
        for between in betweens if len(division) > 1 else ("gather",):
            for of in share_rules(rule, rates):
                made.append(
                    _priced(workload, cluster, devices, rates, division, between, window, of)
                )
    return tuple(made)


def exchanged_bytes(model: ModelSpec, element_bytes: int) -> int:
    """Return the bytes of a token that the all-to-alls of a layer's pass move: queries, keys and
    values, and back the context."""
    query, key_value = attention_sizes(model, even_share(model, 1))
    return (2 * query + 2 * key_value) * element_bytes


def share_rules(rule: ShareRule, rates: Sequence[TokenRates]) -> tuple[ShareRule, ...]:
    """Return the rules to price a group by: where waiting for others takes longer than computing,
    equal shares of unlike GPUs may be faster than balanced ones."""
    if rule == "balanced" and len({r.gpu_name for r in rates}) > 1:
        return "balanced", "equal"
    return (rule,)


def _with_all_to_alls(
    workload: Workload, devices: Sequence[Device], rates: Sequence[TokenRates]
) -> list[list[list[int]]]:
    """Divide a group into domains that exchange heads: equal GPUs of a node, or the whole group."""
    groups = workload.model.num_query_groups
    by_node: dict[tuple[str, str], list[int]] = {}
    for i, device in enumerate(devices):
        by_node.setdefault((device.node, rates[i].gpu_name), []).append(i)
    divisions = [
        [
            members[first : first + width]
            for members in by_node.values()
            for width in [_widest(len(members), groups)]
            for first in range(0, len(members), width)
        ]
    ]
    if len({r.gpu_name for r in rates}) == 1 and groups % len(devices) == 0:
        divisions.append([list(range(len(devices)))])
    return divisions


def _widest(count: int, groups: int) -> int:
    """Return the widest all-to-all of `count` GPUs that divides `count` and the query groups."""
    return max(w for w in range(1, count + 1) if count % w == 0 and groups % w == 0)


def _priced(
    workload: Workload,
    cluster: Cluster,
    devices: Sequence[Device],
    rates: Sequence[TokenRates],
    division: Sequence[Sequence[int]],
    between: Between,
    window: int | None,
    rule: ShareRule,
) -> ModelledPrice:
    """Price a division into domains, with `between` as the exchange between domains; see
    `modelled_prices`."""
    # Bytes and passes of a layer.
    model, training = workload.model, workload.training
    _, key_value = attention_sizes(model, even_share(model, 1))
    element, layers = training.element_bytes, model.num_layers
    attends_again = "core_attn" in recomputed(training)
    num_passes = 2 + attends_again
    # Inside a domain, ranks exchange heads.
    domains = []
    for members in division:
        own = [devices[i] for i in members]
        width = len(own)
        token_bytes = layers * num_passes * exchanged_bytes(model, element)
        exchange_s, latency_s = 0.0, 0.0
        if width > 1:
            # A rank sends all but its own heads of its part of the tokens, and as much comes back.
            busy_s, latency = all_to_all_s(cluster, own)
            exchange_s = token_bytes * busy_s
            latency_s = layers * num_passes * EXCHANGED * latency
        domains.append(Domain(rates[members[0]], width, exchange_s, latency_s))
    # Between domains keys and values travel.
    into, latency = into_domains_s(cluster, devices, division)
    # Keys and values go forward, again where that is recomputed; their gradients come back, in a
    # ring together with them.
    times = num_passes + (1 if between == "ring" else 0)
    carried = 2 * key_value * element * layers * times
    kept = 2 * key_value * element * (1 if attends_again else layers)
    gathers = between == "gather" and len(division) > 1
    rounds = (len(division) - 1) * layers * times
    return ModelledPrice(
        tuple(domains),
        between,
        tuple(carried * seconds for seconds in into),
        kept / min(domain.width for domain in domains) if gathers else 0.0,
        rounds * latency,
        window,
        rule,
    )
