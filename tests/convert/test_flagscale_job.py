"""FlagScale's experiment files, turned into Megatron's flags, and what is left out named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.convert.flagscale_job import FlagScaleJob, read_flagscale_job
from megatron_hetero.convert.hydra import read_experiment
from megatron_hetero.errors import FileFormatError, HeteroError, UsageError
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.file import load_plan
from tests.convert.flagscale import TRAIN, experiment


def line(text: str) -> int:
    """Where a text stands in `TRAIN`."""
    return next(n for n, words in enumerate(TRAIN.splitlines(), start=1) if text in words)


def read(folder: Path, *changes: tuple[str, str]) -> FlagScaleJob:
    text = TRAIN
    for was, becomes in changes:
        assert was in text
        text = text.replace(was, becomes)
    return read_flagscale_job(experiment(folder, text))


def flags(job: FlagScaleJob) -> dict[str, tuple[str, ...]]:
    return {option.name: option.values for option in job.options}


def test_the_job_is_what_flagscale_hands_to_megatron(tmp_path: Path) -> None:
    found = flags(read(tmp_path))
    # 2/3 of 4 x 96 is 256, times 1.5 is 384, which 64 divides.
    assert found["--ffn-hidden-size"] == ("384",)
    assert found["--weight-decay"] == ("0.01",)
    assert found["--lr"] == ("0.0002",)
    assert found["--bf16"] == ()
    assert found["--wandb-project"] == ("small-small",)
    assert found["--seed"] == ("7",)
    assert found["--save"] == ("./out/checkpoints",)
    for flag in (
        "--sequence-parallel",
        "--vocab-file",
        "--log-dir",
        "--tensor-model-parallel-size",
        "--multiple-of",
        "--data-path",
    ):
        assert flag not in found


def test_every_key_without_a_counterpart_is_named_with_its_place(tmp_path: Path) -> None:
    job = read(tmp_path)
    left = {item.key: item for item in job.left_out}
    assert set(left) == {
        "train.system.no_shared_fs",
        "train.system.hetero.hetero_device_types",
        "train.model.norm_init_weight",
        "train.data.data_path",
        "train.data.tokenizer.tokenizer_type",
        "train.data.tokenizer.tokenizer_path",
        "experiment.task.type",
        "experiment.task.backend",
        "experiment.runner.hostfile",
        "experiment.envs.MY_SETTING",
        "action",
    }
    assert left["train.model.norm_init_weight"].where.endswith(
        f"train/mixed.yaml:{line('norm_init_weight')}"
    )
    assert "the training differs" in left["train.model.norm_init_weight"].why
    assert "${data_path:??} is not resolved" in left["train.data.data_path"].why
    assert "to be filled in" in left["train.data.tokenizer.tokenizer_path"].why
    # Each stands in the script too, as a comment.
    assert all(f"# left out: {key} = " in job.script for key in left)


def test_no_key_gets_lost(tmp_path: Path) -> None:
    """Each leaf of the files is a flag, part of the layout, left out, or of a closed list."""
    job = read(tmp_path)
    tree = read_experiment(job.path).tree
    layout = {"tensor_model_parallel_size", "pipeline_model_parallel_size", "enable_hetero"}
    layout |= {"hetero_pipeline_layer_split", "hetero_process_meshes"}
    used = {"multiple_of", "hidden_dim_multiplier", "log_dir", "exp_dir", "exp_name", "seed"}
    used |= {"nproc_per_node", "CUDA_VISIBLE_DEVICES"}
    names = {name.lstrip("-").replace("-", "_") for name in flags(job)}
    left = {item.key for item in job.left_out}
    for key, value in tree.leaves():
        last = key.rpartition(".")[2]
        is_off = value.data is None or value.data is False
        per_stage = last.endswith("_per_stage_micro_batch")
        assert is_off or per_stage or last in names | layout | used or key in left, key


def test_the_script_is_a_model_for_plan(tmp_path: Path) -> None:
    path = tmp_path / "pretrain.sh"
    path.write_text(read(tmp_path).script)
    workload = load_workload(path)
    assert workload.model.num_layers == 6
    assert workload.model.ffn_hidden_size == 384
    assert workload.training.precision == "bf16"


def test_the_folder_holds_flags_cluster_and_plan(tmp_path: Path, capsys) -> None:
    path, folder = experiment(tmp_path), tmp_path / "job"
    words = ["convert", str(path), "--from", "flagscale", "--folder", str(folder), "--json"]
    assert main([*words, "--", "--vocab-size", "1024"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["layout"] == " | ".join(["tp2:3,tp4:1,tp2:2 @8"] * 2)
    assert shown["files"] == ["pretrain.sh", "cluster.yaml", "plan.json"]
    assert any("stage 1 recomputes 2 layers as one" in note for note in shown["notes"])
    plan = load_plan(folder / "plan.json")
    assert plan.workload is not None and plan.workload.model.vocab_size == 1024
    for replica in plan.replicas:
        recompute = [(s.recompute, s.recompute_num_layers) for s in replica.stages]
        assert recompute == [("none", None), ("full", None), ("full", 1)]
    cluster = (folder / "cluster.yaml").read_text()
    assert "{name: node-0, gpu: A800-80GB, count: 4}" in cluster
    # Eight GPUs of the second mesh, four to a node.
    assert "{name: node-2, gpu: RTX-4090, count: 4}" in cluster
    assert '{name: node-3, gpu: "mlu590", count: 4}' in cluster
    assert 'The catalogue has no "mlu590"' in cluster
    assert main(["flags", str(folder / "plan.json")]) == 0
    assert main([*words, "--", "--vocab-size", "1024"]) == 2
    assert "not an empty folder" in capsys.readouterr().err


def test_what_converts_is_written_even_where_the_layout_does_not(tmp_path: Path, capsys) -> None:
    train = TRAIN.replace("[2, 1, 1, 2, 1, 4, 1, 1, 2, 1,", "[2, 1, 1, 2, 1, 2, 1, 1, 4, 1,")
    path, folder = experiment(tmp_path, train), tmp_path / "job"
    hosts = tmp_path / "hosts"
    hosts.write_text("10.0.0.1 slots=8 type=A800\n")
    words = ["convert", str(path), "--from", "flagscale", "--folder", str(folder)]
    assert main([*words, "--hostfile", str(hosts)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "data-parallel sizes [2, 4, 2] differ" in error
    assert "Written to" in error and "pretrain.sh, cluster.yaml; no plan.json" in error
    assert sorted(p.name for p in folder.iterdir()) == ["cluster.yaml", "pretrain.sh"]
    assert 'host: "10.0.0.1"' in (folder / "cluster.yaml").read_text()


def test_without_a_folder_the_layout_and_the_notes_are_shown(tmp_path: Path, capsys) -> None:
    assert main(["convert", str(experiment(tmp_path)), "--from", "flagscale"]) == 0
    shown = capsys.readouterr()
    assert shown.out == " | ".join(["tp2:3,tp4:1,tp2:2 @8"] * 2) + "\n"
    place = f"train/mixed.yaml:{line('norm_init_weight')}"
    assert f"train.model.norm_init_weight ({place})" in " ".join(shown.err.split())


def test_a_file_of_the_train_folder_alone_is_read_too(tmp_path: Path) -> None:
    train = TRAIN.replace("${experiment.exp_name}-${experiment.exp_name}", "x")
    experiment(tmp_path, train.replace("${experiment.seed}", "1"))
    job = read_flagscale_job(tmp_path / "conf/train/mixed.yaml")
    assert flags(job)["--num-layers"] == ("6",)
    assert "model.norm_init_weight" in {left.key for left in job.left_out}


@pytest.mark.parametrize(
    ("granularity", "layout_is_kept"),
    [("[[3, 4, 1, 4, 0]]", True), ("[[2, 8, 1], [1, 8, 0]]", True)],
)
def test_recompute_that_changes_within_a_stage_is_named(
    granularity: str, layout_is_kept: bool, tmp_path: Path, capsys
) -> None:
    train = TRAIN.replace("[[1, 6, 0, 2, 0], [2, 8, 1]]", granularity)
    assert main(["convert", str(experiment(tmp_path, train)), "--from", "flagscale"]) == 0
    is_named = "not the same for all micro-batches" in " ".join(capsys.readouterr().err.split())
    assert is_named == granularity.startswith("[[3, 4")


@pytest.mark.parametrize(
    ("granularity", "message"),
    [
        ("[[1, 6, 0], [2, 8, 1]]", "for 8 micro-batches in all"),
        ("[[1, 8, 0], [1, 8, 1]]", "lists for 3 stages"),
        ("[[100000000, 8, 0]]", "lists for 3 stages"),
        ("[[1, 8], [2, 8, 1]]", "pairs of a number of micro-batches and a value"),
        ("[yes]", "lists such as"),
    ],
)
def test_recompute_that_is_no_such_list_is_refused(
    granularity: str, message: str, tmp_path: Path, capsys
) -> None:
    train = TRAIN.replace("[[1, 6, 0, 2, 0], [2, 8, 1]]", granularity)
    assert main(["convert", str(experiment(tmp_path, train)), "--from", "flagscale"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("was", "becomes", "error", "message"),
    [
        ("multiple_of: 64", "multiple_of: many", FileFormatError, "multiple_of is 'many'"),
        ("multiple_of: 64", "multiple_of: 0", FileFormatError, "numbers above 0"),
        ("model:", "models:", FileFormatError, "no experiment of FlagScale"),
        ("${experiment.seed}", "${experiment.sed}", FileFormatError, "there is no such key"),
        ("${experiment.seed}", "${train.model.seed}", FileFormatError, "refers to itself"),
        ("[2, 1, 1, 2, 1, 4,", "[2, 1, 1, 2, 4,", UsageError, "five for each mesh"),
        ("[A800, RTX-4090, mlu590]", "[A800, A800]", UsageError, "2 types for 3 meshes"),
    ],
)
def test_files_that_are_wrong_are_refused(
    was: str, becomes: str, error: type[HeteroError], message: str, tmp_path: Path, capsys
) -> None:
    train = TRAIN.replace(was, becomes)
    assert train != TRAIN
    words = ["convert", str(experiment(tmp_path, train)), "--from", "flagscale"]
    assert main([*words, "--folder", str(tmp_path / "job")]) == error.exit_code
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "job").exists()
