"""FlagScale's public reports: unlike widths (issue 319), settings by device (pull request 779)."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.cli.main import main

TRAIN = """\
system:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 3
  disable_bias_linear: True
  sequence_parallel: True
  use_distributed_optimizer: True
  hetero:
    enable_hetero: True
    hetero_pipeline_layer_split: {split}
    hetero_process_meshes: {meshes}
    hetero_device_types: ["A800", "A100"]
    hetero_current_device_type: "A800"
  precision: {{bf16: True, accumulate_allreduce_grads_in_fp32: True}}
  checkpoint: {{save_interval: 100, ckpt_format: {form}}}
model:
  num_layers: 12
  hidden_size: 2048
  num_attention_heads: 16
  seq_length: 2048
  max_position_embeddings: 2048
  use_rotary_position_embeddings: true
  swiglu: true
  multiple_of: 256
  normalization: RMSNorm
  untie_embeddings_and_output_weights: true
  train_samples: 10000
  global_batch_size: 32
  micro_batch_size: 1
  optimizer: {{lr: 2e-4}}
data:
  data_path: /data/pile_demo
  tokenizer: {{tokenizer_type: NullTokenizer, vocab_size: 100008}}
"""


@pytest.mark.parametrize(
    ("meshes", "split", "layout"),
    [
        ([2, 1, 1, 2, 2, 4, 1, 1, 2, 1], [4, 4, 4], " | ".join(["tp2:4,tp2:4,tp4:4 @16"] * 2)),
        ([2, 1, 1, 2, 1, 4, 1, 1, 2, 1], [7, 5], "tp2:7,tp4:5 @16 | tp2:7,tp4:5 @16"),
        ([1, 1, 1, 1, 3, 2, 1, 1, 1, 1], [3, 3, 3, 3], "tp1:3,tp1:3,tp1:3,tp2:3 @32"),
        ([4, 1, 1, 1, 1, 2, 1, 1, 1, 1], [8, 4], "tp4:8,tp2:4 @32"),
        ([8, 1, 1, 4, 1, 4, 1, 1, 4, 1], [6, 6], " | ".join(["tp8:6,tp4:6 @8"] * 4)),
    ],
)  # fmt: skip
def test_layouts_of_meshes_of_unlike_width(
    meshes: list[int],
    split: list[int],
    layout: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(TRAIN.format(split=split, meshes=meshes, form="torch"))
    folder = tmp_path / "job"
    assert main(["convert", str(path), "--from", "flagscale", "--folder", str(folder)]) == 0
    said = capsys.readouterr()
    assert layout in " ".join(said.out.split())
    # Unlike stages write no other checkpoints; the key is named, and not carried along.
    assert "system.checkpoint.ckpt_format (train.yaml:14)" in " ".join(said.err.split())
    assert "--ckpt-format" not in (folder / "pretrain.sh").read_text()


def test_the_usual_form_of_checkpoints_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(
        TRAIN.format(split=[7, 5], meshes=[2, 1, 1, 2, 1, 4, 1, 1, 2, 1], form="torch_dist")
    )
    folder = tmp_path / "job"
    assert main(["convert", str(path), "--from", "flagscale", "--folder", str(folder)]) == 0
    assert "ckpt_format" not in capsys.readouterr().err
    assert "--ckpt-format torch_dist" in (folder / "pretrain.sh").read_text()


def test_settings_by_device_and_by_node_are_each_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "t.yaml").write_text(
        TRAIN.format(split=[7, 5], meshes=[2, 1, 1, 2, 1, 4, 1, 1, 2, 1], form="torch")
    )
    path = tmp_path / "config.yaml"
    path.write_text(
        "defaults:\n  - _self_\n  - train: t\nexperiment:\n  exp_name: demo\n  envs:\n"
        "    device_type_specific:\n      A800: {NCCL_IB_HCA: mlx5_0}\n"
        "      mlu590: {CNCL_IB_RELAXED_ORDERING_ENABLE: 1}\n"
        "    node_specific:\n      192.0.2.7: {CUDA_VISIBLE_DEVICES: '0,1'}\n"
        "device_type_specific:\n  mlu590: {build_dir: /opt/fs-mlu}\n"
    )
    assert main(["convert", str(path), "--from", "flagscale"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    for key in (
        "experiment.envs.device_type_specific.A800.NCCL_IB_HCA (config.yaml:8)",
        "experiment.envs.device_type_specific.mlu590.CNCL_IB_RELAXED_ORDERING_ENABLE",
        "experiment.envs.node_specific.192.0.2.7.CUDA_VISIBLE_DEVICES (config.yaml:11)",
        "device_type_specific.mlu590.build_dir (config.yaml:13)",
    ):
        assert key in said
    hosts = tmp_path / "hostfile"
    hosts.write_text("192.0.2.6 slots=8 type=A800\n192.0.2.7 slots=4 type=mlu590\n")
    words = ["convert", "--from", "flagscale", "--hostfile", str(hosts)]
    assert main(words) == 4
    assert 'hostfile:2: "mlu590" is not a GPU of the catalogue, and could not train' in (
        capsys.readouterr().err
    )
