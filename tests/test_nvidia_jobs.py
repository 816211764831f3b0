"""Job files of NVIDIA's tree are judged by what stops them, and every refusal has a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.flags.support.lookup import named_flags
from tools.nvidia_jobs import REASONS, arguments_of, job_files, judge, table_of

FREE = """
MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512
  --seed: ${REPEAT}
  --data-path: ${DATA_PATH}/text_document
  --tensor-model-parallel-size: 2
  --dist-ckpt-strictness: log_all
  --swiglu: true
  --overlap-grad-reduce: false
  --split: 949,50,1
  --own-flag-of-the-script: 3
"""
STOPPED = "MODEL_ARGS: {--ckpt-format: torch, --use-megatron-fsdp: true, --lr: 0.1}"
INFERENCE = "MODE: inference\nMODEL_ARGS: {--num-layers: 12}"
MUON = "MODEL_ARGS: {--optimizer: muon}"
STRANGE = "MODEL_ARGS: {--num-layers: many}"


def write(tree: Path, kind: str, name: str, text: str) -> None:
    folder = tree / "tests" / "functional_tests" / "test_cases" / kind / name
    folder.mkdir(parents=True)
    (folder / "model_config.yaml").write_text(text)


def test_a_tree_is_counted(tmp_path: Path) -> None:
    write(tmp_path, "gpt", "free", FREE)
    write(tmp_path, "moe", "stopped", STOPPED)
    write(tmp_path, "moe", "strange", STRANGE)
    write(tmp_path, "bert", "another", STOPPED)
    found = [judge(path) for path in job_files(tmp_path)]
    assert [judged.refused for judged in found] == [
        (),
        ("--ckpt-format torch", "--use-megatron-fsdp"),
        (),
    ]
    assert "many" in found[2].unreadable
    assert found[1].reasons == {
        "another form of checkpoints",
        "another way to divide the model or its state",
    }
    assert "| no flag stops them | 1 |" in table_of(found)


def test_another_mode_and_optimizer_stop_a_file(tmp_path: Path) -> None:
    write(tmp_path, "gpt", "inference", INFERENCE)
    write(tmp_path, "moe", "muon", MUON)
    found = [judge(path) for path in job_files(tmp_path)]
    assert [judged.refused for judged in found] == [("MODE inference",), ("--optimizer muon",)]
    assert found[0].reasons == {"another kind of job or model"}


def test_arguments_are_those_that_the_launcher_passes() -> None:
    assert arguments_of("MODEL_ARGS: {--a: true, --b: false, --c: [1, 2], --d: 'x y'}") == [
        *("--a", "--c", "1", "2", "--d", "x", "y")
    ]
    assert arguments_of('MODEL_ARGS: {--a: "[2 2]"}') == ["--a", "2", "2"]


@pytest.mark.parametrize("reason", REASONS)
def test_reasons_name_flags_that_are_refused(reason: str) -> None:
    known = {name for flag in named_flags("refused") for name in flag.names}
    in_part = {"--optimizer", "--ckpt-convert-format", "--non-persistent-ckpt-type", "MODE"}
    assert [flag for flag in REASONS[reason] if flag not in known | in_part] == []
