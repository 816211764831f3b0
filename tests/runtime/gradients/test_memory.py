"""The order in which parameters lie in memory, bucket by bucket."""

from __future__ import annotations

import random

import pytest
import torch

from megatron_hetero.runtime.gradients.memory import bucket_order, joined


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


@pytest.mark.parametrize("seed", range(20))
def test_views_that_follow_each_other_are_joined(seed: int) -> None:
    """Each element of the views is in the joined ones, in order, and none that is in no view."""
    draw = random.Random(seed)
    buffers = [torch.arange(60.0) + 100 * number for number in range(2)]
    views: list[torch.Tensor] = []
    num_gaps = 0
    for buffer in buffers:
        start = 0
        while start < 50:
            rows = draw.randrange(1, 4)
            whole = buffer[start : start + 3 * rows].view(rows, 3)
            start += 3 * rows
            kind = draw.choice(["whole", "whole", "columns", "none"])
            num_gaps += kind != "whole"
            if kind != "none":
                views.append(whole if kind == "whole" else whole[:, 1:])
    found = joined(views)
    flat, expected = (torch.cat([v.reshape(-1) for v in of]) for of in (found, views))
    assert flat.equal(expected)
    # Gaps and the end of a storage part the joined views, and nothing else does.
    assert len(found) <= 2 * num_gaps + len(buffers)
    # They are views of the same memory.
    for view in found:
        view.zero_()
    assert all(not view.any() for view in views)


def test_a_rank_checks_its_local_gradients_at_once() -> None:
    """Slices in the order of the backward pass are one range of memory, wherever they begin."""
    buffer = torch.zeros(12)
    views = [buffer[8:12].view(2, 2), buffer[4:8].view(2, 2)[:1], buffer[4:8].view(2, 2)[1:]]
    (run,) = joined(sorted(views, key=torch.Tensor.data_ptr))
    assert run.shape == (8,) and run.storage_offset() == 4
