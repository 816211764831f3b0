"""Files of an experiment composed as Hydra does it, and what is not read."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.convert.hydra import Value, read_experiment
from megatron_hetero.errors import FileFormatError, UnsupportedError
from tests.convert.flagscale import EXPERIMENT, TRAIN, experiment


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ("[train: ../../secret]", "is not read here"),
        ("[train: /etc/passwd]", "is not read here"),
        ("['train@other: mixed']", "is not read here"),
        ("[override train: mixed]", "is not read here"),
        ("[train: missing]", "missing.yaml: cannot be read"),
        ("train", "defaults is a list"),
        ("[train_hetero]", "lead back to itself"),
    ],
)
def test_defaults_that_are_not_read_are_named(defaults: str, message: str, tmp_path: Path) -> None:
    top = EXPERIMENT.replace("\n  - train: mixed\n  - _self_", f" {defaults}")
    with pytest.raises((FileFormatError, UnsupportedError), match=message):
        read_experiment(experiment(tmp_path, top=top))


def test_a_package_header_is_refused_and_not_ignored(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="@package _global_"):
        read_experiment(experiment(tmp_path, f"# @package _global_\n{TRAIN}"))


def value(path: Path, key: str) -> Value:
    found = read_experiment(path).tree.find(key)
    assert isinstance(found, Value)
    return found


@pytest.mark.parametrize(
    ("defaults", "seed"),
    [
        ("[train: mixed, _self_]", 3),
        ("[_self_, train: mixed]", 1),
        # Without _self_ the file itself comes last.
        ("[train: mixed]", 3),
        ("[base, train: mixed]", 3),
        ("[train: [mixed, other], _self_]", 3),
        ("[_self_, train: [mixed, other]]", 2),
        ("[train: mixed, model: null]", 3),
    ],
)
def test_later_files_win(defaults: str, seed: int, tmp_path: Path) -> None:
    path = experiment(tmp_path, "model: {seed: 1, a: 1}\n")
    path.write_text(f"defaults: {defaults}\ntrain: {{model: {{seed: 3}}}}\n")
    (tmp_path / "conf/base.yaml").write_text("train: {model: {seed: 4, b: 4}}\n")
    (tmp_path / "conf/train/other.yaml").write_text("model: {seed: 2}\n")
    assert value(path, "train.model.seed").data == seed
    assert value(path, "train.model.a").data == 1


def test_the_environment_is_never_asked(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SECRET", "told")
    path = experiment(tmp_path, "model: {a: '${oc.env:SECRET}', b: 'x${oc.env:SECRET}'}\n")
    path.write_text("defaults: [train: mixed]\n")
    for key in ("a", "b"):
        found = value(path, f"train.model.{key}")
        assert "told" not in str(found.data)
        assert "only references to keys are" in found.reason


def test_references_cannot_fill_the_memory(tmp_path: Path) -> None:
    lines = ["a0: xy"]
    lines += [f"a{n}: '${{a{n - 1}}}${{a{n - 1}}}'" for n in range(1, 40)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(FileFormatError, match="bring in more than"):
        read_experiment(path)
    # Empty ones grow nothing, and each is replaced once.
    path.write_text("\n".join(lines).replace("a0: xy", 'a0: ""'))
    assert value(path, "a39").data == ""
    path.write_text("\n".join(f"b{n}: ${{b{n + 1}}}" for n in range(200)) + "\nb200: 1")
    with pytest.raises(FileFormatError, match="lead through more than"):
        read_experiment(path)
