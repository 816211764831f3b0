"""The CPU bridge: complete while it is on, without a trace when it is off, never beside CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random as megatron_random

from megatron_hetero.errors import EnvironmentMismatchError
from megatron_hetero.runtime import backend
from tests.runtime.toy_model import in_world


@pytest.fixture(autouse=True)
def _off_at_first() -> None:
    """Another test of the process may have parsed a job, which switches the bridge on for good."""
    backend.deactivate_cpu_backend()


def snapshot() -> list[object]:
    return [
        getattr(owner, name) for owner, name, _ in backend._replacements(backend._CudaMeansCpu())
    ]


def test_it_leaves_nothing_behind() -> None:
    before = snapshot()
    with backend.cpu_backend():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert snapshot() == before
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")


def test_it_refuses_to_be_switched_on_beside_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    before = snapshot()
    with pytest.raises(EnvironmentMismatchError, match="2 CUDA device"):
        backend.activate_cpu_backend()
    assert backend.cuda_is_usable()
    assert snapshot() == before


def test_cuda_devices_mean_the_cpu() -> None:
    with backend.cpu_backend():
        tensor = torch.ones(3).cuda()
        for moved in (
            tensor,
            tensor.to("cuda"),
            tensor.to(torch.device("cuda", 0)),
            torch.tensor([1.0], device="cuda:0"),
            torch.empty(1, device=torch.cuda.current_device()),
            torch.nn.Linear(2, 2).cuda().weight,
        ):
            assert moved.device.type == "cpu"
        assert tensor.type() == "torch.cuda.FloatTensor"
        assert tensor.type(torch.float64).dtype is torch.float64
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.synchronize()


def test_memory_is_not_pinned() -> None:
    with backend.cpu_backend():
        assert torch.tensor([1, 2], device="cpu", pin_memory=True).cuda().tolist() == [1, 2]


def test_the_allocator_counts_nothing_under_every_name() -> None:
    """`--log-memory-to-tensorboard` reads counts by name."""
    with backend.cpu_backend():
        assert torch.cuda.memory_stats()["reserved_bytes.all.current"] == 0


def test_arithmetic_is_untouched() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
    plain = torch.tanh(x @ w).sum()
    plain.backward()
    gradient = w.grad.clone()
    w.grad = None
    with backend.cpu_backend():
        bridged = torch.tanh(x @ w).sum()
        bridged.backward()
    assert torch.equal(plain, bridged) and torch.equal(gradient, w.grad)


def test_each_random_state_has_its_own_stream() -> None:
    """Dropout inside and outside tensor-parallel regions must not draw from one stream."""
    with backend.cpu_backend():
        tracker = megatron_random.CudaRNGStatesTracker()
        torch.manual_seed(5)
        tracker.add("a", 1)
        tracker.add("b", 2)
        outside = torch.rand(4)
        with tracker.fork("a"):
            first = torch.rand(4)
        with tracker.fork("b"):
            other = torch.rand(4)
        with tracker.fork("a"):
            second = torch.rand(4)
        torch.manual_seed(5)
        assert torch.equal(torch.rand(4), outside)
        generator = torch.Generator().manual_seed(1)
        assert torch.equal(torch.rand(4, generator=generator), first)
        assert torch.equal(torch.rand(4, generator=generator), second)
        assert not torch.equal(first, other)


class _Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index], device="cuda")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_loader_neither_fails_nor_moves_the_random_state(num_workers: int) -> None:
    """One rank of a tensor-parallel group reads data, and all of them have to drop out alike."""
    with backend.cpu_backend():
        before = torch.cuda.get_rng_state()
        loader = torch.utils.data.DataLoader(
            _Numbers(), batch_size=2, num_workers=num_workers, pin_memory=True
        )
        assert [batch.view(-1).tolist() for batch in loader] == [[0, 1], [2, 3]]
        assert torch.equal(torch.cuda.get_rng_state(), before)


def test_parts_of_unlike_lengths_are_gathered_as_nccl_does(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        with backend.cpu_backend():
            for rows in ((3, 1), (0, 2), (2, 2)):
                for shape in ((), (4,)):
                    seed = torch.Generator().manual_seed(7)
                    whole = torch.rand(sum(rows), *shape, generator=seed)
                    found = torch.full_like(whole, -1.0)
                    dist.all_gather(list(found.split(rows)), whole.split(rows)[rank].clone())
                    assert torch.equal(found, whole), (rows, shape, found)

    in_world("tp1:1 @1 | tp1:1 @1", check, tmp_path)
