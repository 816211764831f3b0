"""Megatron flags of the optimizer, as the runs of a verification treat them."""

from __future__ import annotations

OTHER_RATES = ("--min-lr", "--decoupled-lr", "--decoupled-min-lr", "--lr-warmup-init")
"""Learning rates beside --lr."""
RATES = (
    *OTHER_RATES,
    "--lr-warmup-iters",
    "--lr-warmup-fraction",
    "--lr-decay-iters",
    "--lr-wsd-decay-iters",
    "--lr-decay-style",
)
"""Flags of a job that learns; the seed checkpoint has weights that have not moved."""
ONLY_WITH_ADAM = (
    "--use-distributed-optimizer",
    "--overlap-param-gather",
    "--overlap-param-gather-with-optimizer-step",
    "--num-distributed-optimizer-instances",
)
"""Flags of a stock plan's distributed optimizer, which knows no SGD."""
ADAM = {
    "--adam-beta1": "beta1",
    "--adam-beta2": "beta2",
    "--adam-eps": "epsilon",
    "--clip-grad": "max_norm",
}
"""Flag -> field of `AdamSettings`."""
