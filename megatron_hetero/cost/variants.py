"""Price lists of a job under its own settings and under varied settings."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Self

from megatron_hetero.cluster.nodes import Device, GpuType, Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.memory.states import EVERY_DEVICE, StateHolders
from megatron_hetero.cost.placement import PlacedStage, Placement, Recompute
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.cost.work.stage_precision import precision_on
from megatron_hetero.model.spec import Workload
from megatron_hetero.model.training import Precision, TokenDispatcher


class Variants:
    """What prices are of; a price list under other settings is kept once it was asked for."""

    def __init__(self, cluster: Cluster, workload: Workload, profile: Profile | None = None):
        self.cluster = cluster
        self.workload = workload
        self.profile = profile
        self.holders = EVERY_DEVICE
        self.least_of_dealings = False
        """Whether each price is the least of experts divided and dealt out: no plan's, but none
        is below."""
        self._variants: dict[tuple[object, ...], Self] = {}
        # Lists of one cluster share the numbers of its nodes' kinds.
        self._kinds: dict[str, int] = {}
        self._kind_numbers: dict[tuple[object, ...], int] = {}
        self._forget()

    def _kind(self, node: Node) -> int:
        """Return equal for nodes on which a group has equal prices: the same GPUs, as many, and the
        same link between them."""
        found = self._kinds.get(node.name)
        if found is None:
            gpu, numbers = node.gpu_type, self._kind_numbers
            content = gpu.name, gpu.memory_bytes, node.num_gpus, node.link
            found = self._kinds[node.name] = numbers.setdefault(content, len(numbers))
        return found

    def _forget(self) -> None:
        """Drop what is known of prices; each list of prices has its own."""

    def _share(self, other: Self) -> None:
        """Keep what is known of prices together with a list that differs in the division of the
        optimizer's states alone."""

    def variant(
        self,
        *,
        micro_batch_size: int | None = None,
        recompute: Recompute | None = None,
        holders: StateHolders | None = None,
        precision: Precision | None = None,
    ) -> Self:
        """Return the price list of the same job under another micro-batch size (sequences),
        recompute, division of the optimizer's states, or precision beside others; None keeps the
        setting of this list."""
        training = self.workload.training
        # The settings that this list has, in the order of the key below.
        own = (
            training.micro_batch_size,
            training.recompute,
            training.precision,
            training.mixes_precisions,
            self.holders,
        )
        # Lists of one job share what is known; they differ in nothing else.
        key = (
            micro_batch_size or training.micro_batch_size,
            recompute or training.recompute,
            precision or training.precision,
            training.mixes_precisions or precision is not None,
            holders or self.holders,
        )
        if key == own:
            return self
        if key not in self._variants:
            # Only the changed settings are replaced; the copy shares the table of lists.
            size, kind, in_precision, mixes, made_holders = key
            changed = replace(
                training,
                micro_batch_size=size,
                recompute=kind,
                precision=in_precision,
                mixes_precisions=mixes,
            )
            made = copy(self)
            made.workload = replace(self.workload, training=changed)
            made.holders = made_holders
            made._forget()
            self._variants[key] = made
            # Whatever the holders, one list has what does not depend on them.
            self._variants.setdefault(("first", *own[:-1]), self)
            made._share(self._variants.setdefault(("first", *key[:-1]), made))
        return self._variants[key]

    def dispatched(self, dispatcher: TokenDispatcher) -> Self:
        """Return the price list of the same job with another dispatcher of tokens to experts."""
        training = self.workload.training
        if training.token_dispatcher == dispatcher:
            return self
        key = "dispatcher", dispatcher
        if key not in self._variants:
            # A dispatcher changes all lists of the job, so the copy starts a table of its own.
            made = copy(self)
            made.workload = replace(
                self.workload, training=replace(training, token_dispatcher=dispatcher)
            )
            made._variants = {}
            made._forget()
            self._variants[key] = made
        return self._variants[key]

    def on(self, gpus: Sequence[GpuType]) -> Self:
        """Return the price list in the precision of a group of these GPUs."""
        training = self.workload.training
        precision = precision_on(training, gpus)
        return self if precision == training.precision else self.variant(precision=precision)

    def of_stage(self, stage: PlacedStage) -> Self:
        """Return the price list in the precision of a stage."""
        if stage.precision is not None:
            return self.variant(precision=stage.precision)
        return self.on_devices(stage.devices)

    def own_precision(self, stage: PlacedStage) -> Precision | None:
        """Return the stage's precision if unlike the job's, else None."""
        precision = self.of_stage(stage).workload.training.precision
        return None if precision == self.workload.training.precision else precision

    def on_devices(self, devices: Sequence[Device]) -> Self:
        if not self.workload.training.mixes_precisions:
            return self
        return self.on([self.cluster.gpu_type(device) for device in devices])

    def of_least_layers(self) -> Self:
        """Return the price list for `ModelSpec.least`, which no bound may exceed; itself where all
        layers are alike.  Measured times of its profile are those of other layers, and left out."""
        least = self.workload.model.least
        if least is self.workload.model:
            return self
        made = copy(self)
        made.workload = replace(self.workload, model=least)
        made.profile = self.profile and self.profile.of_types
        made._variants = {}
        made._forget()
        return made

    def of_least_dealings(self) -> Self:
        """Return the price list with `least_of_dealings`, a limit to any bound where stages may
        deal out experts."""
        made = copy(self)
        made.least_of_dealings = True
        made._variants = {}
        made._forget()
        return made

    def sharded_as(self, placement: Placement) -> Self:
        """Return the price list with the dispatcher of `placement`, and with optimizer states
        divided as its replicas divide them; itself without either."""
        if placement.dispatcher is not None and placement.dispatcher != (
            self.workload.training.token_dispatcher
        ):
            # First the dispatcher, then the states under that dispatcher.
            own = self.dispatched(placement.dispatcher)
            return own.sharded_as(placement)
        if not self.workload.training.use_distributed_optimizer:
            return self
        return self.variant(
            # Every replica holds each layer once; a tied embedding lies on the first and the last
            # stage.
            holders=StateHolders(
                len(placement.replicas), sum(min(len(r.stages), 2) for r in placement.replicas)
            )
        )

    def sharded_among(self, num_replicas: int) -> Self:
        """Return the price list for `num_replicas` replicas of unknown depth: the states of a tied
        embedding are divided among as many stages as can hold it."""
        if not self.workload.training.use_distributed_optimizer:
            return self
        return self.variant(holders=StateHolders(num_replicas, 2 * num_replicas))
