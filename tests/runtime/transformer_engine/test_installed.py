"""A Transformer Engine that is broken or empty must not break the start."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_hetero.runtime import backend
from megatron_hetero.runtime.transformer_engine import layers
from megatron_hetero.runtime.transformer_engine.cards_at_import import answered_by_the_driver
from megatron_hetero.runtime.transformer_engine.installed import hide_if_broken
from tests.runtime.test_refusals import MODEL

BROKEN = {
    "broken": 'raise RuntimeError("built for another CUDA")',
    "missing library": 'raise OSError("libcudnn.so.9: cannot open shared object file")',
    "empty": "",
}


@pytest.fixture(params=BROKEN)
def package(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    _write(tmp_path, BROKEN[request.param])
    for name in [n for n in sys.modules if n.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def _write(folder: Path, source: str) -> None:
    (folder / "transformer_engine").mkdir()
    (folder / "transformer_engine" / "__init__.py").write_text(source)


def test_a_broken_package_is_hidden(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = hide_if_broken()
    try:
        assert reason is not None and "cannot be imported" in reason
        with pytest.raises(ImportError):
            importlib.import_module("transformer_engine")
        assert "was hidden" in (hide_if_broken() or "")
    finally:
        for name in ("transformer_engine", "transformer_engine_torch"):
            sys.modules.pop(name, None)


def test_a_usable_package_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, "")
    (tmp_path / "transformer_engine" / "pytorch.py").write_text("")
    for name in [n for n in sys.modules if n.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert hide_if_broken() is None
        assert importlib.import_module("transformer_engine.pytorch")
    finally:
        for name in [n for n in sys.modules if n.startswith("transformer_engine")]:
            del sys.modules[name]


@pytest.mark.slow
def test_a_job_starts_beside_a_broken_package(tmp_path: Path) -> None:
    _write(tmp_path, BROKEN["broken"])
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-m", "megatron_hetero.pretrain_gpt", *MODEL, "--eval-iters=0"],
        env={
            **os.environ,
            "PYTHONPATH": path,
            "CUDA_VISIBLE_DEVICES": "",
            "MEGATRON_HETERO_STORE": str(tmp_path / "store"),
            "GLOO_SOCKET_IFNAME": "lo",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    assert "lm loss" in done.stdout


def test_a_gpu_without_apex_gets_the_flag_that_megatrons_output_layer_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Megatron's own words: `gradient_accumulation_fusion` without Apex's module is refused."""
    from megatron.core.tensor_parallel import layers as megatron_layers

    has = {"transformer_engine_torch": True}
    monkeypatch.setattr(
        layers.importlib.util, "find_spec", lambda name: object() if has.get(name) else None
    )
    assert not megatron_layers._grad_accum_fusion_available
    assert layers.gpu_flags(()) == ("--no-gradient-accumulation-fusion",)
    assert layers.gpu_flags(("--transformer-impl=local",)) == backend.PLAIN_GPU_FLAGS
    has["fused_weight_gradient_mlp_cuda"] = True
    assert layers.gpu_flags(()) == ()
    has["transformer_engine_torch"] = False
    assert layers.gpu_flags(()) == backend.PLAIN_GPU_FLAGS


def test_the_kernel_of_attention_is_that_which_transformer_engine_names() -> None:
    """Its own `get_attention_backend` answers, here over the CPU's bridge."""
    program = (
        "from megatron_hetero.runtime import backend\n"
        "from megatron_hetero.runtime.transformer_engine import layers\n"
        "print(layers.provide())\n"
        "backend.activate_cpu_backend()\n"
        "from megatron_hetero.runtime.transformer_engine.attention import attention_kernel\n"
        "from tests.cost.builders import make_workload\n"
        "print(attention_kernel(make_workload().model))\n"
    )
    said = {}
    # The variable takes Transformer Engine's choice of cuDNN away.
    for value in ("1", "0"):
        env = {**os.environ, "NVTE_FUSED_ATTN": value, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            env=env, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        said[value] = done.stdout.splitlines()
    if said["1"][0] != "None":
        assert said["1"][-1] == "None"  # no Transformer Engine, and so no answer
        return
    assert (said["1"][-1], said["0"][-1]) == ("fused", "unfused")


@pytest.mark.parametrize("capability", ["9.0", "[N/A]"])
def test_the_driver_answers_at_import_so_that_cuda_does_not_start(
    capability: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside flash-attn Transformer Engine asks at import, and a started CUDA survives no fork."""
    (tmp_path / "flash_attn.py").write_text("")
    program = tmp_path / "nvidia-smi"
    bus = "00000000:01:00.0, Disabled, 10, 5, 16, Disabled"
    line = f"0, NVIDIA H100 80GB HBM3, 81559, {capability}, {bus}"
    program.write_text(f'#!/bin/sh\necho "{line}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def start_cuda(*_: object) -> None:
        raise RuntimeError("CUDA starts")

    # An earlier test of the process may have put a CPU in the place of all devices.
    monkeypatch.setattr(torch.cuda, "get_device_properties", start_cuda)
    monkeypatch.setattr(torch.cuda, "_lazy_init", start_cuda)
    own = torch.cuda.get_device_properties
    # Nobody is asked without flash-attn.
    with answered_by_the_driver():
        assert torch.cuda.get_device_properties is own
    monkeypatch.syspath_prepend(tmp_path)
    with answered_by_the_driver():
        if capability == "9.0":
            found = torch.cuda.get_device_properties(torch.cuda.current_device())
            assert (found.major, found.minor) == (9, 0)
            with pytest.raises(RuntimeError, match="CUDA starts"):
                _ = found.multi_processor_count
        else:
            assert torch.cuda.get_device_properties is own
    assert torch.cuda.get_device_properties is own


def test_transformer_engine_asks_the_driver_for_a_gpu_when_it_is_imported(tmp_path: Path) -> None:
    """Its import asks torch, whose own question marks the process as one that cannot fork."""
    _write(tmp_path, "")
    asked = 'import os\nprint("asked", os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"))\n'
    (tmp_path / "transformer_engine" / "pytorch.py").write_text(asked)
    program = (
        "import torch\n"
        "torch.cuda.is_available = lambda: True\n"
        "import megatron_hetero.lab.kit.command\n"
    )
    env = {name: value for name, value in os.environ.items() if "NVML_BASED" not in name}
    env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{env.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "asked 1" in done.stdout, done.stderr[-2000:]
