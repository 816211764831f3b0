"""Reads the Sailor project's tables of operators, layers and collectives (MIT licence).

FOLDER holds `layer_times.json` (seconds of each layer, fp32) and
`operator_tables/GPU/profiled-data-{fp16,fp32}/*.csv`, as published by eth-easl/sailor at commit
cf2c8e3.  The tables are not part of this repository.
"""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_hetero.model.spec import ModelSpec, Workload
from megatron_hetero.model.training import Precision, TrainingSpec

CATALOGUE_NAMES = {
    "A100-40": "A100-40GB",
    "A100-80": "A100-80GB",
    "GH-96": "GH200-96GB",
    "RTX-2080": "RTX-2080-Ti",
    "RTX-3090": "RTX-3090",
    "Titan-RTX": "Titan-RTX",
    "V100-16": "V100-16GB",
}
SAME_CHIP = {"A100-80": "A100-40"}
"""Tables of operators and collectives that stand in where a type has none."""

# Hidden size, heads, layers, vocabulary.  The table of activations gives the layers of GPT-Neo 20
# heads, as the published model has; its operators ran with the 32 of the training configuration.
SHAPES = {
    "OPT-350": (1024, 16, 24, 50272),
    "GPT-Neo-2.7": (2560, 20, 32, 128256),
    "OPT-30": (7168, 56, 48, 50272),
}
OPERATOR_HEADS = {"GPT-Neo-2.7": 32}
SEQ_LENGTH = 2048
_NOT_RUN = 1e6
"""Microseconds or milliseconds; what did not run has 1e7 or more in its place."""


@dataclass(frozen=True)
class OperatorPoint:
    """Forward and backward of one operator at width 1."""

    model: str
    micro_batch_size: int
    operator: str
    forward_s: float
    backward_s: float
    input_and_output_bytes: float


@dataclass(frozen=True)
class LayerPoint:
    """One decoder layer at a tensor-parallel width, its communication included."""

    model: str
    gpu: str
    micro_batch_size: int
    width: int
    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        """Forward plus backward."""
        return self.forward_s + self.backward_s


def table_workload(
    model: str, micro_batch_size: int, precision: Precision, operators: bool = False
) -> Workload:
    """Make a model of the tables, with unfused attention.

    The table of activations has every score kept once, so the layers ran without dropout of them;
    the operators are those of layers with dropout.
    """
    hidden, heads, num_layers, vocab = SHAPES[model]
    heads = OPERATOR_HEADS.get(model, heads) if operators else heads
    dropout = 0.1 if operators else 0.0
    spec = ModelSpec(
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        vocab_size=vocab,
        seq_length=SEQ_LENGTH,
        max_position_embeddings=SEQ_LENGTH,
    )
    training = TrainingSpec(
        micro_batch_size,
        micro_batch_size,
        precision,
        flash_attention=False,
        attention_dropout=dropout,
        hidden_dropout=dropout,
        local_layers=True,
    )
    return Workload(spec, training, (), "Sailor tables")


def operator_points(folder: Path, gpu: str, precision: str) -> list[OperatorPoint]:
    """Read every operator that ran on a GPU at width 1."""
    points = []
    tables = folder / "operator_tables" / SAME_CHIP.get(gpu, gpu) / f"profiled-data-{precision}"
    for path in sorted(tables.glob("*.csv")):
        match = re.fullmatch(r"(.+)_mbs(\d+)_tp1_algo0\.csv", path.name)
        if match is None:
            continue
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                forward, backward = (float(row[f"{p}-compute"]) for p in ("forward", "backward"))
                if max(forward, backward) < _NOT_RUN:
                    mebibytes = float(row["input_size"]) + float(row["output_size"])
                    points.append(
                        OperatorPoint(
                            match[1],
                            int(match[2]),
                            row["op_name"],
                            forward * 1e-6,
                            backward * 1e-6,
                            mebibytes * 2**20,
                        )
                    )
    return points


def layer_points(folder: Path) -> list[LayerPoint]:
    """Read the median decoder layer of every set; leave out those rounded to four digits."""
    tables = json.loads((folder / "layer_times.json").read_text(encoding="utf-8"))
    points = []
    for model in ("OPT-350", "GPT-Neo-2.7"):
        for gpu, by_size in sorted(tables[model].items()):
            for size, by_width in sorted(by_size.items(), key=lambda item: int(item[0])):
                for width, layers in sorted(by_width.items(), key=lambda item: int(item[0])):
                    # Index 0 is the embedding, the last one the head.
                    inner = [layers[str(i)] for i in range(1, len(layers) - 1)]
                    forward_s, backward_s = (statistics.median(t[i] for t in inner) for i in (0, 1))
                    points.append(
                        LayerPoint(model, gpu, int(size), int(width), forward_s, backward_s)
                    )
    return points


def all_reduce_points(folder: Path, gpu: str, width: int) -> Iterator[tuple[float, float]]:
    """Yield (bytes, seconds) of all-reduces over `width` GPUs of one node."""
    tables = folder / "operator_tables" / SAME_CHIP.get(gpu, gpu) / "profiled-data-fp32"
    for path in sorted(tables.glob(f"prim_*_all_reduce_{width}gpus.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            for size, time in list(csv.reader(file))[1:]:
                if float(time) < _NOT_RUN and math.isfinite(float(time)):
                    yield float(size) * 1e6, float(time) * 1e-3
