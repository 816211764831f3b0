"""The line of the log about dealt steps: how level replicas were, and how level they should be.

A rank is busy in its forward and backward passes, a replica as long as its busiest rank; what it
waits in them for other members of its group, which have less to do, counts as busy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.runtime.observe.log_values import write_values
from megatron_hetero.runtime.observe.stage_ratio import StageWatch
from megatron_hetero.runtime.sequences.steps import RankStep
from megatron_hetero.sequences.pipelines import PipelineRates
from megatron_hetero.sequences.simulated_step import SimulatedStep


class Balance:
    """Stopwatch for this rank's passes, and observer of Megatron's log with a line on the steps
    since the line before."""

    def __init__(self, replicas: Sequence[int], pipelines: Sequence[PipelineRates]) -> None:
        """Begin with no steps.

        Args:
            replicas: of every rank.
            pipelines: of every replica.
        """
        self._replicas, self._pipelines = replicas, pipelines
        self._steps_s = 0.0
        self._watch = StageWatch()
        self._is_training = False
        self._steps: list[RankStep] = []
        # Notes on the search that are not printed yet.
        self._notes: list[str] = []
        self._num_tokens = 0

    def tokens_so_far(self) -> int:
        """Count the tokens of all ranks since the job began."""
        return self._num_tokens

    @contextmanager
    def watched(self, kind: str) -> Iterator[None]:
        """Measure the time of a block of training if the operation computes."""
        if not self._is_training:
            yield
            return
        with self._watch.watched(kind):
            yield

    @contextmanager
    def measured(self, step: RankStep, forward_only: bool) -> Iterator[None]:
        """Measure a step of training; one of validation is left out."""
        self._is_training = not forward_only
        if self._is_training:
            self._steps.append(step)
            self._notes += [step.note] if step.note else []
            self._num_tokens += step.num_tokens
        begun_s = time.perf_counter()
        yield
        if self._is_training:
            self._steps_s += time.perf_counter() - begun_s
        self._is_training = False

    def observe(self, iteration: int, loss_dict: dict[str, Any], grad_norm: Any) -> None:
        """Exchange the ranks' times and print the line.  Collective at each interval of the log.

        Args:
            iteration: the step.
            loss_dict: Megatron's losses; not read.
            grad_norm: Megatron's norm; not read.
        """
        from megatron.training import get_args

        num_ranks, rank = dist.get_world_size(), dist.get_rank()
        # Notes on the search come at once, each with its own step.
        for note in self._notes:
            print(f" [sequences] iteration {iteration:8d} | {note} |", flush=True)
        self._notes.clear()
        # The line comes with Megatron's, over the steps since the last one.
        if iteration % get_args().log_interval or not self._steps:
            return
        # Every rank's seconds, on all ranks; the last one prints.
        seconds, _ = self._watch.take_all()
        mine = torch.tensor([seconds], dtype=torch.float64, device="cuda")
        found = [torch.zeros_like(mine) for _ in range(num_ranks)]
        dist.all_gather(found, mine)
        steps, self._steps = self._steps, []
        real_s, self._steps_s = self._steps_s, 0.0
        if rank != num_ranks - 1:
            return
        # Measured and predicted seconds of each replica, and of the whole steps.
        busy_s = slowest_of_each([float(x.item()) for x in found], self._replicas)
        each = zip(*(step.whole.busy_s(len(busy_s)) for step in steps), strict=True)
        predicted_s = [sum(of_rank) for of_rank in each]
        promised_s = sum(SimulatedStep(step.whole, self._pipelines).seconds for step in steps)
        line = balance_line(steps, busy_s, predicted_s)
        line += (
            f" | step: {real_s / len(steps):.3g} s with the exchange of gradients, predicted "
            f"{promised_s / len(steps):.3g} s without"
        )
        print(f" [sequences] iteration {iteration:8d} | {line} |", flush=True)
        values = {"balance/real": balance(busy_s), "balance/predicted": balance(predicted_s)}
        write_values(values, iteration)


def slowest_of_each(seconds: Sequence[float], replicas: Sequence[int]) -> list[float]:
    """Return the seconds of the busiest rank of each replica; a pipeline is as fast as that.

    Args:
        seconds: of every rank.
        replicas: of every rank.
    """
    found = [0.0] * (max(replicas) + 1)
    for busy_s, replica in zip(seconds, replicas, strict=True):
        found[replica] = max(found[replica], busy_s)
    return found


def balance(busy_s: Sequence[float]) -> float:
    """Return the seconds of the busiest replica over the mean; 1 is level."""
    return max(busy_s) * len(busy_s) / sum(busy_s)


def balance_line(
    steps: Sequence[RankStep], busy_s: Sequence[float], predicted_s: Sequence[float]
) -> str:
    """Format the steps since the last line.

    Args:
        steps: at least one.
        busy_s: measured seconds of every replica, in all steps.
        predicted_s: as predicted.
    """
    sequences = sum(step.num_sequences for step in steps)
    tokens = sum(step.num_tokens for step in steps)
    longest_s, promised_s = max(busy_s) / len(steps), max(predicted_s) / len(steps)
    return (
        f"{sequences:,} sequences, {tokens:,} tokens | groups of the last step: "
        f"{steps[-1].whole.sizes} | busiest over mean: {balance(busy_s):.2f}, predicted "
        f"{balance(predicted_s):.2f} | busiest: {longest_s:.3g} s a step, predicted "
        f"{promised_s:.3g} s"
    )
