"""Folders and checkpoints that cannot be converted are refused, and nothing half written stays."""

from __future__ import annotations

import json
import resource
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_hetero.cli.main import main
from megatron_hetero.errors import CheckpointError
from megatron_hetero.lab.huggingface import job
from megatron_hetero.lab.huggingface.families import pieces_of
from megatron_hetero.lab.huggingface.folder import WeightFolder, write_folder
from megatron_hetero.runtime.job.local.jobs import RankFailedError
from tests.lab.huggingface.test_import import (
    GPT2,
    LLAMA,
    folder_of,
    gpt2_weights,
    in_a_process,
    llama_weights,
)


def test_a_tensor_that_is_missing_or_too_many_is_named(tmp_path: Path) -> None:
    weights = llama_weights()
    short = {n: t for n, t in weights.items() if n != "model.norm.weight"}
    folder = WeightFolder(folder_of(tmp_path / "short", LLAMA, short))
    with pytest.raises(CheckpointError, match=r"lack model\.norm\.weight"):
        folder("model.norm.weight")
    (tmp_path / "bin").mkdir()
    with pytest.raises(CheckpointError, match="pickles, which are not read"):
        WeightFolder(tmp_path / "bin")


def test_large_models_come_in_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_hetero.lab.huggingface.folder._FILE_BYTES", 20_000)
    weights = llama_weights()
    (tmp_path / "config.json").write_text("{}")
    count = write_folder(tmp_path / "many", iter(weights.items()), tmp_path / "config.json")
    assert count > 1
    read = WeightFolder(tmp_path / "many")
    assert all(torch.equal(read(name), tensor) for name, tensor in weights.items())
    assert read.never_read() == ()


def test_the_verb_refuses_what_it_cannot_use(tmp_path: Path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["ckpt", "import", str(tmp_path / "empty"), str(tmp_path / "out")]) == 2
    assert "no config.json" in capsys.readouterr().err
    assert main(["ckpt", "export", str(tmp_path / "empty"), str(tmp_path / "out")]) == 2
    assert "--config" in capsys.readouterr().err
    full = folder_of(tmp_path / "hf", LLAMA, {})
    assert main(["ckpt", "import", str(full), str(full)]) == 2
    assert "not an empty folder" in capsys.readouterr().err


def test_weights_keep_the_precision_of_the_file(tmp_path: Path) -> None:
    """Megatron makes norms in fp32 whatever the job's precision; the folder has one."""
    weights = {name: tensor.bfloat16() for name, tensor in llama_weights().items()}
    source = folder_of(tmp_path / "hf", {**LLAMA, "torch_dtype": "bfloat16"}, weights)
    start, back = tmp_path / "start", tmp_path / "back"
    in_a_process("import", tmp_path, lambda: job.import_weights(source, start))
    in_a_process(
        "export", tmp_path, lambda: job.export_weights(start, back, source / "config.json")
    )
    found = load_file(back / "model.safetensors")
    assert all(found[n].dtype == w.dtype and torch.equal(found[n], w) for n, w in weights.items())


def test_another_models_config_is_refused_before_a_file_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron loads 2 of 3 layers, or heads of other sizes, without a word."""
    source = folder_of(tmp_path / "hf", LLAMA, llama_weights())
    start = tmp_path / "start"
    in_a_process("import", tmp_path, lambda: job.import_weights(source, start))
    other = {**LLAMA, "num_hidden_layers": 1, "rope_theta": 500000.0}
    (tmp_path / "other.json").write_text(json.dumps(other))
    words = ["ckpt", "export", str(start), str(tmp_path / "out")]
    assert main([*words, "--config", str(tmp_path / "other.json"), "--json"]) == 4
    error = json.loads(capsys.readouterr().out)["error"]
    assert "num_layers is 2 in the checkpoint, 1 by config.json" in error["message"]
    assert "rotary_base is 10000 in the checkpoint, 500000" in error["message"]
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """A training job goes on after a save that failed; here the save is all there is."""
    source = folder_of(tmp_path / "hf", LLAMA, llama_weights())

    def on_a_full_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
        job.import_weights(source, tmp_path / "start")

    with pytest.raises(RankFailedError, match="checkpoint was not saved"):
        in_a_process("import", tmp_path, on_a_full_disk)
    assert not (tmp_path / "start" / "latest_checkpointed_iteration.txt").exists()


def test_an_output_layer_that_is_not_the_embedding_is_not_dropped(tmp_path: Path) -> None:
    """Transformers uses it whatever the config says; a copy of the embedding may stand there."""
    weights = llama_weights()
    pieces = pieces_of({**LLAMA, "tie_word_embeddings": True})
    folder = WeightFolder(folder_of(tmp_path / "own", LLAMA, weights))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight and model\.embed_tokens\.weight"):
        job._check_tied_head(pieces, folder)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    job._check_tied_head(pieces, WeightFolder(folder_of(tmp_path / "tied", LLAMA, weights)))


def test_a_folder_of_a_model_without_its_head_has_no_prefix(tmp_path: Path) -> None:
    """OpenAI's own folder of GPT-2 is one."""
    weights = gpt2_weights()
    bare = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    folder = WeightFolder(folder_of(tmp_path / "bare", GPT2, bare))
    assert all(torch.equal(folder(name), tensor) for name, tensor in weights.items())
    assert folder.never_read() == ()
    with pytest.raises(CheckpointError, match=r"lack lm_head\.weight"):
        folder("lm_head.weight")


def test_a_file_that_was_not_copied_whole_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf", LLAMA, llama_weights())
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        WeightFolder(folder)


@pytest.mark.parametrize("end", ["well", "refused", "killed", "interrupted"])
def test_the_folder_has_all_or_nothing(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folder_of(tmp_path / "hf", LLAMA, {})
    target = tmp_path / "out"

    def convert(command: list[str], **unused: object) -> subprocess.CompletedProcess[str]:
        passing = Path(command[-1])
        (passing / "release").mkdir()
        (passing / "latest_checkpointed_iteration.txt").write_text("release")
        if end == "interrupted":
            raise KeyboardInterrupt
        status, said = {
            "well": (0, "3\n"),
            "refused": (4, f'{{"kind": "CheckpointError", "message": "{passing} is full"}}'),
            "killed": (-9, ""),
        }[end]
        return subprocess.CompletedProcess(command, status, said, "")

    monkeypatch.setattr(subprocess, "run", convert)
    status = main(["ckpt", "import", str(source), str(target)])
    said = capsys.readouterr().err
    assert status == {"well": 0, "refused": 4, "killed": 6, "interrupted": 130}[end]
    if end == "well":
        assert {p.name for p in target.iterdir()} == {
            "release", "latest_checkpointed_iteration.txt",
        }  # fmt: skip
        return
    assert not target.exists()
    wanted = {"refused": f"{target} is full", "killed": "signal 9", "interrupted": "interrupted"}
    assert wanted[end] in said
