"""The order of choices of bundles learns from those that are priced."""

from __future__ import annotations

from megatron_hetero.planner.columns.choice_prices import ChoicePrices
from megatron_hetero.planner.columns.site_mixes import QuickStep


def test_the_order_of_divisions_learns_from_prices() -> None:
    """Two divisions with much exchange and one with little: once it is known that exchanges take a
    tenth of what was estimated, pipelines decide."""
    prices = ChoicePrices.__new__(ChoicePrices)
    much, little = (("much", ()),), (("little", ()),)
    prices.found = {much: QuickStep(1.0, 1.0), little: QuickStep(1.5, 0.1)}  # type: ignore[dict-item]
    prices._exchange, prices._pipelines = [], ([], [])
    assert prices.soonest([much, little]) == 1  # type: ignore[list-item]
    prices._exchange.append(0.1)
    assert prices.soonest([much, little]) == 0  # type: ignore[list-item]
    # Equal bundles were estimated too well: that counts for both, which are neither mixed.
    prices._pipelines[0].append(3.0)
    assert prices.soonest([much, little]) == 0  # type: ignore[list-item]
