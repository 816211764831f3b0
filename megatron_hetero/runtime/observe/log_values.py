"""Numbers of this package's own in Megatron's TensorBoard and W&B logs."""

from __future__ import annotations

from collections.abc import Mapping


def write_values(values: Mapping[str, float], iteration: int) -> None:
    """Write each value by name, where Megatron has opened a writer: on the last rank, if asked."""
    from megatron.training import get_tensorboard_writer, get_wandb_writer

    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if tensorboard:
        for name, value in values.items():
            tensorboard.add_scalar(name, value, iteration)
    if wandb:
        wandb.log(dict(values), iteration)
