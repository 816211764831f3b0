"""The compute capability of the card for Transformer Engine while it is imported.

It asks for it at import where flash-attn is installed, as in NVIDIA's containers.  Torch would
start CUDA for the answer, and a process that has started CUDA cannot fork ranks
(`runtime.job.local`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from megatron_hetero.cluster.inventory.discovery import FoundGpu, find_gpus
from megatron_hetero.errors import EnvironmentMismatchError


@contextmanager
def answered_by_the_driver() -> Iterator[None]:
    """Let the first card's capability come from `nvidia-smi` in a `with` block.

    Nothing changes without flash-attn, without `nvidia-smi`, or where CUDA has started already.
    """
    is_asked = find_spec("flash_attn") is not None and not torch.cuda.is_initialized()
    card = _first_card() if is_asked else None
    # Drivers that are too old name no capability.
    if card is None or not re.fullmatch(r"\d+\.\d+", card.compute_capability):
        yield
        return
    own = torch.cuda.get_device_properties, torch.cuda.current_device
    torch.cuda.get_device_properties = lambda *_: _Properties(card, own[0])
    torch.cuda.current_device = lambda: 0
    try:
        yield
    finally:
        torch.cuda.get_device_properties, torch.cuda.current_device = own


class _Properties:
    """The driver's words on a card; for all else torch is asked, which starts CUDA."""

    def __init__(self, card: FoundGpu, ask: Callable[[int], Any]) -> None:
        self.major, self.minor = map(int, card.compute_capability.split("."))
        self._ask = ask

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ask(0), name)


def _first_card() -> FoundGpu | None:
    """Return the first card that this process sees; None where nobody says."""
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mask == "" or torch.version.hip:
        return None
    try:
        cards = find_gpus()
    except EnvironmentMismatchError:
        return None
    by_index = {str(card.index): card for card in cards}
    # Without a mask of numbers it is the first of all.
    return by_index.get((mask or "").partition(",")[0], cards[0])
