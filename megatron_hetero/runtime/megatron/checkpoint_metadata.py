"""`megatron.training.checkpointing._build_sharded_state_dict_metadata`: one key for each layer.

Stock GPT stacks a parameter of all layers in one tensor of the checkpoint, whose pieces have to be
equal; stages and widths that differ need a key for each layer.  Megatron decides by an entry of
this metadata, stores it in the checkpoint and obeys it on load: so stock Megatron, too, reads what
an asymmetric plan wrote.  There is a configuration field of the same effect, but it would also
govern loading, where the checkpoint has to decide.
"""

from __future__ import annotations

from typing import Any

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

REPLACEMENT = Replacement(
    module="megatron.training.checkpointing",
    name="_build_sharded_state_dict_metadata",
    reason="checkpoints of asymmetric plans need one key for each layer",
    known={"c58be23980f3420a": TESTED},
)

ONE_KEY_PER_LAYER = "non_homogeneous_layers"


def apply(**entries: Any) -> None:
    """Add `entries`, and one key for each layer, to the metadata of later checkpoints."""

    def metadata(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**REPLACEMENT.original()(*args, **kwargs), ONE_KEY_PER_LAYER: True, **entries}

    REPLACEMENT.apply(metadata)
