"""Checkpoints of Transformer Engine's layers asked for by local ones, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_hetero.runtime.state import other_layers

LOCAL, ENGINE = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
MOMENT = "optimizer.state.exp_avg."


@pytest.mark.parametrize(("own", "theirs"), [(LOCAL, ENGINE), (ENGINE, LOCAL), (LOCAL, LOCAL)])
def test_norms_before_experts_are_found_under_either_name(
    own: str, theirs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = "decoder.layers.1."
    there = {layer + theirs, MOMENT + layer + theirs, layer + "mlp.router.weight"}
    (tmp_path / ".metadata").touch()
    metadata = type("Metadata", (), {"state_dict_metadata": there})
    monkeypatch.setattr(other_layers, "read_metadata", lambda path: metadata)

    def tensor(key: str) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, torch.zeros(2))

    wanted = {
        "model": {own: tensor(layer + own), "router": tensor(layer + "mlp.router.weight")},
        "optimizer": {"param_groups": [], "state": [tensor(MOMENT + layer + own)]},
    }
    asked: list[str] = []

    def original(wanted: dict[str, Any], folder: Path) -> dict[str, Any]:
        asked.extend(t.key for t in [*wanted["model"].values(), *wanted["optimizer"]["state"]])
        return wanted

    # The state keeps the places where the layers look for it.
    assert own in other_layers.load(original, wanted, tmp_path)["model"]
    assert set(asked) == there
