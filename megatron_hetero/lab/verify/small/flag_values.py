"""Values of a job's flags that fit its small job: steps, windows, groups of experts, bases of muP.

Which flags get another value is data (`flags/support/verification.json`, "shrunk").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import gcd

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.lab.verify.small.shrink import Shrunk
from megatron_hetero.model.flag_table import Option
from megatron_hetero.model.spec import Workload

OFF = "off"
"""Stands in the report for a value that the small job does not have."""
_TEXT = "text as bytes"


class SmallValues:
    """Values of one job's flags in its small job.

    Args:
        workload: the job.
        shrunk: the small model.
        num_steps: number of steps that the small job trains.
        options: all flags of the job, because some values follow from others.
    """

    def __init__(
        self, workload: Workload, shrunk: Shrunk, num_steps: int, options: Sequence[Option]
    ) -> None:
        self._workload, self._shrunk, self._num_steps = workload, shrunk, num_steps
        self._given = {option.flag.names[0]: option for option in options}

    def kept(self, option: Option) -> tuple[str, ...]:
        """Return the tokens of an option that stays.

        Raises:
            UnsupportedError: the value is a list with an entry for each layer, and fewer layers are
                left.
        """
        # A number means every so many layers, which fewer layers keep.
        per_layer = ("--no-rope-freq", "--window-attn-skip-freq")
        if option.name in per_layer and not option.values[0].lstrip("-").isdigit():
            raise UnsupportedError(
                f"{option}: a list of layers cannot be verified, because the model is trained with "
                "fewer. Leave it out to compare the rest."
            )
        return option.tokens

    def instead_of(self, option: Option) -> tuple[tuple[str, ...], str | None]:
        """Return (arguments, text to show); None where the model's sizes show it."""
        name = option.flag.names[0]
        if name in _DATA_FLAGS:
            return (), _TEXT
        if name in _RANDOM_FLAGS:
            return (), OFF
        make: Callable[[SmallValues, Option], tuple[tuple[str, ...], str | None]] | None
        make = _MADE.get(name)
        return ((), None) if make is None else make(self, option)

    def steps(self, option: Option) -> tuple[tuple[str, ...], str]:
        """Scale a number of steps as the run is shorter than the job; at least one step."""
        name = option.name.replace("-samples", "-iters")
        if name in ("--train-iters", "--lr-decay-iters"):
            tokens = () if name == "--train-iters" else (f"{name}={self._num_steps}",)
            return tokens, f"{self._num_steps} steps"
        # The same part of the run as in the job, but neither none nor all of it.
        whole = self._length_of_the_job(option.name.endswith("-samples"))
        part = int(option.values[0])
        here = min(max(round(part * self._num_steps / whole), 1), self._num_steps - 1)
        here = here if part else 0
        return (f"{name}={here}",), f"{here} steps"

    def _length_of_the_job(self, in_samples: bool) -> int:
        unit = "samples" if in_samples else "iters"
        for name in (f"--lr-decay-{unit}", f"--train-{unit}"):
            if name in self._given:
                return max(int(self._given[name].values[0]), 1)
        return 1

    def window(self, option: Option) -> tuple[tuple[str, ...], str]:
        """Scale attention windows as the sequence is shorter than the job's."""
        # A window of -1 or 0 has no length to scale.
        ratio = self._shrunk.model.seq_length / self._workload.model.seq_length
        given = [int(x) for x in re.findall(r"-?\d+", " ".join(option.values))]
        here = ",".join(str(max(round(x * ratio), 1) if x > 0 else x) for x in given)
        return (f"{option.name}={here}",), here

    def recomputed(self, option: Option) -> tuple[tuple[str, ...], str]:
        # No more layers than the smallest stage has left.
        stages = [s for r in self._shrunk.plan.replicas for s in r.stages]
        here = min(int(option.values[0]), *(s.shape.num_layers for s in stages))
        return (f"{option.name}={here}",), str(here)

    def groups_of_experts(self, option: Option) -> tuple[tuple[str, ...], str]:
        experts, topk = self._shrunk.model.num_experts, self._shrunk.model.moe_router_topk
        # Groups have to divide the experts, and the chosen groups have to hold top-k of them.
        groups = gcd(int(self._given["--moe-router-num-groups"].values[0]), max(experts, 1))
        here = groups
        if option.name == "--moe-router-group-topk":
            here = min(int(option.values[0]), groups)
            if here * (experts // groups) < topk:
                here = groups
        return (f"{option.name}={here}",), str(here)

    def base_of_mup(self, option: Option) -> tuple[tuple[str, ...], str]:
        """Scale a base of muP as the model is smaller than the job's."""
        attribute = "kv_channels" if "head" in option.name else "hidden_size"
        ratio = getattr(self._shrunk.model, attribute) / getattr(self._workload.model, attribute)
        here = max(round(int(option.values[0]) * ratio), 1)
        return (f"{option.name}={here}",), str(here)

    def batch(self, option: Option) -> tuple[tuple[str, ...], str]:
        return (), f"the plan's batch of {self._shrunk.global_batch_size} in every step"


_DATA_FLAGS = (
    "--data-path", "--train-data-path", "--mock-data", "--split", "--tokenizer-type", "--fim-data",
)  # fmt: skip
_RANDOM_FLAGS = (
    "--moe-input-jitter-eps",
    "--moe-router-force-biased",
    "--moe-router-force-load-balancing",
)
_Made = Callable[[SmallValues, Option], tuple[tuple[str, ...], str | None]]
_MADE: dict[str, _Made] = {
    **dict.fromkeys(
        (
            "--train-iters",
            "--train-samples",
            "--lr-decay-iters",
            "--lr-decay-samples",
            "--lr-warmup-iters",
            "--lr-warmup-samples",
            "--lr-wsd-decay-iters",
            "--lr-wsd-decay-samples",
        ),
        SmallValues.steps,
    ),
    **dict.fromkeys(
        ("--moe-router-num-groups", "--moe-router-group-topk"), SmallValues.groups_of_experts
    ),
    **dict.fromkeys(("--mup-base-hidden-size", "--mup-base-head-dim"), SmallValues.base_of_mup),
    "--window-size": SmallValues.window,
    "--recompute-num-layers": SmallValues.recomputed,
    "--step-batch-size-schedule": SmallValues.batch,
    "--distributed-backend": lambda values, option: ((), "gloo"),
    "--exit-interval": lambda values, option: ((), "the last step"),
    **dict.fromkeys(
        ("--initial-loss-scale", "--loss-scale", "--min-loss-scale", "--loss-scale-window",
         "--hysteresis"),
        lambda values, option: ((), "a scale that moves within these steps"),
    ),
    # Conversations become what they are packed as: documents, of text.
    "--sft": lambda values, option: (
        ("--dataloader-inter-document-masking",), "packed documents of text"
    ),
    "--phase-transition-iterations": lambda values, option: ((), "one phase"),
    "--padded-vocab-size": lambda values, option: ((), _TEXT),
    "--no-pad-vocab-size": lambda values, option: ((), _TEXT),
    "--mrope-section": lambda values, option: ((), OFF),
    "--yarn-original-max-position-embeddings": lambda values, option: ((), OFF),
}  # fmt: skip
