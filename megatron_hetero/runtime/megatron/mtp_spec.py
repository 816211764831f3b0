"""`megatron.training.models.gpt.mtp_block_spec`: our parts in the layers that predict more tokens.

Megatron builds the spec of `--mtp-num-layers` from its own layers, whatever layer spec the job
names.  Where a plan needs other parts in a layer (`runtime.model.gpt.layer_spec`), these need
them too, and nothing hands them over, hence the replacement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

REPLACEMENT = Replacement(
    module="megatron.training.models.gpt",
    name="mtp_block_spec",
    reason="layers that predict more tokens have the parts of other layers",
    known={"43ccd8c4a2767959": TESTED},
    is_stock=True,
)


def apply(with_parts: Callable[[Any, Any], Any]) -> None:
    """Change Megatron's spec by `with_parts(spec, configuration of the model)`."""

    def mtp_block_spec(config: Any, *args: Any, **kwargs: Any) -> Any:
        spec = REPLACEMENT.original()(config, *args, **kwargs)
        # Stages without such layers have no spec.
        return None if spec is None else with_parts(spec, config)

    REPLACEMENT.apply(mtp_block_spec)
