"""A small experiment in FlagScale's form, which takes its job from `train/`."""

from __future__ import annotations

from pathlib import Path

EXPERIMENT = """\
defaults:
  - train: mixed
  - _self_
experiment:
  exp_name: small
  exp_dir: ./out
  seed: 7
  task: {type: train, backend: megatron}
  runner: {hostfile: hosts, nproc_per_node: 4}
  envs: {CUDA_VISIBLE_DEVICES: "0,1,2,3", MY_SETTING: 1}
action: run
hydra:
  run: {dir: "${experiment.exp_dir}/hydra"}
"""
TRAIN = """\
system:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 3
  use_distributed_optimizer: true
  sequence_parallel: false
  no_shared_fs: true
  precision: {bf16: true}
  logging:
    wandb_project: ${experiment.exp_name}-${experiment.exp_name}
    log_dir: ./logs
  hetero:
    enable_hetero: true
    hetero_pipeline_layer_split: [3, 1, 2]
    hetero_process_meshes: [2, 1, 1, 2, 1, 4, 1, 1, 2, 1, 2, 1, 1, 2, 1]
    hetero_device_types: [A800, RTX-4090, mlu590]
  recompute:
    recompute_granularity: full
    recompute_method: uniform
    recompute_num_layers: 1
    recompute_granularity_per_stage_micro_batch: [[1, 6, 0, 2, 0], [2, 8, 1]]
    recompute_method_per_stage_micro_batch: [[2, 8, 0], [1, 8, 1]]
    recompute_num_layers_per_stage_micro_batch: [[2, 8, 2], [1, 8, 1]]
model:
  num_layers: 6
  hidden_size: 96
  num_attention_heads: 8
  seq_length: 64
  max_position_embeddings: 64
  swiglu: true
  multiple_of: 64
  hidden_dim_multiplier: 1.5
  norm_init_weight: 0.5
  micro_batch_size: 1
  global_batch_size: 16
  train_iters: 10
  seed: ${experiment.seed}
  weight_decay: 0.1
  optimizer:
    weight_decay: 0.01
    lr_scheduler: {lr: 2e-4}
data:
  data_path: ${data_path:??}
  split: 1
  tokenizer:
    tokenizer_type: SmallTokenizerFS
    tokenizer_path: xxxx
    vocab_file: null
    vocab_size: 512
"""


def experiment(
    folder: Path, train: str = TRAIN, top: str = EXPERIMENT, name: str = "mixed"
) -> Path:
    (folder / "conf/train").mkdir(parents=True)
    (folder / f"conf/train/{name}.yaml").write_text(train)
    path = folder / "conf/train_hetero.yaml"
    path.write_text(top)
    return path
