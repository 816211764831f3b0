"""Forms of bash in people's scripts beside bash's words in several environments."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_hetero.model.script import read_script
from tests.model.shell.forms import FILES, INPUTS, PROCESSES, SCOPES, VALUES, Form
from tests.model.shell.generated import by_bash
from tests.model.shell.test_against_bash import is_covered

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
RUN = "torchrun pretrain_gpt.py --a"
ENVIRONMENTS: list[dict[str, str]] = [{}, {"U": "x"}, {"U": "x y", "V": "q"}, {"U": "3"}]
FORMS: dict[str, Form] = {**PROCESSES, **SCOPES, **INPUTS, **FILES, **VALUES}


def _folder(path: Path, files: dict[str, str]) -> Path:
    """Make a folder with the files that lie beside a script."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for name, text in files.items():
        (path / name).write_text(text.replace("RUN", RUN))
        (path / name).chmod(0o755)
    return path


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str, tmp_path: Path) -> None:
    text, words, *more = FORMS[name]
    text = text.replace("RUN", RUN)
    files = more[0] if more else {}
    folder = _folder(tmp_path / "job", files)
    read = read_script(folder / "train.sh", text)
    is_noted = any(part.may_change_model for part in read.unread)
    shown = "|".join(word.text or "" if word.is_known else "?" for word in read.words[1:])
    assert shown + "!" * is_noted == words
    # Bash may write files, so each run has a folder of its own; it stops at sums of words.
    starts = [by_bash(text, _folder(tmp_path / "job", files), given) for given in ENVIRONMENTS]
    assert starts[0] and starts[-1]
    for started in filter(None, starts):
        assert is_covered(read, started[-1][started[-1].index("--a") :])


@pytest.mark.parametrize(
    ("command", "layers"),
    [
        ("sbatch ./run.sh 8", "8"),
        ("sbatch -N 2 --export=ALL run.sh 8", "8"),
        ("srun run.sh", "4"),
        ("L=6 nohup bash ./run.sh &", "6"),
        ("timeout 3600 ./run.sh 9 > log 2>&1", "9"),
        ("exec ./run.sh", "4"),
        ("env L=5 ./run.sh", "5"),
        ("ssh host 'bash -s' < run.sh", "4"),
        ("ssh host 'bash -s' 8 < run.sh", "8"),
        ("ssh host L=5 bash -s < run.sh", "5"),
        ("ssh host 'L=5 bash run.sh'", "5"),
        ("tmux new -d 'L=5 ./run.sh 6'", "6"),
        ("bash -x -- run.sh 9", "9"),
        ("sbatch --export=ALL,L=5 run.sh", "5"),
        ("sbatch --export ALL,L=5 run.sh", "5"),
        ("sbatch --export=\"ALL,L='a,b'\" run.sh", "?"),
        ("export L=5\nsbatch --export=NONE run.sh", "4"),
        ("export L=5\nsbatch --export=L run.sh", "5"),
        ("docker run -v /a:/b -e L=5 image bash run.sh", "5"),
        ("docker run --env=L=5 image bash run.sh", "5"),
        ("export L=5\ndocker run -e L image bash run.sh", "5"),
        ("docker exec -e L=$V job bash run.sh", "?"),
        ("srun --mpi=pmix -N 2 --label docker run image bash run.sh", "4"),
        ("export L=5\nsrun --mpi=pmix -N 2 --label docker run image bash run.sh", "4"),
        ("mpirun -x L=5 -np 8 bash run.sh", "5"),
        ("mpiexec -genv L 5 -np 8 bash run.sh", "5"),
        ("APPTAINERENV_L=5 apptainer exec a.sif bash run.sh", "5"),
        ("export L=5\nsudo bash run.sh", "?"),
        ("export L=5\nsudo -E bash run.sh", "5"),
        ('ray job submit --runtime-env-json \'{"env_vars": {"L": "5"}}\' -- bash run.sh', "?"),
        ("xargs bash run.sh <<< 8", "?"),
        ("bsub -n 8 < run.sh", "4"),
    ],
)
def test_a_script_that_a_script_starts_is_read(command: str, layers: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"N=${{1:-${{L:-4}}}}\n{RUN} --num-layers $N\n")
    words = read_script(tmp_path / "train.sh", f"#!/bin/bash\n{command}\n").words
    shown = [word.text if word.is_known else "?" for word in words]
    assert shown == ["--a", "--num-layers", layers]


def test_variables_in_a_file_of_a_container_are_named(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"{RUN} --num-layers ${{L:-4}}\n")
    read = read_script(tmp_path / "train.sh", "docker run --env-file=a.env image bash run.sh\n")
    assert "--env-file of docker" in read.unread[0].reason and read.unread[0].may_change_model


def test_containers_and_other_machines_see_no_variables(tmp_path: Path) -> None:
    for program in ("docker exec job", "ssh host", "kubectl exec pod --"):
        text = f"export A=1\n{program} bash -c '{RUN} $A ${{B:-2}}'\n"
        words = read_script(tmp_path / "train.sh", text).words
        assert [word.text if word.is_known else "?" for word in words] == ["--a", "?", "2"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('eval "$CODE"', "eval runs code that is not known"),
        ("eval $(make_flags)", "eval runs code that is not known"),
        ('eval "$NAME=3"', "code sets a variable whose name is not known"),
        ("bash -c \"$CODE; echo\"", "code that is not known is run"),
        ("read $NAME <<< 3", "read may set a variable whose name is not known"),
        ("let $NAME=3", "let may set a variable whose name is not known"),
    ],
)  # fmt: skip
def test_code_that_is_not_known_is_named(text: str, reason: str, tmp_path: Path) -> None:
    read = read_script(tmp_path / "train.sh", f"{text}\n{RUN} 1\n")
    (part,) = read.unread
    assert reason in part.reason and part.may_change_model


def test_programs_that_are_set_up_are_no_part_of_the_job(tmp_path: Path) -> None:
    text = f'eval "$(conda shell.bash hook)"\nsource ~/.bashrc\nconda activate x\n{RUN} 1\n'
    assert not read_script(tmp_path / "train.sh", text).unread


def test_a_script_that_starts_itself_ends(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"sbatch --dependency=afterok:$ID $0\n{RUN} 1\n")
    read = read_script(path, path.read_text())
    assert [word.text for word in read.words] == ["--a", "1"]
    assert not any(part.may_change_model for part in read.unread)
