"""Shard tables of all ranks, on every rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from megatron_hetero.runtime.parallel.shards import ParameterShard
from megatron_hetero.runtime.parallel.texts import gather_texts


def all_shards(shards: Mapping[str, ParameterShard]) -> list[dict[str, ParameterShard]]:
    """Gather every rank's shards by name, [rank]. Collective; sent as JSON in byte tensors."""
    text = json.dumps([asdict(s) for s in shards.values()])
    return [
        {entry["name"]: ParameterShard.from_json(entry) for entry in json.loads(found)}
        for found in gather_texts(text)
    ]
