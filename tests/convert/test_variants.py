"""Forms in which people keep HexiScale's scripts and FlagScale's settings by device."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from tests.convert.test_flagscale_reports import TRAIN

LISTS = '--hetero_configs "[[4, 2], [2]]" --layer_partitions "[[20, 12], [32]]"'
TWO = "tp4:20,tp2:12 @12x2 | tp2:32 @4x1"
HEXISCALE = {
    "lists in variables": (
        "CONFIGS='[[4, 2], [2]]'\nLAYERS=\"[[20, 12], [32]]\"\nCHUNKS=\"12 4\"\n"
        'torchrun llama_train.py --hetero_configs "$CONFIGS" --layer_partitions "$LAYERS" '
        "--chunks $CHUNKS --global_bsz_size 24 4",
        TWO),
    "an array of flags": (
        f"ARGS=(\n  {LISTS}\n  # of each pipeline\n  --chunks 12 4\n)\n"
        'ARGS+=(--global_bsz_size 24 4)\ntorchrun llama_train.py "${ARGS[@]}"',
        TWO),
    "a string for eval": (
        "L='[[4,2],[2]]'; P='[[20,12],[32]]'\nCMD=\"torchrun llama_train.py --hetero_configs '$L' "
        "--layer_partitions '$P' --chunks 12 4 --global_bsz_size 24 4 2>&1 | tee log\"\n"
        'eval "$CMD"',
        TWO),
    "numbers of a sum": (
        f"BATCH=$((12 * 2))\ntorchrun llama_train.py {LISTS} --chunks 12 4 "
        "--global_bsz_size $BATCH ${SMALL:-4}",
        TWO),
    "one node of many": (
        'for rank in 0 1; do\n  ssh node$rank "torchrun --node_rank $rank llama_train.py '
        "--hetero_configs '[[2]*2, [1]*2]' --layer_partitions '[[16,16]]*2' --chunks 6 2 "
        '--global_bsz_size 6 2"\ndone',
        "tp2:16,tp2:16 @6x1 | tp1:16,tp1:16 @2x1"),
    "a function with its own lists": (
        "run() { torchrun llama_train.py --hetero_configs \"$1\" --layer_partitions \"$2\" "
        '"${@:3}"; }\nrun "[[4], [2, 2]]" "[[8], [5, 3]]" --chunks 3 1 --global_bsz_size 6 1',
        "tp4:8 @3x2 | tp2:5,tp2:3 @1x1"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEXISCALE)
def test_hexiscales_scripts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, layout = HEXISCALE[name]
    script = tmp_path / "train.sh"
    script.write_text(f"#!/bin/bash\nset -euo pipefail\n{text}\n")
    assert main(["convert", str(script), "--from", "hexiscale"]) == 0
    assert capsys.readouterr().out == f"{layout}\n"


@pytest.mark.parametrize(
    "text",
    [
        'torchrun llama_train.py --hetero_configs "$CONFIGS" --layer_partitions "[[2]]" '
        "--chunks 1 --global_bsz_size 1",
        f"torchrun llama_train.py {LISTS} --chunks $CHUNKS --global_bsz_size 24 4",
        f'torchrun llama_train.py {LISTS} --chunks 12 4 --global_bsz_size "$(cat batch)"',
    ],
)
def test_hexiscales_lists_that_are_not_known_are_refused_with_their_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.sh"
    script.write_text(f"#!/bin/bash\n{text}\n")
    assert main(["convert", str(script), "--from", "hexiscale"]) != 0
    assert "train.sh:2" in " ".join(capsys.readouterr().err.split())


BY_DEVICE = {
    "variables of one kind": (
        "experiment:\n  envs:\n    device_type_specific:\n      A800: {NCCL_IB_HCA: mlx5_0}\n",
        ["experiment.envs.device_type_specific.A800.NCCL_IB_HCA (config.yaml:8)"]),
    "of several kinds, in blocks": (
        "experiment:\n  envs:\n    device_type_specific:\n      A800:\n        NCCL_DEBUG: INFO\n"
        "        NCCL_IB_TIMEOUT: 22\n      BI150:\n        IXCCL_DEBUG: 1\n",
        ["A800.NCCL_DEBUG (config.yaml:9)", "A800.NCCL_IB_TIMEOUT (config.yaml:10)",
         "BI150.IXCCL_DEBUG (config.yaml:12)"]),
    "by node": (
        "experiment:\n  envs:\n    node_specific:\n      192.0.2.7: {CUDA_VISIBLE_DEVICES: '0,1'}\n"
        "      node-b: {GLOO_SOCKET_IFNAME: eth1}\n",
        ["node_specific.192.0.2.7.CUDA_VISIBLE_DEVICES (config.yaml:8)",
         "node_specific.node-b.GLOO_SOCKET_IFNAME (config.yaml:9)"]),
    "folders of builds": (
        "device_type_specific:\n  mlu590: {build_dir: /opt/fs-mlu}\n  A800: {build_dir: /opt/fs}\n",
        ["device_type_specific.mlu590.build_dir (config.yaml:6)",
         "device_type_specific.A800.build_dir (config.yaml:7)"]),
    "commands by kind": (
        "experiment:\n  cmds:\n    device_type_specific:\n      A800: source /opt/a/env.sh\n"
        "      mlu590: source /opt/m/env.sh\n",
        ["experiment.cmds.device_type_specific.A800 (config.yaml:8)",
         "experiment.cmds.device_type_specific.mlu590 (config.yaml:9)"]),
    "from a file of defaults": (
        "experiment: {exp_name: demo}\n",
        ["train.system.device_type_specific.A800.precision (train/t.yaml:16)"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_DEVICE)
def test_settings_by_device_are_each_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, keys = BY_DEVICE[name]
    job = TRAIN.format(split=[7, 5], meshes=[2, 1, 1, 2, 1, 4, 1, 1, 2, 1], form="torch_dist")
    if name == "from a file of defaults":
        at = job.index("model:\n")
        job = f"{job[:at]}  device_type_specific:\n    A800: {{precision: fp16}}\n{job[at:]}"
    (tmp_path / "train").mkdir()
    (tmp_path / "train/t.yaml").write_text(job)
    path = tmp_path / "config.yaml"
    path.write_text(f"# by device\ndefaults:\n  - _self_\n  - train: t\n{text}")
    assert main(["convert", str(path), "--from", "flagscale"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "tp2:7,tp4:5 @16 | tp2:7,tp4:5 @16\n"
    for key in keys:
        assert key in " ".join(shown.err.split())
