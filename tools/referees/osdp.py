"""OSDP's choice for every layer, from its authors' tables: replicated or sharded, operator by
operator.

    git clone https://github.com/Youhe-Jiang/OptimalShardedDataParallel FOLDER
    python -m tools.referees.osdp FOLDER [--layers 48] [--limit-mb 8192]

A layer has four levels: attention sharded (1), its MLP sharded (2), both (3) or neither (0).
Layers are alike, so a plan is four counts: the integer programme of OSDP (IJCAI'23) with a variable
for each level, solved to the optimum.  The tables (MIT licence) are read as text; their memory
counts in whole megabytes, as the released search has it.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

_TABLES = Path("sharded_data_parallel/osdp_modules/profiler_output.py")
HIDDEN_SIZES = (512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Of the tables' rows, as the released scheduler names them."""


@dataclass(frozen=True)
class Level:
    """One way to hold a layer: seconds of a step and whole megabytes."""

    seconds: float
    megabytes: int


@dataclass(frozen=True)
class Choice:
    """How many layers are held in each way."""

    counts: tuple[int, ...]
    levels: tuple[Level, ...]

    @property
    def seconds(self) -> float:
        """Return the seconds of a step of all layers."""
        return sum(n * level.seconds for n, level in zip(self.counts, self.levels, strict=True))

    @property
    def megabytes(self) -> int:
        """Return the memory of all layers."""
        return sum(n * level.megabytes for n, level in zip(self.counts, self.levels, strict=True))


def choose(levels: Sequence[Level], num_layers: int, limit_mb: int) -> Choice | None:
    """Find the fastest counts that fit; None where none does.

    >>> fast, small = Level(1.0, 10), Level(2.0, 4)
    >>> choose([fast, small], 3, 25).counts
    (2, 1)
    """
    seconds = np.array([level.seconds for level in levels])
    rows = np.array([[1] * len(levels), [level.megabytes for level in levels]])
    found = milp(
        seconds / seconds.max(),
        constraints=LinearConstraint(rows, [num_layers, 0], [num_layers, limit_mb]),
        bounds=Bounds(0, num_layers),
        integrality=np.ones(len(levels)),
        options={"mip_rel_gap": 0.0},
    )
    if not found.success:
        return None
    return Choice(tuple(round(n) for n in found.x), tuple(levels))


def read_tables(folder: Path) -> tuple[dict[int, list[list[Level]]], int]:
    """Read levels by hidden size and batch index, and the megabytes beside them.

    Raises:
        KeyError: the file lacks one of its three tables.
        ValueError: what is assigned is no literal.
    """
    values = {}
    for node in ast.parse((folder / _TABLES).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values[node.targets[0].id] = ast.literal_eval(node.value)
    times, memories = values["time_map"], values["mem_map"]
    levels = {
        size: [
            [Level(s, int(mb)) for s, mb in zip(seconds, megabytes, strict=True)]
            for seconds, megabytes in zip(times[i], memories[i], strict=True)
        ]
        for i, size in enumerate(HIDDEN_SIZES)
    }
    return levels, int(values["extra_overhead"])


def main() -> None:
    """Print the choice of every hidden size and batch index that fits, as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a clone of OSDP")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--limit-mb", type=int, default=8192)
    arguments = parser.parse_args()
    tables, overhead_mb = read_tables(arguments.folder)
    room_mb = arguments.limit_mb - overhead_mb
    print(
        "| hidden size | batch index | layers of levels 0, 1, 2, 3 | MB | all sharded, MB | gain |"
    )
    print("| --: | --: | --- | --: | --: | --: |")
    for size, rows in tables.items():
        for index, levels in enumerate(rows):
            found = choose(levels, arguments.layers, room_mb)
            if found is None:
                continue
            sharded = Choice((0, 0, 0, arguments.layers), tuple(levels))
            print(
                f"| {size} | {index} | {', '.join(map(str, found.counts))} | {found.megabytes} + "
                f"{overhead_mb} | {sharded.megabytes} + {overhead_mb} | "
                f"{sharded.seconds / found.seconds:.3f} |"
            )


if __name__ == "__main__":
    main()
