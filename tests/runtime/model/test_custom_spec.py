"""Parameters of a user's own layers, which the plan could not place."""

from __future__ import annotations

import pytest
import torch

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.runtime.model.custom_spec import check_marked


class Gate(torch.nn.Module):
    """A layer of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Sequential(Gate()))


def test_a_parameter_that_says_nothing_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"1\.0\.weight of Gate\n") as caught:
        check_marked([model()], 2)
    assert "LayerNorm" not in str(caught.value)


def test_one_device_divides_nothing() -> None:
    check_marked([model()], 1)


@pytest.mark.parametrize("is_divided", [False, True])
def test_a_mark_is_enough(is_divided: bool) -> None:
    marked = model()
    marked[1][0].weight.tensor_model_parallel = is_divided
    check_marked([marked], 2)
