"""Actions of each holder in an exchange, round by round, and a check that all holders finish."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_hetero.exchange.plan import ExchangePlan, Transfer


@dataclass
class HolderRound:
    """Transfers of a holder in a round, all under way at once."""

    number: int
    sends: list[Transfer] = field(default_factory=list)
    receives: list[Transfer] = field(default_factory=list)


class _ByNumber(dict[int, HolderRound]):
    """Rounds of a holder by number, each made where it is first asked for."""

    def __missing__(self, number: int) -> HolderRound:
        made = self[number] = HolderRound(number)
        return made


def programmes(plan: ExchangePlan) -> tuple[tuple[HolderRound, ...], ...]:
    """Return [holder] -> the holder's rounds, in order.

    Args:
        plan: one whose chunks are written out, or which has one.
    """
    found = [_ByNumber() for _ in range(plan.num_holders)]
    for transfer in plan.transfers():
        number = transfer.round
        found[transfer.source][number].sends.append(transfer)
        found[transfer.destination][number].receives.append(transfer)
    return tuple(tuple(own.values()) for own in found)


def stuck(of_holders: Sequence[Sequence[HolderRound]]) -> Mapping[int, int]:
    """Run the rounds of all holders; a holder leaves a round when both ends of all transfers are
    there.

    Returns:
        holder -> the round in which it waits for ever; empty where all come to their end.
    """
    # Each holder: its place in its rounds, and the transfers of the round that miss an end.
    at = [-1] * len(of_holders)
    left = [0] * len(of_holders)
    num_come: Counter[Transfer] = Counter()
    ready = list(range(len(of_holders)))
    # A holder that enters a round is one end of all its transfers.
    while ready:
        holder = ready.pop()
        at[holder] += 1
        # A holder at the end of its rounds waits for nobody.
        if at[holder] == len(of_holders[holder]):
            continue
        own = of_holders[holder][at[holder]]
        transfers = [*own.sends, *own.receives]
        left[holder] = len(transfers)
        for transfer in transfers:
            num_come[transfer] += 1
            # With both ends there, the transfer leaves both of them.
            if num_come[transfer] == 2:
                for end in (transfer.source, transfer.destination):
                    left[end] -= 1
                    if not left[end]:
                        ready.append(end)
    # A holder that never left a round has no place past its last round.
    return {
        holder: of_holders[holder][place].number
        for holder, place in enumerate(at)
        if place < len(of_holders[holder])
    }
