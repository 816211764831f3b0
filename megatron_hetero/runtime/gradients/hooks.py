"""Reports of complete gradients: the calls of Megatron's DDP on a model chunk, step after step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class ChunkGradients:
    """Substitute for the bucket groups of Megatron's DDP, for a whole model chunk.

    DDP's hooks report every gradient (`register_grad_ready`), its `no_sync` marks the last
    micro-batch, and its `finish_grad_sync` the end of the step's backward passes.
    """

    def __init__(
        self, chunk: Any, launch_ready: Callable[[], None], begin_step: Callable[[], None]
    ) -> None:
        """Prepare a chunk.

        Args:
            chunk: the DDP-wrapped chunk.
            launch_ready: called whenever more gradients are complete.
            begin_step: called where DDP's gradients are set to zero.
        """
        self._launch_ready, self._begin_step = launch_ready, begin_step
        self._parameters = set(chunk.param_to_bucket_group)
        self.is_last_microbatch = True
        # How often a parameter's hook runs in a micro-batch is learned in the first step, as
        # Megatron does: a weight used twice has its gradient after the second call.
        self._expected: dict[torch.nn.Parameter, int] = {}
        self._seen: dict[torch.nn.Parameter, int] = {}
        self._is_finished = False
        chunk.bucket_groups = [self]
        # Megatron keeps those of experts apart, since other ranks may hold them; here none do.
        chunk.expert_parallel_bucket_groups = []
        chunk.param_to_bucket_group = dict.fromkeys(chunk.param_to_bucket_group, self)

    def is_ready(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Tell if all of `parameters` in this chunk have gradients."""
        if self._is_finished:
            return True
        return bool(self._expected) and all(
            self._seen.get(p, 0) >= self._expected.get(p, 1)
            for p in parameters
            if p in self._parameters
        )

    def register_grad_ready(
        self, parameter: torch.nn.Parameter, force_all_reduce: bool = False
    ) -> None:
        if not self.is_last_microbatch:
            return
        self._seen[parameter] = self._seen.get(parameter, 0) + 1
        if self._expected and self._seen[parameter] == self._expected.get(parameter, 1):
            self._launch_ready()

    def start_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Finish the chunk; interleaved schedules call this at its last gradient."""
        self._finish()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        self._finish()

    def _finish(self) -> None:
        if not self._is_finished:
            self._is_finished = True
            self._launch_ready()

    def reset(self) -> None:
        """Reset the counts for a new step (DDP's `zero_grad_buffer`)."""
        if not self._expected:
            self._expected = self._seen
        self._seen = {}
        self._is_finished = False
        self.is_last_microbatch = True
        self._begin_step()

    def free_overlap_buffers(self) -> None:
        """Free nothing: parameters are gathered without buffers of their own."""
