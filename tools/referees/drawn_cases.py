"""Cases of 512 to 1,024 GPUs under Sailor's prices, drawn from a hash (`drawn_clusters`).

Their anchors are those of a plain enumeration (`plain_enumeration`).
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from tools.drawn_clusters import random_of
from tools.referees.plain_enumeration import ZONE, best_iterations_per_s

NUM_CASES = 12
_GPUS_PER_MACHINE = 4
_TYPES = (("A100-40", "V100-16", "GH-96"), ("RTX-3090", "RTX-2080", "Titan-RTX"))
"""Between those of a row the tables have a network."""
_MODELS = {"OPT-350": (1024, 7, (1, 2, 4, 8)), "GPT-Neo-2.7": (2048, 7, (1, 2, 4, 8))}
"""Sequences of a step, most stages of the enumeration, micro-batch sizes."""


def drawn_cases(commit: str) -> Iterator[dict[str, Any]]:
    """Yield the content of case files: two and three types in turn, without their anchors."""
    for number in range(NUM_CASES):
        yield _drawn(random_of(commit, "sailor", number), number)


def with_anchor(case: dict[str, Any]) -> dict[str, Any]:
    """Return a drawn case with the best of the plain enumeration as its anchor."""
    gpus = {of["device"]: of["gpus"] * of["count"] for of in case["cluster"]["machines"]}
    sequences, max_stages, sizes = _MODELS[case["model"]]
    value = best_iterations_per_s(case["model"], sequences, gpus, max_stages, sizes)
    anchor = {"value": value, "unit": "it/s", "source": "plain enumeration"}
    return {**case, "anchor": anchor}


def _drawn(random: Random, number: int) -> dict[str, Any]:
    row = random.choice(_TYPES)
    types = row if number % 2 else random.sample(row, 2)
    num_machines = random.randint(512 // _GPUS_PER_MACHINE, 1024 // _GPUS_PER_MACHINE)
    cuts = sorted(random.sample(range(8, num_machines - 7, 4), len(types) - 1))
    ends = zip([0, *cuts], [*cuts, num_machines], strict=True)
    machines: list[dict[str, Any]] = [
        {"device": gpu, "gpus": _GPUS_PER_MACHINE, "count": end - start, "zone": ZONE}
        for gpu, (start, end) in zip(types, ends, strict=True)
    ]
    model = random.choice(list(_MODELS)) if row is _TYPES[0] else "OPT-350"
    sequences, _, sizes = _MODELS[model]
    gpus = ", ".join(f"{of['gpus'] * of['count']} {of['device']}" for of in machines)
    return {
        "version": 1,
        "case": f"{model} {number}: {gpus}",
        "referee": "sailor",
        "cluster": {"machines": machines},
        "model": model,
        "batch": {"sequences": sequences, "micro_batch_sizes": list(sizes)},
    }
