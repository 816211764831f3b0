"""Times of the model's pieces on the GPUs of one stage, modelled or measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import NamedTuple

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.network.collectives import end_exchanges
from megatron_hetero.cost.network.experts import ExpertLinks
from megatron_hetero.cost.network.seconds import worst_link
from megatron_hetero.cost.share import TensorShare
from megatron_hetero.cost.work.compute import PassTimes, group_layer_times, slowest
from megatron_hetero.cost.work.context_parallel import merging_times, waiting_times
from megatron_hetero.cost.work.ends import embedding_times, head_times, joining_times
from megatron_hetero.cost.work.gauge import Gauged, Modelled, gauged_times
from megatron_hetero.cost.work.launches import launching_times
from megatron_hetero.cost.work.profile import NO_STRETCH, PIECES, Piece, Profile
from megatron_hetero.cost.work.under_products import (
    Member,
    PartExchange,
    exchange_times,
    head_exchange_s,
    layer_exchanges,
)
from megatron_hetero.hashed import value
from megatron_hetero.model.spec import Workload


class PieceSource(NamedTuple):
    """Parts that prices of pieces were made of, from which `cost.causes` tells what takes the time.

    `times` and `communication` have each piece as it is before a profile's stretch, the head
    without further tokens; `gauged` names the pieces whose time rests on a profile.
    """

    workload: Workload
    members: tuple[Member, ...]
    vocab_rows: int
    times: Mapping[Piece, PassTimes]
    communication: Mapping[Piece, PassTimes]
    gauged: frozenset[Piece]


@value(frozen=True)
class PieceTimes:
    """Embedding, decoder layer and head at a given width, communication in the stage included.

    The head includes the layers that predict further tokens.

    No pass is shorter than the host needs to launch it (`cost.work.launches`), unless it was
    measured.  `communication` is the part of `layer` that is communication (what was measured as
    part of the layer does not count).  Of a model with layers of unlike kinds, `layer` and its
    communication are the mean of all of them, and `kinds` has the pieces of each kind
    (`ModelSpec.kinds`).
    """

    embedding: PassTimes
    layer: PassTimes
    head: PassTimes
    communication: PassTimes
    measured: bool
    kinds: tuple[PieceTimes, ...] = ()
    source: PieceSource | None = field(default=None, compare=False, repr=False)

    def with_layers(self, counts: Sequence[int]) -> PieceTimes:
        """Return the pieces of a stage with so many layers of each kind: `layer` is their mean."""
        if not self.kinds:
            return self
        # A mean, because `stage` multiplies one layer's times by their number.
        total = sum(counts)

        def mean(times: Sequence[PassTimes]) -> PassTimes:
            return PassTimes(
                sum(n * t.forward_s for n, t in zip(counts, times, strict=True)) / total,
                sum(n * t.backward_s for n, t in zip(counts, times, strict=True)) / total,
            )

        return replace(
            self,
            layer=mean([kind.layer for kind in self.kinds]),
            communication=mean([kind.communication for kind in self.kinds]),
        )

    def stage(self, num_layers: int, first: bool, last: bool) -> PassTimes:
        """Sum the times of `num_layers` layers and of the ends of the model that the stage
        holds.

        Args:
            num_layers: of the stage.
            first, last: whether the stage holds the embedding, the head.
        """
        # One object in place of three: a search asks for this all the time.
        forward_s = self.layer.forward_s * num_layers
        backward_s = self.layer.backward_s * num_layers
        for end in (self.embedding,) * first + (self.head,) * last:
            forward_s += end.forward_s
            backward_s += end.backward_s
        return PassTimes(forward_s, backward_s)


def least_pieces(ways: Sequence[PieceTimes]) -> PieceTimes:
    """Return the least time of each pass of each piece; itself of one."""
    first, *others = ways
    if not others:
        return first

    def least(times: Sequence[PassTimes]) -> PassTimes:
        return PassTimes(min(t.forward_s for t in times), min(t.backward_s for t in times))

    return replace(
        first,
        embedding=least([way.embedding for way in ways]),
        layer=least([way.layer for way in ways]),
        head=least([way.head for way in ways]),
        communication=least([way.communication for way in ways]),
    )


def activation_bytes(workload: Workload) -> int:
    """Return the bytes of a micro-batch's tensor across a stage boundary."""
    model, training = workload.model, workload.training
    tokens = training.micro_batch_size * model.seq_length
    return tokens * model.hidden_size * training.residual_bytes


def price_pieces(
    workload: Workload,
    profile: Profile | None,
    members: Sequence[Member],
    link: Link,
    vocab_rows: int,
    context_link: Link | None = None,
    experts: ExpertLinks | None = None,
) -> PieceTimes:
    """Time the model's pieces on the GPUs of a stage.

    Args:
        members: type and share of each GPU, in rank order: of one group, or of groups that have
            equal parts of each sequence.
        link: the slowest of a tensor-parallel group.
        context_link: the slowest among GPUs that hold the same, and other parts of sequences.
        experts: links of experts that are dealt out over replicas.
    """
    model = workload.model
    if model.kinds:
        # Measured layers are all of one kind.
        kinds = tuple(
            price_pieces(
                replace(workload, model=kind),
                profile and profile.of_types,
                [(gpu, share.of_kind(i)) for gpu, share in members],
                link,
                vocab_rows,
                context_link,
                experts if kind.num_experts else None,
            )
            for i, kind in enumerate(model.kinds)
        )
        counts = model.kind_counts(0, model.num_layers)
        # Further tokens are predicted by layers like the last one.
        head = kinds[model.kind_of(model.num_layers - 1)].head
        return replace(kinds[0], kinds=kinds, head=head).with_layers(counts)
    members = _unlike(members)
    # Seconds of each piece by the model, and by the profile where it knows all members.
    context = members[0][1].context_parallel
    modelled = {
        piece: _modelled(workload, piece, members, link, vocab_rows, experts) for piece in PIECES
    }
    found = {
        piece: _gauged(workload, profile, piece, members, link, vocab_rows) for piece in PIECES
    }
    is_measured = {piece for piece, gauged in found.items() if gauged and gauged.is_measured}
    # Measured pieces are of equal members without context parallelism.
    is_even = context == 1 and len({share for _, share in members}) == 1
    exchange = waiting_times(workload, members, context_link)
    times = {
        piece: modelled[piece].total if (gauged := found[piece]) is None else gauged.times
        for piece in PIECES
    }
    times["decoder_layer"] += exchange + merging_times(workload, members)
    # What was measured includes the host's launches.
    for piece in set(PIECES) - is_measured:
        times[piece] = slowest([times[piece], launching_times(workload, profile, piece, members)])
    # Seen in a job: all pieces take so much longer.
    stretch = profile.stretch(gpu.name for gpu, _ in members) if profile else NO_STRETCH
    apart = PassTimes(0.0, 0.0)
    # What was measured has its communication in it.
    if "decoder_layer" not in is_measured:
        apart = modelled["decoder_layer"].communication
    layer, head = times["decoder_layer"], times["head"]
    # Each further token: an embedding, a joining, a layer and a head on the last stage.
    if model.mtp_num_layers:
        tokens = members[0][1].num_tokens(model, workload.training)
        joining = slowest(
            [joining_times(workload, gpu, s.width, None, tokens) for gpu, s in members]
        )
        further = times["embedding"] + layer + head + joining
        head += further.times(model.mtp_num_layers)
    return PieceTimes(
        stretch.of(times["embedding"]),
        stretch.of(layer),
        stretch.of(head),
        stretch.of(apart + exchange),
        is_even and is_measured == set(PIECES),
        source=PieceSource(
            workload,
            tuple(members),
            vocab_rows,
            times,
            {
                "embedding": modelled["embedding"].communication,
                "decoder_layer": modelled["decoder_layer"].communication + exchange,
                "head": modelled["head"].communication,
            },
            frozenset(piece for piece in PIECES if found[piece] is not None),
        ),
    )


def _unlike(members: Sequence[Member]) -> Sequence[Member]:
    """Keep a single member of each kind: a group is as slow as its slowest."""
    return [*{(id(gpu), share): (gpu, share) for gpu, share in members}.values()]


def price_groups(
    workload: Workload,
    profile: Profile | None,
    members: Sequence[Member],
    links: Sequence[Link],
    vocab_rows: int,
    context_link: Link,
    experts: ExpertLinks | None = None,
) -> PieceTimes:
    """Time the model's pieces on all groups of a stage, which wait for each other's keys and values
    in every layer.

    Args:
        members: as in `price_pieces`, of all groups.
        links: the slowest of each tensor-parallel group.
        context_link, experts: as in `price_pieces`.
    """
    # Groups with equal parts of sequences are priced as one, over the slowest of their links.
    width, is_equal = members[0][1].width, members[0][1].context_shares is None
    if is_equal:
        link = worst_link(links)
        return price_pieces(workload, profile, members, link, vocab_rows, context_link, experts)
    return _slowest_pieces(
        [
            price_pieces(
                workload,
                profile,
                members[rank * width : (rank + 1) * width],
                link,
                vocab_rows,
                context_link,
            )
            for rank, link in enumerate(links)
        ]
    )


def _slowest_pieces(groups: Sequence[PieceTimes]) -> PieceTimes:
    return PieceTimes(
        slowest([group.embedding for group in groups]),
        slowest([group.layer for group in groups]),
        slowest([group.head for group in groups]),
        max(groups, key=lambda group: group.layer.total_s).communication,
        all(group.measured for group in groups),
        tuple(_slowest_pieces(kinds) for kinds in zip(*[g.kinds for g in groups], strict=True)),
        max(groups, key=lambda group: group.layer.total_s).source,
    )


def modelled_layer(
    workload: Workload, members: Sequence[Member], link: Link, experts: ExpertLinks | None = None
) -> Modelled:
    """Time a decoder layer by the analytic model, without context parallelism; of a model with
    layers of unlike kinds, a layer of one kind.

    Args:
        members, link, experts: as in `price_pieces`.
    """
    model, training = workload.model, workload.training
    _, _, num_bytes = _exchanged(workload, members)
    parts = list(layer_exchanges(workload, members, num_bytes, link))
    if experts is not None:
        # The group's own exchange is that of attention, and of a shared expert.
        if not members[0][1].shared_columns:
            parts.pop()
        exchange_s = experts.pass_s(model, training, members[0][1].own_tokens(model, training))
        parts.append(PartExchange(exchange_s, exchange_s, exchange_s))
    return Modelled(group_layer_times(workload, members), exchange_times(parts, training.recompute))


def _exchanged(workload: Workload, members: Sequence[Member]) -> tuple[int, int, float]:
    """Return the width of a group, its tokens of a micro-batch and the bytes of their tensor."""
    model, training = workload.model, workload.training
    # Tokens of one group; all members see the same ones.
    width, num_tokens = members[0][1].width, members[0][1].num_tokens(model, training)
    # Groups exchange what products take and give, whatever the residuals are in.
    return width, num_tokens, float(num_tokens * model.hidden_size * training.element_bytes)


def _modelled(
    workload: Workload,
    piece: Piece,
    members: Sequence[Member],
    link: Link,
    vocab_rows: int,
    experts: ExpertLinks | None = None,
) -> Modelled:
    """Time a piece by the analytic model."""
    if piece == "decoder_layer":
        return modelled_layer(workload, members, link, experts)
    model, training = workload.model, workload.training
    width, num_tokens, num_bytes = _exchanged(workload, members)
    # Each member prices a vocabulary of which an even share is what it holds.
    of = embedding_times if piece == "embedding" else head_times
    computing = slowest(
        [
            of(workload, gpu, width, share.rows_as_if_even(model, vocab_rows), None, num_tokens)
            for gpu, share in members
        ]
    )
    if width == 1:
        return Modelled(computing, PassTimes(0.0, 0.0))
    ends = num_bytes, width, link, training.sequence_parallel, num_tokens
    embedding_s, head_s = end_exchanges(*ends)
    if piece == "embedding":
        return Modelled(computing, PassTimes(embedding_s, 0.0))
    backward_s = head_exchange_s(workload, members, num_bytes, link, vocab_rows)
    return Modelled(computing, PassTimes(head_s, backward_s))


def _gauged(
    workload: Workload,
    profile: Profile | None,
    piece: Piece,
    members: Sequence[Member],
    link: Link,
    vocab_rows: int,
) -> Gauged | None:
    """Time a piece by the profile, where it knows every GPU of the group: as its slowest member."""
    if profile is None:
        return None
    found = []
    for gpu, share in members:

        def model(
            workload: Workload, piece: Piece, share: TensorShare, gpu: GpuType = gpu
        ) -> Modelled:
            return _modelled(workload, piece, [(gpu, share)], link, vocab_rows)

        gauged = gauged_times(workload, profile, gpu.name, share, piece, model)
        # One member without a measurement leaves the whole group to the model.
        if gauged is None:
            return None
        found.append(gauged)
    return Gauged(slowest([g.times for g in found]), all(g.is_measured for g in found))
