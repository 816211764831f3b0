"""A rank's part of a step: receive, compute the stage's layers, send; on the last stage draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from megatron_hetero.lab.serve.attention import ServedStep
from megatron_hetero.lab.serve.batch import Drawn, Step
from megatron_hetero.lab.serve.sampling import draw
from megatron_hetero.runtime.parallel.pipeline import PipelineCommunicator
from megatron_hetero.runtime.parallel.tensor_place import tensor_place

Observer = Callable[[Step, Tensor], None]
"""Called on the drawing rank with a step and its logits `[drawn, vocabulary]`."""


class StageRunner:
    """Layers of this rank's stage, with its cache.

    Args:
        model: of this rank, loaded; its attention is `CachedAttention`.
        groups: Megatron's collection of this rank.
        communicator: its boundaries.
        served: the step that its attention reads.
        vocabulary: tokens that may be drawn; the model's rows beyond them are padding.
        observe: sees the logits.
    """

    def __init__(
        self,
        model: Sequence[Any],
        groups: Any,
        communicator: PipelineCommunicator,
        served: ServedStep,
        vocabulary: int,
        observe: Observer | None = None,
    ) -> None:
        (self._chunk,) = unwrap_model(list(model))
        (self._model,) = model
        self._model.eval()
        self._config = get_model_config(self._chunk)
        self._tensor = groups.tp
        stage, last = communicator.pp_group.rank(), communicator.total_stages - 1
        self._before = communicator.boundaries.get(stage - 1)
        self._after = communicator.boundaries.get(stage) if stage < last else None
        self._is_last = stage == last
        self._served, self._vocabulary, self._observe = served, vocabulary, observe
        self._gathers = bool(self._config.sequence_parallel)
        if self._is_last:
            # Rows are gathered before the few that matter are taken.
            self._chunk.output_layer.sequence_parallel = False

    @property
    def draws(self) -> bool:
        """Return whether this rank draws tokens."""
        return self._is_last and self._tensor.rank() == 0

    @torch.no_grad()
    def run(self, step: Step) -> tuple[Drawn, ...] | None:
        """Compute a step; return its tokens on the rank that draws."""
        device = torch.cuda.current_device()
        self._served.begin(step, device)
        # The whole activation comes from the stage before, or with sequence
        # parallelism this rank's part.
        if self._before is not None:
            self._before.begin()
            width = self._tensor.size() if self._gathers else 1
            shape = (step.num_tokens // width, 1, self._config.hidden_size)
            self._before.post_receive(shape)
            self._chunk.set_input_tensor(self._before.take().detach())
        # Tokens of all segments in one row [1, t], filled up to the step's length.
        tokens = [t for segment in step.segments for t in segment.tokens]
        tokens += [0] * (step.num_tokens - len(tokens))
        found = self._model(
            torch.tensor([tokens], device=device),
            self._served.positions.unsqueeze(0),
            None,
            output_processor=self._logits if self._is_last else None,
            output_processor_context=step,
        )
        # The result goes on to the next stage.
        if self._after is not None:
            # The message before has left when its receiver began; this waits for no later one.
            self._after.finish_sends()
            self._after.begin()
            self._after.send(found)
        # Only the last stage has logits, and only a step that draws needs them.
        if not self._is_last or not step.drawn:
            return () if self.draws else None
        logits = self._whole(found)
        if logits is None:
            return None
        if self._observe is not None:
            self._observe(step, logits)
        return draw(logits, step.drawn)

    def _logits(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        scale_logits: Callable[[Tensor], Tensor],
        context: Step,
        **_: Any,
    ) -> Tensor:
        """Return the rank's part `[drawn, rows]` of the logits after the segments that draw
        (Megatron's `output_processor`)."""
        if self._gathers:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=self._tensor)
        rows, row = [], 0
        # The last row of each segment that draws.
        for segment in context.segments:
            row += len(segment.tokens)
            if segment.draws is not None:
                rows.append(row - 1)
        wanted = hidden_states[rows]
        if not rows:
            return wanted
        part, _ = output_layer(wanted, weight=output_weight, runtime_gather_output=False)
        return scale_logits(part).squeeze(1)

    def _whole(self, part: Tensor) -> Tensor | None:
        """Gather logits to the drawing rank; ranks have unlike numbers of rows."""
        # 16-bit logits of unlike ranks are drawn from in fp32; wider ones stay as they are.
        part = part.to(torch.promote_types(part.dtype, torch.float32))
        width = self._tensor.size()
        # `all_gather` takes equal shapes, so every part is padded to the widest.
        if width > 1:
            # A group without shares has one unit for each rank.
            edges = tensor_place(self._config).vocabulary_rows
            sizes = [b - a for a, b in pairwise(edges)]
            unit = part.size(1) // sizes[self._tensor.rank()]
            most = unit * max(sizes)
            padded = part.new_zeros(len(part), most)
            padded[:, : part.size(1)] = part
            parts = [torch.empty_like(padded) for _ in range(width)]
            dist.all_gather(parts, padded, group=self._tensor)
            part = torch.cat([p[:, : unit * n] for p, n in zip(parts, sizes, strict=True)], 1)
        return part[:, : self._vocabulary] if self._tensor.rank() == 0 else None
