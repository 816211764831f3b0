"""Times of the model's pieces on the GPUs of one stage, modelled or measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from itertools import batched
from typing import NamedTuple

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cost.network.experts import ExpertLinks, links_in_group
from megatron_hetero.cost.network.seconds import worst_link
from megatron_hetero.cost.work.compute import PassTimes, group_layer_times, slowest
from megatron_hetero.cost.work.context_parallel import merging_times, waiting_times
from megatron_hetero.cost.work.ends import joining_times
from megatron_hetero.cost.work.gauge import Modelled, gauged_group
from megatron_hetero.cost.work.group_ends import group_tied_s, modelled_end
from megatron_hetero.cost.work.launches import launching_times
from megatron_hetero.cost.work.profile import NO_STRETCH, PIECES, Piece, Profile
from megatron_hetero.cost.work.under_products import (
    Member,
    PartExchange,
    exchange_times,
    exchanged_bytes,
    layer_exchanges,
    parts_again,
)
from megatron_hetero.hashed import value
from megatron_hetero.model.recompute import recomputed
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
    part of the layer does not count).  `tied_s` is what the backward pass of a stage takes longer
    that holds both ends of a model with tied embeddings.  Of a model with layers of unlike kinds,
    `layer` and its communication are the mean of all of them, and `kinds` has the pieces of each
    kind (`ModelSpec.kinds`).
    """

    embedding: PassTimes
    layer: PassTimes
    head: PassTimes
    communication: PassTimes
    measured: bool
    kinds: tuple[PieceTimes, ...] = ()
    tied_s: float = 0.0
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
        if first and last:
            backward_s += self.tied_s
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
        tied_s=min(way.tied_s for way in ways),
    )


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
    # A single member of each kind: a group is as slow as its slowest.
    members = [*{(id(gpu), share): (gpu, share) for gpu, share in members}.values()]

    # Seconds of each piece by the model, and by the profile where it knows all members.
    def by_model(
        workload: Workload,
        piece: Piece,
        members: Sequence[Member],
        experts: ExpertLinks | None = None,
    ) -> Modelled:
        if piece == "decoder_layer":
            return modelled_layer(workload, members, link, experts)
        return modelled_end(workload, piece, members, link, vocab_rows)

    modelled = {piece: by_model(workload, piece, members, experts) for piece in PIECES}
    found = {
        piece: gauged_group(workload, profile, piece, members, by_model) if profile else None
        for piece in PIECES
    }
    is_measured = {piece for piece, gauged in found.items() if gauged and gauged.is_measured}
    # Measured pieces are of equal members without context parallelism.
    is_even = members[0][1].context_parallel == 1 and len({share for _, share in members}) == 1
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
        tied_s=stretch.backward * group_tied_s(workload, members, vocab_rows),
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
            price_pieces(workload, profile, own, link, vocab_rows, context_link)
            for own, link in zip(batched(members, width), links, strict=True)
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
        max(group.tied_s for group in groups),
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
    num_bytes = exchanged_bytes(workload, members)
    parts, again = list(layer_exchanges(workload, members, num_bytes, link)), parts_again(workload)
    share = members[0][1]
    if experts is None and model.num_experts and training.sequence_parallel:
        experts = links_in_group(link, share.width, is_dealt=bool(share.experts))
    if experts is not None:
        # The group's own exchange is that of attention, and of a shared expert.
        parts = parts if share.shared_columns else parts[:1]
        exchange_s = experts.pass_s(model, training, share.own_tokens(model, training))
        parts.append(PartExchange(*[exchange_s] * 3))
        again = *again[: len(parts) - 1], "moe" in recomputed(training)
    return Modelled(group_layer_times(workload, members), exchange_times(parts, again))
