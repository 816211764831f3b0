"""Layers whose weights, gradients and optimizer's state are divided among the replicas (ZeRO-3).

A rank keeps the rows of a layer that it owns, and the optimizer's state of these. Before each pass
of the layer all of its holders gather its weights; after the pass the whole weights are given back,
storage and all. Behind a backward pass the gradients go to the owners, which add them up over the
micro-batches. Slices, buckets and owners are those of the gradient sync, so replicas may differ in
width, in shares and in what part they own.

With `--overlap-param-gather` the weights of the next layer of a pass travel while a layer computes,
and its gradients while the next one does (`ShardedLayer.before`, `after`).

All holders come to the passes of a layer in one order (`plan.checks.sharding`). A replica of one
stage that has fewer micro-batches than others gives its parts for theirs as well (`idle_rounds`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from megatron_hetero.runtime.gradients.memory import bucket_order
from megatron_hetero.runtime.gradients.sharding.ddp_hooks import is_hidden, layers_of
from megatron_hetero.runtime.gradients.sharding.optimizer_shards import Rows
from megatron_hetero.runtime.gradients.sharding.sharded_buckets import Sent, ShardedBucket

_FUSED_GRADIENTS = ("gradient_accumulation_fusion", "fuse_wgrad_accumulation")
"""Attributes of modules that write weight gradients straight to `main_grad`; a sharded weight has
`main_grad` in the backward pass alone."""


class ShardedLayer:
    """One layer: its weights are whole from before a pass until after it, and not in between.

    `before` and `after` are its neighbours in a forward pass where exchanges travel while layers
    compute: what the next one needs is asked for before a layer computes. All holders do so in one
    order. None: nothing travels meanwhile, or there is no such layer.
    """

    def __init__(
        self, module: torch.nn.Module, buckets: Sequence[ShardedBucket], weight: float
    ) -> None:
        self.buckets = tuple(buckets)
        self._weight = weight
        self.parameters = [p for p in module.parameters() if is_hidden(p)]
        # Buckets of whole parameters are ranges of the layer's memory, and need no copies.
        of_slices = [
            [each.views.parameter(Rows(piece, 0, 0)) for piece in each.views.slices]
            for each in self.buckets
        ]
        self.parameters.sort(key=bucket_order(of_slices))
        # One flat tensor for all, so that one call frees or makes the layer's weights.
        self._flat = torch.cat([p.data.reshape(-1) for p in self.parameters])
        for parameter, part in zip(self.parameters, self._parts(self._flat), strict=True):
            parameter.data = part
        self._num_bytes = self._flat.untyped_storage().nbytes()
        self.is_whole = True
        # Neighbours in the order of the passes, and exchanges under way.
        self.before: ShardedLayer | None = None
        self.after: ShardedLayer | None = None
        self._arriving: list[Callable[[], None]] = []
        self._sent: list[tuple[ShardedBucket, Sent]] = []
        self._gradients: torch.Tensor | None = None
        for bucket in self.buckets:
            bucket.arrange()
        # Fused kernels would write to a `main_grad` that is not there.
        for each in module.modules():
            for name in _FUSED_GRADIENTS:
                if hasattr(each, name):
                    setattr(each, name, False)
        # Gradients are taken when complete, weights gathered before each pass and freed after it.
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(_accumulate)
        module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        module.register_forward_hook(self._after_forward)

    def _parts(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        offset = 0
        for parameter in self.parameters:
            yield flat[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()

    @torch.no_grad()
    def ask(self) -> None:
        """Start to gather the weights, unless they are whole or asked for."""
        if self.is_whole or self._arriving:
            return
        # The tensor stays, and the parameters stay views of it: only the storage comes and goes.
        self._flat.untyped_storage().resize_(self._num_bytes)
        self._arriving = [bucket.gather_weights() for bucket in self.buckets]

    def gather(self) -> None:
        """Make the weights whole; nothing to do where they are."""
        self.ask()
        for finish in self._arriving:
            finish()
        self._arriving = []
        self.is_whole = True

    def begin(self, *, backward: bool) -> None:
        """Make the weights whole, and ask for the weights of the pass's next layer."""
        self.gather()
        following = self.before if backward else self.after
        if following is not None:
            following.ask()

    def release(self) -> None:
        """Give back the memory of the whole weights."""
        self._flat.untyped_storage().resize_(0)
        self.is_whole = False

    def begin_backward(self) -> None:
        """Prepare for a backward pass: whole weights, and gradients of zero."""
        self.begin(backward=True)
        self.allocate_gradients()

    def allocate_gradients(self) -> None:
        """Give the weights gradients of zero."""
        # Gradients of one micro-batch, flat, in the order of the weights.
        kind = self.buckets[0].gradient_type(self._flat.dtype)
        self._gradients = self._flat.new_zeros(sum(p.numel() for p in self.parameters), dtype=kind)
        for parameter, part in zip(self.parameters, self._parts(self._gradients), strict=True):
            parameter.main_grad = part

    def drop_gradients(self) -> None:
        """Drop the gradients of a backward pass."""
        self._gradients = None
        for parameter in self.parameters:
            parameter.main_grad = None

    @torch.no_grad()
    def end_backward(self) -> None:
        """Drop the weights, and send the gradients of a backward pass to their owners.

        If a layer of this rank comes before this one, that layer's `end_backward` adds the parts
        up; else they are added up here.
        """
        self.release()
        # The pass has left the layer behind this one, whose gradients travelled meanwhile.
        if self.after is not None:
            self.after.add_gradients()
        self._sent = [(each, each.send(self._weight, self._gradients)) for each in self.buckets]
        self.drop_gradients()
        # No layer of this rank follows in the pass, or nothing travels meanwhile.
        if self.before is None:
            self.add_gradients()

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Wait for the gradients sent to the owners, and add the parts up."""
        for bucket, sent in self._sent:
            bucket.add(sent)
        self._sent = []

    def _before_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # A recomputed forward pass runs inside a backward pass, which goes on to the layer before.
        self.begin(backward=_is_in_backward())
        # Validation, or the first pass of a recomputed layer: no backward pass begins here.
        if not torch.is_grad_enabled():
            return None
        # Megatron's block passes the hidden states by name, other callers by place.
        if "hidden_states" in kwargs:
            hidden = _EndOfBackward.apply(kwargs["hidden_states"], self)
            return args, {**kwargs, "hidden_states": hidden}
        return (_EndOfBackward.apply(args[0], self), *args[1:]), kwargs

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            hidden = output[0] if isinstance(output, tuple) else output
            # The gradient of the output comes right before the layer's own backward pass.
            hidden.register_hook(lambda gradient: self.begin_backward())
            if _is_in_backward():
                return  # recomputed, and the backward pass goes on with this layer
        self.release()


def _is_in_backward() -> bool:
    # Number of the autograd engine's task on this thread; -1 outside of any backward pass.
    return bool(torch._C._current_graph_task_id() != -1)


class _EndOfBackward(torch.autograd.Function):
    """The identity at a layer's input; its backward pass comes when the layer's own is done."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, layer: ShardedLayer) -> torch.Tensor:
        ctx.layer = layer
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.layer.end_backward()
        return gradients[0], None


def _accumulate(parameter: torch.Tensor) -> None:
    """Add a gradient to `main_grad`, as Megatron's DDP does."""
    parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
    parameter.grad = None


class ShardedLayers:
    """All sharded layers of one rank, in the order of a forward pass.

    Args:
        model: the rank's chunks.
        buckets: number of a layer -> its buckets.
        weight: of this rank's gradients.
        overlaps: exchanges travel while other layers compute (`--overlap-param-gather`).
    """

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        buckets: Mapping[int, Sequence[ShardedBucket]],
        weight: float,
        *,
        overlaps: bool = False,
    ) -> None:
        self.layers = [
            ShardedLayer(module, buckets[number], weight)
            for number, module in layers_of(model)
            if number in buckets
        ]
        self.parameters = {p for layer in self.layers for p in layer.parameters}
        # Neighbours that know each other ask ahead; without overlap each layer gathers by itself.
        for one, other in pairwise(self.layers) if overlaps else ():
            one.after, other.before = other, one

    def __bool__(self) -> bool:
        return bool(self.layers)

    @property
    def buckets(self) -> Iterator[ShardedBucket]:
        """Yield the buckets of all layers."""
        for layer in self.layers:
            yield from layer.buckets

    def make_whole(self) -> None:
        """Gather all weights, for readers outside of the passes. Collective."""
        for layer in self.layers:
            layer.gather()

    def release(self) -> None:
        """Give back all whole weights: those that the owners keep have changed."""
        for layer in self.layers:
            layer.release()

    def take_weights(self) -> None:
        """Take the owned rows out of whole weights written elsewhere."""
        for bucket in self.buckets:
            bucket.take_weights()

    def gather_gradients(self) -> None:
        """Gather the sums of gradients into `main_grad`, for readers of all gradients. Collective.
        """
        for layer in self.layers:
            layer.allocate_gradients()
            for bucket in layer.buckets:
                bucket.gather_gradients()

    def zero_gradients(self) -> None:
        """Begin a step."""
        for layer in self.layers:
            layer.drop_gradients()
        for bucket in self.buckets:
            bucket.gradients.zero_()

    def idle_rounds(self, number: int, *, forward_only: bool) -> None:
        """Give this rank's parts for the micro-batches that only longer replicas have.

        Args:
            number: of such micro-batches.
            forward_only: nobody runs backward passes.
        """
        for _ in range(number):
            # A forward pass: the gathers of others find this rank's rows.
            for layer in self.layers:
                layer.begin(backward=False)
                layer.release()
            # A backward pass: gather once more, then send gradients that add nothing.
            for layer in [] if forward_only else reversed(self.layers):
                layer.begin(backward=True)
                layer.end_backward()
