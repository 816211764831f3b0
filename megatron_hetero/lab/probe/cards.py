"""Choice of a machine's cards for a probe: all cards of a single type.

Cards are named as in cluster.yaml and plans, by their places on the PCI bus, whatever numbers CUDA
gives them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_hetero.cluster.catalogue import gpu_type_names
from megatron_hetero.cluster.gpu_names import names_match
from megatron_hetero.errors import EnvironmentMismatchError, UsageError
from megatron_hetero.flags.environment import visible_devices_variable
from megatron_hetero.runtime.job.checks import bus


@dataclass(frozen=True)
class ProbedCard:
    """A card visible to torch.

    `place` is its number on the PCI bus, `name` the driver's, `word` what the variable of visible
    devices calls it for processes that have this one's environment.
    """

    place: int
    name: str
    word: str


def visible_cards() -> tuple[ProbedCard, ...]:
    """The cards that torch sees here, in the order of the bus; none without CUDA."""
    if not torch.cuda.is_available():
        return ()
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    # Words may be numbers or UUIDs; without the variable CUDA numbers the cards from 0.
    given = os.environ.get(_variable())
    words = given.split(",") if given else [str(i) for i in range(len(names))]
    return cards_of(names, words, bus.visible_bus_ids(), bus.machine_bus_ids())


def cards_of(
    names: Sequence[str], words: Sequence[str], bus_ids: Sequence[str], machine: Sequence[str]
) -> tuple[ProbedCard, ...]:
    """Number cards by the bus.

    Args:
        names, words: of each card, in CUDA's order.
        bus_ids: the same; empty where torch does not say them: CUDA's order has to do then.
        machine: bus ids of all cards of the machine, ascending; empty where nobody lists them: then
            the visible ones are numbered.
    """
    # Zero-padded numbers, so that sorting as text keeps CUDA's order.
    ids = list(bus_ids) or [f"{i:08}" for i in range(len(names))]
    among = machine if set(ids) <= set(machine) else sorted(ids)
    cards = [
        ProbedCard(among.index(own), name, word.strip())
        for own, name, word in zip(ids, names, words, strict=False)
    ]
    return tuple(sorted(cards, key=lambda card: card.place))


def chosen_cards(
    cards: Sequence[ProbedCard], gpu: str, places: Sequence[int] | None
) -> tuple[ProbedCard, ...]:
    """The cards to measure as type `gpu`: those at `places`, or those that are of it.

    A name of the catalogue has to be the driver's; a name that the user gave to a type of their own
    can be any card's, so that the cards have to be of one kind, or named; without cards it is the
    CPU's.

    Raises:
        UsageError: a place without a card, unlike cards, or nothing says which are meant.
        EnvironmentMismatchError: no card is of this type.
    """
    # By place, or by the driver's name of the type.
    is_known = gpu in gpu_type_names()
    # A name of the user's own fits every card; the checks below find unlike ones.
    if places is not None:
        chosen = cards_at(cards, places)
    else:
        chosen = tuple(c for c in cards if not is_known or names_match(gpu, c.name))
    # Times of a CPU under the name of a GPU would pass for this GPU's in every plan.
    if is_known and not cards:
        raise EnvironmentMismatchError(
            f"--gpu {gpu}: torch sees no GPU on this machine (`nvidia-smi` and "
            f"{_variable()} say whether it has one). Run probe on a machine with {gpu}, or plan "
            "without --profile. A name of your own measures this CPU: --gpu my-cpu."
        )
    if cards and not chosen:
        raise EnvironmentMismatchError(
            f"--gpu {gpu}: this machine has none; it has {_words(cards)}. Give the type of one of "
            "them, as cluster.yaml calls it."
        )
    # A known type must be the cards' own; an unknown one must mean cards of one kind.
    wrong = [c for c in chosen if is_known and not names_match(gpu, c.name)]
    if wrong:
        raise UsageError(f"--gpu {gpu}: {_words(wrong)} is another type; leave it out of --cards")
    if len({card.name for card in chosen}) > 1:
        raise UsageError(
            f"--gpu {gpu}: this machine has {_words(chosen)}, and a probe is of one type; say with "
            f"--cards which of them {gpu} is, for example --cards {chosen[0].place}"
        )
    return chosen


def cards_at(cards: Sequence[ProbedCard], places: Sequence[int]) -> tuple[ProbedCard, ...]:
    """The cards at these places of the bus.

    Raises:
        UsageError: there is none, or torch does not see it.
    """
    by_place = {card.place: card for card in cards}
    for place in places:
        if place not in by_place:
            there = f"{_words(cards)}" if cards else "no GPU that torch sees"
            raise UsageError(f"--cards {place}: this machine has {there}")
    return tuple(by_place[place] for place in places)


def only(cards: Sequence[ProbedCard]) -> Mapping[str, str]:
    """Return the variable that limits a process to these cards; nothing for no cards."""
    return {_variable(): ",".join(card.word for card in cards)} if cards else {}


def _variable() -> str:
    return visible_devices_variable("RCCL" if torch.version.hip else "NCCL")


def _words(cards: Sequence[ProbedCard]) -> str:
    return ", ".join(f"card {card.place} ({card.name})" for card in cards)
