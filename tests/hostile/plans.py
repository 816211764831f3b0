"""Random plans, whole and damaged: read again as they were, or refused by name."""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Iterator
from typing import Any

from megatron_hetero.errors import HeteroError
from megatron_hetero.flags.emit import megatron_args
from megatron_hetero.flags.launch import node_launches
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import plan_from_data, plan_to_data
from megatron_hetero.plan.layout import format_layout, parse_layout
from megatron_hetero.plan.plan import Plan
from tests.hostile.mutate import PIECES
from tests.hostile.words import script_faults, shell_faults
from tests.plan.edits import PLAN

_VALUES = (None, True, -1, 0, 1, 2, 10**12, 10**39, 1e308, -1e-300, "", [], {}, [[]], *PIECES)


def random_layout(chance: random.Random) -> str:
    """A line of the layout grammar, of replicas that hold the same layers."""
    num_layers = chance.randint(1, 40)
    replicas = []
    for _ in range(chance.randint(1, 4)):
        cuts = sorted(
            chance.sample(range(1, num_layers), min(chance.randint(0, 4), num_layers - 1))
        )
        stages = []
        for first, last in zip([0, *cuts], [*cuts, num_layers], strict=True):
            width = chance.choice((1, 1, 2, 3, 4, 8))
            shares = ":".join(str(chance.randint(1, 5)) for _ in range(width))
            context = f"cp{chance.choice((2, 4))}" if chance.random() < 0.1 else ""
            some = f"({shares})" if width > 1 and chance.random() < 0.3 else ""
            stages.append(f"tp{width}{some}{context}:{last - first}")
        size = f"x{chance.randint(1, 8)}" if chance.random() < 0.3 else ""
        replicas.append(f"{','.join(stages)} @{chance.randint(1, 64)}{size}")
    return " | ".join(replicas)


def layout_faults(chance: random.Random) -> Iterator[str]:
    """Find what a random layout loses on its way through plan, file and flags."""
    text = random_layout(chance)
    try:
        layout = parse_layout(text)
        if parse_layout(format_layout(layout)) != layout:
            yield f"{text}: printed otherwise than it was read"
        plan = plan_from_layout(layout)
        yield from _uses(plan)
        if plan_from_data(json.loads(json.dumps(plan_to_data(plan)))) != plan:
            yield f"{text}: the file of the plan is another plan"
    except HeteroError:
        return
    except Exception:
        yield f"{text}: {traceback.format_exc()}"


def damaged_faults(chance: random.Random) -> Iterator[str]:
    """Find damage of a plan file that is neither refused by name nor harmless."""
    data = plan_to_data(PLAN)
    for _ in range(chance.randint(1, 3)):
        _damage(data, chance)
    try:
        yield from _uses(plan_from_data(data))
    except HeteroError as error:
        if not str(error).strip():
            yield f"{data}: an error without a word"
    except Exception:
        yield f"{json.dumps(data)}: {traceback.format_exc()}"


def _uses(plan: Plan) -> Iterator[str]:
    try:
        yield from shell_faults(megatron_args(plan, "plan.json"))
        for launch in node_launches(plan, "plan.json"):
            yield from shell_faults(launch.argv)
        if plan.hosts:
            yield from script_faults(plan, ("--save", "a b"))
    except HeteroError:
        return


def _damage(data: Any, chance: random.Random) -> None:
    """Change one place of nested lists and mappings."""
    while True:
        keys = list(data) if isinstance(data, dict) else list(range(len(data)))
        if not keys:
            return
        key = chance.choice(keys)
        value = data[key]
        if isinstance(value, dict | list) and value and chance.random() < 0.8:
            data = value
            continue
        change = chance.randrange(4)
        if change == 0:
            del data[key]
        elif change == 1 and isinstance(data, list):
            data.append(value)
        elif change == 1:
            data[chance.choice(PIECES)] = value
        elif change == 2 and isinstance(value, int | float):
            data[key] = value + chance.choice((-1, 1, 0.5))
        else:
            data[key] = chance.choice(_VALUES)
        return
