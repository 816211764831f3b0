"""Traffic of the loss is that of Megatron's own operations, and what a card took is as priced."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_hetero.cost.memory.ends import head_activation_bytes
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.work.ends import cross_entropy_times
from megatron_hetero.files import read_json
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.training import FusedLoss
from tests.cost.builders import FAST, make_workload
from tests.runtime.toy_model import in_world

ROWS, COLUMNS = 8, 512


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations on whole logits read and write."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A view moves nothing; an index touches one logit of each row.
        if func.is_view or any(word in func.name() for word in ("index", "empty", "detach")):
            return result
        outputs = result if isinstance(result, tuple) else (result,)
        tensors = [each for each in (*args, *outputs) if isinstance(each, torch.Tensor)]
        # What works in place is an argument and a result: read and written.
        self.num_bytes += sum(t.nbytes for t in tensors if t.numel() == ROWS * COLUMNS)
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_loss_moves_what_megatrons_operations_move(dtype: torch.dtype, tmp_path: Path) -> None:
    def check(rank: int) -> None:
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        logits = torch.randn(ROWS, 1, COLUMNS, dtype=dtype, requires_grad=True)
        target = torch.randint(0, COLUMNS, (ROWS, 1))
        with Traffic() as forward:
            group = torch.distributed.group.WORLD
            loss = vocab_parallel_cross_entropy(logits, target, tp_group=group).sum()
        with Traffic() as backward:
            torch.autograd.grad(loss, logits)
        # A byte a second, whatever the kernel: the times are the bytes.
        speed = _speed()
        counted = cross_entropy_times(ROWS * COLUMNS, speed, dtype.itemsize)
        moved = forward.num_bytes, backward.num_bytes
        assert moved == (counted.forward_s, counted.backward_s)

    in_world("tp1:1 @1", check, tmp_path)


@pytest.mark.parametrize(
    ("fused", "forward", "backward"),
    [("", 2 + 4 + 8 * 4, 2 + 4 + 2 * 4), ("native", 2 + 4 + 4 * 4, 4 + 2), ("te", 2 + 2, 2 + 2)],
)
def test_a_fused_loss_moves_less(fused: FusedLoss, forward: int, backward: int) -> None:
    """Bytes of a logit in bf16: native has a cast with the maximum, an exponential with its sum
    and a division, then one kernel backward; Transformer Engine's copies, and writes over the
    copy."""
    times = cross_entropy_times(ROWS, _speed(), 2, fused)
    assert (times.forward_s, times.backward_s) == (ROWS * forward, ROWS * backward)


def test_a_job_says_whose_kernels_compute_its_loss() -> None:
    flags = shlex.split(
        "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 128 --bf16 "
        "--vocab-size 1000 --max-position-embeddings 256 --global-batch-size 16 "
        "--micro-batch-size 2 --cross-entropy-fusion-impl te"
    )
    assert load_workload(None, flags).training.fused_loss == ""
    fused = load_workload(None, [*flags, "--cross-entropy-loss-fusion"])
    assert fused.training.fused_loss == "te"
    # The copy of the logits is half as wide as the softmax.
    share, plain = even_share(fused.model, 1), load_workload(None, flags)
    saved = head_activation_bytes(plain.model, plain.training, share, 1024)
    saved -= head_activation_bytes(fused.model, fused.training, share, 1024)
    assert saved == 2 * 2 * 128 * 1024


def _speed() -> Any:
    from megatron_hetero.cost.work.speed import speed_of

    own = speed_of(make_workload().training, FAST)
    return own._replace(memory_bytes_per_s=1.0, mixed_bytes_per_s=1.0)


TOOLS = Path(__file__).resolve().parents[3] / "tools"


def test_what_a_card_took_is_as_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of whole steps on an H200: of dense layers within 10 %, memory within +10 / -3 %."""
    monkeypatch.syspath_prepend(TOOLS)
    import gpu_steps

    data = read_json(gpu_steps.TABLE).data
    for case, own in data["cases"].items():
        price = gpu_steps.priced(case, own, data["card"])
        assert -0.10 < own["held_mib"] / price["held"] - 1 < 0.03, case
        on_gpu = price["products"] + price["attention"] + price["memory"]
        if case not in ("small", "qwen-30b, grouped"):
            assert abs(on_gpu / own["busy_ms"] - 1) < 0.10, case
    sys.modules.pop("gpu_steps")


def test_kernels_of_unlike_operands_have_the_rate_of_their_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(TOOLS)
    import gpu_steps
    import make_calibration

    from megatron_hetero.cluster.catalogue import gpu_type
    from megatron_hetero.cost.work.calibration import shipped_calibration

    shipped = shipped_calibration()
    assert dict(shipped.mixed) == make_calibration.mixed_rates(())
    h200 = gpu_type("H200")
    assert shipped.mixed_bytes_per_s(h200) < shipped.memory_bytes_per_s(h200)
    # A type without a table streams.
    a100 = gpu_type("A100-80GB")
    assert shipped.mixed_bytes_per_s(a100) == shipped.memory_bytes_per_s(a100)
    assert gpu_steps.cause_of("nvjet_sm90_tst_128x128_TNT") == "products"
