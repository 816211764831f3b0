"""Small problems of composition, and their best answers by trying all numbers of replicas."""

from __future__ import annotations

import itertools
import random
from math import inf

import numpy as np
from scipy.optimize import linprog

from megatron_hetero.serving.compose.problem import Composing, Offer, Rentable, Resource, Wire


def drawn(seed: int, has_roles: bool = False, most_gpus: int = 6) -> Composing:
    """Draw a problem with two types of machine; with roles also prefill and decode apart, wires
    between places, and offers that exclude each other."""
    rng = random.Random(seed)
    num_classes = rng.randint(1, 3)
    machines, resources = [], []
    for name in ("x", "y"):
        per_machine = rng.choice([1, 1, 2])
        count = rng.randint(1, max(1, most_gpus // 2 // per_machine))
        machines.append(Rentable(name, count, rng.choice([0.5, 1.0, 2.5])))
        resources.append(Resource(name, name, per_machine))
    offers = []
    phases = ("both", "prefill", "decode") if has_roles else ("both",)
    for phase in phases:
        for number in range(rng.randint(1, 2) if has_roles else rng.randint(1, 4)):
            uses = {name: rng.randint(0, 2) for name in ("x", "y")}
            if not any(uses.values()):
                uses[rng.choice("xy")] = 1
            rates = tuple(
                rng.choice([0.0, *[round(rng.uniform(0.2, 5), 2)] * 3]) for _ in range(num_classes)
            )
            place = rng.choice("ab")
            price = rng.choice([0.0, 0.3])
            offers.append(Offer(f"{phase}{number}", phase, place, rates, uses, price))
    conflicts = []
    if has_roles and rng.random() < 0.5 and len(offers) > 2:
        one, other = rng.sample([o.name for o in offers], 2)
        conflicts.append((one, other))
    wires = [Wire("a>b", frozenset({("a", "b")}), rng.uniform(0.2, 3))] if has_roles else []
    return Composing(
        tuple(offers),
        tuple(machines),
        tuple(resources),
        tuple(rng.choice([0.5, 1.0, 3.0]) for _ in range(num_classes)),
        tuple(f"w{i}" for i in range(num_classes)),
        hand_over_bytes=(1.0,) * num_classes,
        wires=tuple(wires),
        conflicts=tuple(conflicts),
        budget_per_hour=rng.choice([inf, 2.0, 4.0]),
        utilization=rng.choice([1.0, 0.8]),
    )


def most_by_trying(problem: Composing) -> float:
    """Return the largest multiple of the demand over all numbers of replicas; 0 for none."""
    return max((_most(problem, counts) for counts in _numbers(problem)), default=0.0)


def cheapest_by_trying(problem: Composing) -> float:
    """Return the least cost of serving the demand; infinite where that cannot be."""
    return min(
        (_cost(problem, n) for n in _numbers(problem) if _most(problem, n) >= 1 - 1e-9),
        default=inf,
    )


def _numbers(problem: Composing) -> list[tuple[int, ...]]:
    available = {m.name: m.available for m in problem.machines}
    ranges = []
    for offer in problem.offers:
        fits = [
            r.per_machine * available[r.machine] // offer.uses[r.name]
            for r in problem.resources
            if offer.uses[r.name]
        ]
        ranges.append(range(min(fits) + 1))
    found = []
    for counts in itertools.product(*ranges):
        used = {
            r: sum(n * o.uses[r.name] for n, o in zip(counts, problem.offers, strict=True))
            for r in problem.resources
        }
        fits_all = all(u <= r.per_machine * available[r.machine] for r, u in used.items())
        names = {o.name for n, o in zip(counts, problem.offers, strict=True) if n}
        allowed = not any({a, b} <= names for a, b in problem.conflicts)
        if fits_all and allowed and _cost(problem, counts) <= problem.budget_per_hour + 1e-9:
            found.append(counts)
    return found


def _cost(problem: Composing, counts: tuple[int, ...]) -> float:
    cost = sum(n * o.price_per_hour for n, o in zip(counts, problem.offers, strict=True))
    for machine in problem.machines:
        needed = 0
        for r in problem.resources:
            if r.machine == machine.name:
                used = sum(n * o.uses[r.name] for n, o in zip(counts, problem.offers, strict=True))
                needed = max(needed, -(-used // r.per_machine))
        cost += needed * machine.price_per_hour
    return cost


def _most(problem: Composing, counts: tuple[int, ...]) -> float:
    """Solve the rates for fixed numbers: requests by path (one replica, or a pair of them)."""
    num_classes = len(problem.demand)
    paths = []
    for i, offer in enumerate(problem.offers):
        for w in range(num_classes):
            if offer.phase == "both" and offer.rates[w] > 0 and counts[i]:
                paths.append((w, (i,)))
            if offer.phase != "prefill" or not counts[i] or not offer.rates[w]:
                continue
            for j, other in enumerate(problem.offers):
                if other.phase == "decode" and other.rates[w] > 0 and counts[j]:
                    paths.append((w, (i, j)))
    if not paths:
        return 0.0
    size = len(paths) + 1
    upper, limits = [], []
    for i, offer in enumerate(problem.offers):
        row = np.zeros(size)
        for k, (w, used) in enumerate(paths):
            if i in used:
                row[k] = 1 / offer.rates[w]
        upper.append(row)
        limits.append(problem.utilization * counts[i])
    for wire in problem.wires:
        row = np.zeros(size)
        for k, (w, used) in enumerate(paths):
            places = [problem.offers[i].place for i in used]
            if len(used) == 2 and (places[0], places[1]) in wire.pairs:
                row[k] = problem.hand_over_bytes[w]
        upper.append(row)
        limits.append(wire.bytes_per_s)
    equal = []
    for w in range(num_classes):
        row = np.zeros(size)
        for k, (number, _) in enumerate(paths):
            row[k] = float(number == w)
        row[-1] = -problem.demand[w]
        equal.append(row)
    aim = np.zeros(size)
    aim[-1] = -1
    solved = linprog(aim, upper, limits, equal, np.zeros(num_classes))
    return float(-solved.fun)
