"""Installation on machines: `install.sh` with stand-ins for Python and pip; options of Slurm."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.errors import UsageError
from megatron_hetero.flags.launchers.install import Wheel, find_wheel, install_script
from megatron_hetero.flags.launchers.job import without_unused
from megatron_hetero.flags.launchers.slurm import slurm_options
from megatron_hetero.plan.file import save_plan
from tests.flags.launch_jobs import SHOW, files, job, mixed_plan, run_script, written

NAME = "megatron_hetero-0.1.0-py3-none-any.whl"
URL = f"https://files.example/wheels/{NAME}"
# Makes a virtual environment whose own Python writes down what it is asked to do.
PYTHON = """#!/bin/sh
case "$1" in
-c) exit 0 ;;
-m) [ "$2" = venv ] && mkdir -p "$4/bin" && cp "$0" "$4/bin/python" &&
        printf '#!/bin/sh\\n' >"$4/bin/torchrun" && chmod +x "$4/bin/torchrun" && exit 0
    printf '%s\\n' "$@" >>"${0%/*}/../../pip" ;;
esac
"""


def wheel_file(folder: Path, metadata: str) -> Path:
    path = folder / NAME
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("megatron_hetero-0.1.0.dist-info/METADATA", metadata)
    return path


def installing(folder: Path, wheel: Wheel, python: str = PYTHON) -> Path:
    written(folder, (install_script(wheel),), "true")
    for name in ("python3.12", "python3.13", "python3"):
        (folder / "bin" / name).write_text(python)
        (folder / "bin" / name).chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("wheel", "requirement"),
    [
        (Wheel(NAME, path=Path(NAME)), f"FOLDER/{NAME}[tested]"),
        (Wheel(NAME, url=URL), f"megatron-hetero[tested] @ {URL}"),
    ],
)
def test_the_wheel_is_installed_once_with_the_tested_versions(
    wheel: Wheel, requirement: str, tmp_path: Path
) -> None:
    folder = installing(tmp_path, wheel)
    done = run_script(folder, "install.sh", HOME=str(folder))
    assert done.returncode == 0, done.stderr
    asked = (folder / "pip").read_text().splitlines()
    assert asked[:3] == ["-m", "pip", "install"]
    assert asked[-1] == requirement.replace("FOLDER", str(folder))
    done = run_script(folder, "install.sh", HOME=str(folder))
    assert "is there" in done.stdout
    assert (folder / "pip").read_text().splitlines() == asked


def test_a_machine_without_a_suitable_python_is_told_so(tmp_path: Path) -> None:
    folder = installing(tmp_path, Wheel(NAME), "#!/bin/sh\nexit 1\n")
    done = run_script(folder, "install.sh", HOME=str(folder))
    assert done.returncode == 5
    assert "no Python 3.12 or 3.13" in done.stderr


def test_uv_brings_a_python_where_there_is_none(tmp_path: Path) -> None:
    folder = installing(tmp_path, Wheel(NAME), "#!/bin/sh\nexit 1\n")
    uv = folder / ".local/bin/uv"
    uv.parent.mkdir(parents=True)
    uv.write_text(
        '#!/bin/sh\n[ "$*" = "venv --clear --seed --python 3.12 $HOME/venv" ] || exit 1\n'
        f"cat >\"$HOME/python\" <<'END'\n{PYTHON}END\n"
        'mkdir -p "$6/bin"; cp "$HOME/python" "$6/bin/python"; chmod +x "$6/bin/python"\n'
    )
    uv.chmod(0o755)
    done = run_script(folder, "install.sh", HOME=str(folder))
    assert done.returncode == 0, done.stderr
    assert f"{folder}/{NAME}[tested]" in (folder / "pip").read_text()


def test_a_node_takes_what_was_installed_and_else_says_what_to_do(tmp_path: Path) -> None:
    made = files("torchrun", is_installed_by_script=True)
    folder = written(tmp_path, made, "echo the one on the PATH")
    assert run_script(folder, "train.sh", "0").stdout == "the one on the PATH\n"
    own = folder / "venv/bin/torchrun"
    own.parent.mkdir(parents=True)
    own.write_text(f"#!/usr/bin/env bash\n{SHOW}\n")
    own.chmod(0o755)
    assert run_script(folder, "train.sh", "0").stdout.startswith("--nnodes\n2\n")
    own.unlink()
    (folder / "bin/torchrun").unlink()
    for tool in ("bash", "dirname", "hostname"):
        (folder / "bin" / tool).symlink_to(next(filter(os.path.exists, places(tool))))
    done = run_script(folder, "train.sh", "0", PATH=str(folder / "bin"))
    assert done.returncode == 5
    assert f"run bash {folder}/install.sh here" in done.stderr


def places(tool: str) -> list[str]:
    return [f"{folder}/{tool}" for folder in os.environ["PATH"].split(os.pathsep)]


def test_the_folder_has_the_wheel_and_its_installer(tmp_path: Path, capsys) -> None:
    wheel = wheel_file(tmp_path, "Name: megatron-hetero\nProvides-Extra: tested\n")
    save_plan(mixed_plan(), tmp_path / "plan.json")
    folder = tmp_path / "job"
    words = ["launch", str(tmp_path / "plan.json"), "-o", str(folder), "--wheel", str(wheel)]
    assert main([*words, "--for", "skypilot"]) == 0
    assert (folder / NAME).read_bytes() == wheel.read_bytes()
    assert "bash install.sh" in (folder / "part-1.yaml").read_text()
    assert os.access(folder / "install.sh", os.X_OK)
    assert "ports" not in (folder / "part-0.yaml").read_text()
    words[3] = str(tmp_path / "open")
    assert main([*words, "--for", "skypilot", "--open-ports"]) == 0
    assert 'ports: ["29500", "32768-60999"]' in (tmp_path / "open/part-0.yaml").read_text()
    words[3] = str(tmp_path / "shared")
    capsys.readouterr()
    assert main([*words, "--for", "ssh"]) == 0
    assert "Install: bash" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("missing.whl", "there is no such wheel"),
        (f"http://files.example/{NAME}", "an https URL"),
        (f"https://files.example/$(x)/{NAME}", "an https URL"),
        ("https://files.example/other-1.0-py3-none-any.whl", "an https URL"),
        (f"{URL}#sha256=12", "an https URL"),
    ],
)
def test_what_is_no_wheel_of_ours_is_refused(given: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        find_wheel(given)


def test_a_wheel_that_make_dist_did_not_build_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no extra 'tested'"):
        find_wheel(str(wheel_file(tmp_path, "Name: megatron-hetero\n")))
    (tmp_path / NAME).write_text("no archive")
    with pytest.raises(UsageError, match="it is not a wheel"):
        find_wheel(str(tmp_path / NAME))
    assert find_wheel(f"{URL}#sha256={'0' * 64}").name == NAME


def test_options_of_slurm_stand_in_every_component() -> None:
    options = slurm_options(
        ["A100-80GB=big", "rest"], ["RTX-4090=16"], "team", "high", "1-12:00:00"
    )
    text = next(f.text for f in files("slurm", slurm=options) if f.name == "job.sbatch")
    first, second = text.split("#SBATCH hetjob\n")
    assert "--partition=big" in first and "--partition=rest" in second
    assert "--cpus-per-task" not in first and "--cpus-per-task=16" in second
    for component in (first, second):
        for line in ("--account=team", "--qos=high", "--time=1-12:00:00"):
            assert f"#SBATCH {line}\n" in component


@pytest.mark.parametrize(
    ("partition", "cpus", "time", "words"),
    [
        (["a b"], [], None, "--partition 'a b': a name"),
        (["a", "b"], [], None, "there is 'a' for these nodes already"),
        (["$(x)"], [], None, "--partition"),
        ([], ["0"], None, "a number above 0"),
        ([], [], "soon", "--time 'soon'"),
    ],
)
def test_options_that_slurm_could_not_read(
    partition: list[str], cpus: list[str], time: str | None, words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        slurm_options(partition, cpus, None, None, time)
    assert words in str(caught.value)


def test_a_partition_for_gpus_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UsageError, match="the plan's nodes have A100-80GB, RTX-4090, not H2000"):
        without_unused("--partition", (("H2000", "x"),), job())
