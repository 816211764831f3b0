"""The order in which parameters lie in memory, bucket by bucket."""

from __future__ import annotations

import torch

from megatron_hetero.runtime.gradients.memory import bucket_order


def test_buckets_of_whole_parameters_are_adjacent_and_cut_parameters_follow() -> None:
    """A parameter in several buckets has the place of its first slice among those that are cut."""
    late, norm, early, bias, frozen = (torch.nn.Parameter(torch.zeros(2)) for _ in range(5))
    # `norm` and `bias` are whole in the second bucket; the others are cut into two.
    buckets = [[late, early, early], [norm, bias], [early, late]]
    order = sorted([frozen, early, late, bias, norm], key=bucket_order(buckets))
    found = [next(i for i, p in enumerate(order) if p is each) for each in (norm, bias)]
    assert found == [0, 1]
    cut = [p for p in order if p is late or p is early]
    assert cut[0] is late and cut[1] is early


def test_two_slices_in_one_bucket_are_no_cut() -> None:
    """A wide replica's edges cut a parameter whose slices have the same holders here."""
    whole, cut = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    key = bucket_order([[cut], [cut, whole, whole]])
    assert key(whole) == (False, (1, 1)) and key(cut) == (True, (0, 0))
