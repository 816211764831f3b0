"""Small GPT for the kit, and the differences between a GPU and a CPU.

Layers are Megatron's own on both (`--transformer-impl local`) unless a case names Transformer
Engine's, so that the same kernels run in the runtime and in stock Megatron whatever else is
installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.inventory.discovery import find_gpus
from megatron_hetero.errors import EnvironmentMismatchError, UsageError
from megatron_hetero.flags.gpu_needs import FP8_CAPABILITY
from megatron_hetero.runtime.transformer_engine import layers
from megatron_hetero.units import format_bytes

NEEDED_BYTES = 8 << 30
"""Memory of a card for six ranks, a CUDA context of 750 MiB each, and their small models."""


@dataclass(frozen=True)
class Machine:
    """Machine of so many GPUs of a type, or none; `gpu` is the name in profile.json."""

    gpu: str
    num_gpus: int

    def flags_of(self, named: str) -> tuple[str, ...]:
        """Return the Megatron flags of a run with local layers or with Transformer Engine's; the
        runtime adds those of a CPU itself."""
        flag = f"--transformer-impl={named}"
        return (flag, *layers.gpu_flags((flag,))) if self.num_gpus else (flag,)

    def lacks_transformer_engine(self) -> str | None:
        """Return the reason why Transformer Engine's layers cannot be tried; None if they can.

        Without a GPU it has to be asked once before Megatron is imported (`layers.provide`).
        """
        if self.num_gpus == 0:
            return layers.provide()
        has_kernels = importlib.util.find_spec("transformer_engine_torch") is not None
        return None if has_kernels else "Transformer Engine is not installed here"

    def lacks_fp8(self) -> str | None:
        """Return the reason why products in fp8 cannot be tried; None if they can.

        A CPU has them where it has Transformer Engine's layers.
        """
        needed = FP8_CAPABILITY["tensorwise"]
        if self.num_gpus and (gpu_type(self.gpu).capability or 0.0) < needed:
            return f"fp8 needs compute capability {needed}, and {self.gpu} has less"
        return None

    def model(self, named: str = layers.LOCAL) -> tuple[str, ...]:
        """Return the flags of a GPT that takes some milliseconds a pass: in fp32 with local layers,
        in bf16 with Transformer Engine's."""
        own = self.flags_of(named)
        if named == layers.TRANSFORMER_ENGINE:
            own = (*own, "--bf16")
        # On a GPU a small model would only measure how fast the host launches kernels.
        hidden, heads, sequence = (192, 4, 128) if self.num_gpus == 0 else (1024, 16, 1024)
        return (
            "--num-layers=4",
            f"--hidden-size={hidden}",
            f"--num-attention-heads={heads}",
            f"--seq-length={sequence}",
            f"--max-position-embeddings={sequence}",
            "--vocab-size=1000",
            "--micro-batch-size=1",
            "--global-batch-size=4",
            "--attention-dropout=0",
            "--hidden-dropout=0",
            *own,
        )


def this_machine(named: str | None) -> Machine:
    """Return the GPUs of this machine, as the driver lists them: CUDA in this process forbids
    forks.

    Args:
        named: a name of the catalogue, where it does not know the driver's.
    Raises:
        EnvironmentMismatchError: other programs take a card's memory.
        UsageError: a GPU that the catalogue does not know.
    """
    count = torch.cuda.device_count()
    if count == 0:
        return Machine("CPU", 0)
    cards = find_gpus()
    # Every visible card has to hold its share of the ranks.
    for card in cards[:count]:
        free = card.memory_bytes - card.used_bytes
        if free < NEEDED_BYTES:
            raise EnvironmentMismatchError(
                f"GPU {card.index} ({card.name}) has {format_bytes(free)} free and the kit needs "
                f"{format_bytes(NEEDED_BYTES)}: end what runs on the card (`nvidia-smi` lists the "
                "processes), or hide the card with CUDA_VISIBLE_DEVICES."
            )
    # The type's name stands in profile.json, so the catalogue or the user has to say it.
    name = named or cards[0].catalogue_name
    if name is None:
        raise UsageError(
            f"the catalogue does not know this machine's {cards[0].name}; name the type "
            "nearest to it with --gpu"
        )
    return Machine(name, count)


TRAINING = (
    "--lr=1e-5",
    "--lr-decay-style=constant",
    "--mock-data",
    "--tokenizer-type=NullTokenizer",
    "--eval-iters=0",
    "--eval-interval=1000000",
    "--log-interval=1",
    "--num-workers=0",
    "--optimizer=adam",
)


def on_this_backend(function: Callable[[int], None]) -> Callable[[int], None]:
    """Wrap the function of a forked rank: on a GPU the parent must not have used CUDA.

    Raises:
        EnvironmentMismatchError: the parent has used CUDA; raised in the rank.
    """

    def run(rank: int) -> None:
        # Without a driver even the count of GPUs marks the process.
        if torch.cuda.is_available() and torch.cuda._is_in_bad_fork():
            raise EnvironmentMismatchError(
                "the process that started this rank had already used CUDA, which no fork survives; "
                "a package that Megatron imports may do so. Start `megatron-hetero doctor --train` "
                "in a process of its own, with PYTORCH_NVML_BASED_CUDA_CHECK=1."
            )
        function(rank)

    return run
