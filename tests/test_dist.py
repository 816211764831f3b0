"""The wheel that the machines of a job install, and the image that is made from it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from megatron_hetero import __version__
from megatron_hetero.flags.launchers.install import find_wheel

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "megatron_hetero"
_BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2]))
"""


def source_files() -> set[str]:
    """What belongs into a wheel: every file of the package, the patches and their table."""
    package = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and not path.name.startswith("_kernels")  # compiled where somebody plans
    }
    patches = [*ROOT.glob("patches/*.json"), *ROOT.glob("patches/*/*.patch")]
    return package | {f"megatron_hetero/{path.relative_to(ROOT).as_posix()}" for path in patches}


def build(kind: str, tree: Path, folder: Path) -> Path:
    """The file that the build backend makes of a tree."""
    words = [sys.executable, "-c", _BUILD, kind, str(folder)]
    pure = os.environ | {"MEGATRON_HETERO_PURE": "1"}
    done = subprocess.run(words, cwd=tree, capture_output=True, text=True, check=False, env=pure)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make dist` does: from the unpacked source archive."""
    folder = tmp_path_factory.mktemp("dist")
    tree = folder / "tree"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("megatron_hetero", "patches"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignore)
    top = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "constraints.txt")
    for name in top:
        shutil.copy(ROOT / name, tree)
    archive = build("sdist", tree, folder)
    with tarfile.open(archive) as source:
        source.extractall(folder, filter="data")
    return build("wheel", folder / archive.name.removesuffix(".tar.gz"), folder)


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"megatron_hetero-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == source_files()
    # What a build that names its files one by one forgets.
    for name in (
        "cluster/catalogue.json",
        "model/flag_table.json",
        "report/page/page.css",
        "patches/releases.json",
        "py.typed",
    ):
        assert f"megatron_hetero/{name}" in inside
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_pins_what_the_tests_run_with(wheel: Path) -> None:
    assert find_wheel(str(wheel)).path == wheel
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith("/METADATA"))
        metadata = archive.read(name).decode()
    pins = re.findall(r'^Requires-Dist: ([\w.-]+)==(\S+); extra == "tested"$', metadata, re.M)
    constraints = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line
    )
    assert {"torch", "megatron-core", "numpy", "pydantic", "psutil", "safetensors"} <= {
        package for package, _ in pins
    }
    assert pins == [(package, constraints[package]) for package, _ in pins]
    assert "pytest" not in dict(pins)


def test_every_version_of_the_developers_environment_has_hashes() -> None:
    """What `make` installs is what constraints.txt pins, and what torch brings; nothing else."""
    pins = re.findall(r"^([a-z][\w.-]*==\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    text = (ROOT / "requirements-dev.txt").read_text()
    _, of_torch = text.split("\n# torch, and what it brings")
    hashed = dict(
        re.findall(r"^([a-z][\w.-]*==\S+)((?: \\\n +--hash=sha256:[0-9a-f]{64})+)", text, re.M)
    )
    assert set(hashed) == set(re.findall(r"^([a-z][\w.-]*==\S+)", text, re.M))
    pins = [pin.replace("ruamel.", "ruamel-") for pin in pins]  # a dot is a dash in names
    assert set(pins) <= set(hashed)
    for name in set(hashed) - set(pins):
        assert name.startswith("triton==") or name in of_torch


@pytest.mark.slow
def test_the_planner_works_where_nothing_but_the_wheel_is(wheel: Path, tmp_path: Path) -> None:
    """Installed from the package index; torch is not, and planning does not miss it."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # Whatever else is on the path of this process would count as installed.
    outside = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    words = [*pip, "--constraint", ROOT / "constraints.txt", wheel]
    subprocess.run(words, check=True, env=outside)
    environment = {"PATH": os.environ["PATH"], "NO_COLOR": "1"}

    def run(*words: str | Path, code: int = 0) -> str:
        done = subprocess.run(
            [tmp_path / "venv/bin/megatron-hetero", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    assert __version__ in run("--version")
    example = ROOT / "examples/a100-rtx4090"
    files = ("--cluster", example / "cluster.yaml", "--model", example / "gpt-7b.sh")
    run("plan", *files, "-o", "plan.json")
    assert "--hetero-plan" in run("flags", "plan.json")
    run("report", "plan.json", "--cluster", example / "cluster.yaml", "-o", "report.html")
    assert (tmp_path / "report.html").stat().st_size > 10_000
    run("launch", "plan.json", "--for", "skypilot", "--wheel", wheel, "-o", "job")
    assert (tmp_path / "job" / wheel.name).read_bytes() == wheel.read_bytes()
    assert "these packages are not installed: torch" in run("verify", "plan.json", code=5)
    listed = subprocess.run([python, "-c", "import torch"], capture_output=True, check=False)
    assert listed.returncode != 0


def test_the_image_file_passes_its_linter() -> None:
    program = shutil.which("hadolint", path=Path(sys.executable).parent)
    assert program is not None, "there is no hadolint: install the extra dev"
    done = subprocess.run([program, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_image_is_made_from_the_wheel_alone() -> None:
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    assert [line for line in sent if not line.startswith("#")] == [
        "*",
        "!dist",
        "dist/*",
        "!dist/*.whl",
    ]
    text = (ROOT / "Dockerfile").read_text()
    assert "source=dist,target=/dist" in text and '"${wheel}[tested]"' in text
    assert "COPY" not in text


@pytest.mark.slow
def test_the_image_is_built_where_docker_is() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True).returncode:
        pytest.skip("no Docker with a running daemon: the image is linted, not built")
    subprocess.run(["make", "image", "IMAGE=megatron-hetero:test"], cwd=ROOT, check=True)
