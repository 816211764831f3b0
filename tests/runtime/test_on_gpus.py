"""Discover, probe, plan and doctor over NCCL, on a machine with NVIDIA GPUs; skipped elsewhere.

pytest -m gpu tests/runtime/test_on_gpus.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine"),
]

MODEL = [
    "--num-layers=8", "--hidden-size=1024", "--num-attention-heads=16", "--seq-length=1024",
    "--max-position-embeddings=1024", "--vocab-size=32000", "--micro-batch-size=1",
    "--global-batch-size=16", "--bf16", "--transformer-impl=local", "--no-persist-layer-norm",
    "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--lr=1e-4",
]  # fmt: skip


def run(folder: Path, *words: str, launcher: tuple[str, ...] = ()) -> str:
    """One command of ours in a process of its own; its standard output."""
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = [*(launcher or (sys.executable,)), "-m", "megatron_hetero", *words]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cluster.yaml of this machine, a profile of its GPU, and a plan that stands on it."""
    folder = tmp_path_factory.mktemp("gpu")
    run(folder, "discover", "-o", "cluster.yaml")
    gpu = json.loads(run(folder, "discover", "--json"))["gpus"][0]["catalogue_name"]
    run(folder, "probe", "--gpu", gpu, "--seconds=2", "-o", "profile.json", *MODEL)
    files = ("--cluster", "cluster.yaml", "--profile", "profile.json", "-o", "plan.json")
    run(folder, "plan", *files, *MODEL)
    return folder


def test_the_probe_measures_by_cuda_events(folder: Path) -> None:
    points = json.loads((folder / "profile.json").read_text())["points"]
    assert {point["piece"] for point in points} == {"embedding", "decoder_layer", "head"}
    assert all(0 < point["forward_s"] < 1 and 0 < point["backward_s"] < 1 for point in points)


def test_the_probe_measures_launches_and_what_libraries_take(folder: Path) -> None:
    data = json.loads((folder / "profile.json").read_text())
    (measured,) = data["gpus"].values()
    assert 1e-6 < measured["launch_s"] < 1e-3
    assert 100 << 20 < measured["context_bytes"] < 2 << 30
    (num_busy,) = (n for what, n in data["provenance"].items() if what.endswith(": busy GPUs"))
    assert ("communicator_bytes" in measured) == (num_busy != "1")
    assert measured.get("communicator_bytes", 1) < 2 << 30


def test_known_values_pass_through_every_group_over_nccl(folder: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    num_ranks = sum(len(host["gpu_indices"]) for host in plan["hosts"])
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    words = ("doctor", "plan.json", "--cluster", "cluster.yaml", "--on-cluster", "--json")
    launcher = (torchrun, "--standalone", "--nproc-per-node", str(num_ranks))
    data = json.loads(run(folder, *words, launcher=launcher))
    assert data["ok"]
    assert len(data["machines"]) == num_ranks


TRAINING = [
    "--train-iters=4", "--log-interval=2", "--eval-interval=1000", "--eval-iters=0", "--mock-data",
    "--tokenizer-type=NullTokenizer", "--num-workers=0",
]  # fmt: skip


def train(folder: Path, layout: str, num_gpus: int, *flags: str) -> str:
    """A short training on the first GPUs; its log.  Skipped where there are fewer."""
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    launcher += ("--nproc-per-node", str(num_gpus), "-m", "megatron_hetero.pretrain_gpt")
    command = [*launcher, *MODEL, *TRAINING, f"--hetero-layout={layout}", *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize(("layout", "num_gpus"), [("tp1:8 @16", 1), ("tp1:6,tp1:2 @16", 2)])
def test_the_straggler_detector_reports(layout: str, num_gpus: int, tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="torch asks the sensors through it")
    log = train(tmp_path, layout, num_gpus, "--log-straggler", "--straggler-minmax-count=1")
    for what in ("MnRtt/Rnk", "MxTmp/Rnk", "MxPwr/Rnk", "MnEtpt/Rnk"):
        assert log.count(what) == 2, what


@pytest.mark.parametrize(("layout", "num_gpus"), [("tp1:6,tp1:2 @16", 2)])
def test_fp8_products_train_an_asymmetric_plan(layout: str, num_gpus: int, tmp_path: Path) -> None:
    pytest.importorskip("transformer_engine.pytorch")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    # The last one given counts.
    flags = ("--transformer-impl=transformer_engine", "--fp8-recipe=tensorwise")
    losses = [
        [float(x) for x in re.findall(r"lm loss: (\S+)", train(tmp_path, layout, num_gpus, *more))]
        for more in (flags, (*flags, "--fp8-format=hybrid"))
    ]
    assert len(losses[0]) == 2 and losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
