"""What the pages show is true: files load, schemas are fresh, links lead somewhere.

Outputs and figures: test_pages.py."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from megatron_hetero.cli.main import VERBS
from megatron_hetero.cluster.file.description import cluster_hash, load_cluster
from megatron_hetero.flags.support.lookup import support_of
from megatron_hetero.model.flag_table import flag_table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import make_options_page  # noqa: E402

FOLDERS = ("benchmarks", "docs", "examples", "megatron_hetero", "patches", "tests", "tools")
NOT_OURS = {"venv/", "preprocess_data.py"}
"""Of the user's machine, and of Megatron-LM."""
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def export_schemas() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "export_schemas", ROOT / "tools" / "export_schemas.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def first_block(page: str, language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert found is not None, f"{page} has no {language} block"
    return found[1]


def test_every_option_has_a_help() -> None:
    assert "` |  |" not in make_options_page.page()


def test_committed_schemas_are_what_the_code_says() -> None:
    assert export_schemas().stale_schemas() == []


def test_a_stale_schema_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "cluster.schema.json").write_text("{}")
    module = export_schemas()
    assert module.stale_schemas(tmp_path) == list(module.SCHEMAS)


@pytest.mark.parametrize("page", ["README.md", "docs/cluster-file.md"])
def test_the_cluster_file_of_a_page_loads(page: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(first_block(page, "yaml"))
    assert load_cluster(path).devices


def test_the_readme_shows_the_example(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(first_block("README.md", "yaml"))
    example = ROOT / "examples/one-workstation/cluster.yaml"
    assert cluster_hash(load_cluster(path)) == cluster_hash(load_cluster(example))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_of_the_repository_that_a_page_names_are_there(page: Path) -> None:
    if page.name == "CHANGELOG.md":  # it tells of what was there
        return
    folders = "|".join(FOLDERS)
    for path in re.findall(rf"(?<![\w/.-])((?:{folders})/[\w./-]*[\w/])", page.read_text()):
        parts = Path(path)
        assert (ROOT / parts).exists() or (ROOT / f"{path}.py").exists(), f"{page.name}: {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_by_the_end_of_their_path_are_there(page: Path) -> None:
    """`completion/tuner.py`, `test_table.py` or `planner/moves/`: some file's path ends so."""
    if page.name == "CHANGELOG.md":  # it tells of what was there
        return
    ends = _ends_of_paths()
    for path in re.findall(r"`([\w.-]+(?:/[\w.-]+)*(?:\.py|/))`", page.read_text()):
        assert path in ends or "NAME" in path or path in NOT_OURS, f"{page.name}: {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_stand_in_the_file_that_a_page_gives_for_them(page: Path) -> None:
    for name, path in re.findall(r"`(\w+)` \(`([\w./-]+\.py)`\)", page.read_text()):
        files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
        files = [file for file in files if f"/{file.relative_to(ROOT)}".endswith(f"/{path}")]
        assert any(re.search(rf"\b{name}\b", file.read_text()) for file in files), (name, path)


@cache
def _ends_of_paths() -> frozenset[str]:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    paths += ROOT.glob("*.py")
    written = [f"{path.relative_to(ROOT)}{'/' if path.is_dir() else ''}" for path in paths]
    parts = [text.split("/") for text in (*written, *(f"{folder}/" for folder in FOLDERS))]
    return frozenset("/".join(part[i:]) for part in parts for i in range(len(part)))


def test_the_tour_of_the_code_names_every_folder_in_the_order_of_imports() -> None:
    tour = (ROOT / "CONTRIBUTING.md").read_text().split("| read in this order |")[1]
    named = re.findall(r"^\| .*?`(\w+)/`.* \|$", tour.split("\n\n")[0], re.MULTILINE)
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [re.findall(r"\w+", layer) for layer in contract["contracts"][0]["layers"]]
    height = {name: -i for i, layer in enumerate(layers) for name in layer}
    assert named == sorted(named, key=lambda name: height[name])
    folders = {path.parent.name for path in (ROOT / "megatron_hetero").glob("*/__init__.py")}
    assert set(named) == folders
    rows = re.findall(
        r"^\| `(?:errors.py` `units.py` `rounding.py` `)?(\w+)/` \|.*\| `([\w./]+)` \|$",
        tour,
        re.MULTILINE,
    )
    for folder, start in rows:
        room = ROOT / "megatron_hetero" / folder
        assert (room / start).exists() or (room.parent / start).exists(), start


def test_every_replaced_symbol_of_megatron_is_on_the_page_of_the_runtime() -> None:
    page = (ROOT / "docs/runtime.md").read_text().split("## What of Megatron is replaced")[1]
    for path in (ROOT / "megatron_hetero/runtime/megatron").glob("*.py"):
        for name in re.findall(r'^    name="([\w.]+)",$', path.read_text(), re.MULTILINE):
            assert name.split(".")[0] in page, f"{path.name}: {name}"


def test_what_the_readme_says_is_not_in_it_is_refused() -> None:
    listed = (ROOT / "README.md").read_text().split("**Not in it:** ")[1].split(". ")[0]
    assert listed == "of fp8 all but `--fp8-recipe tensorwise`"
    support = support_of(flag_table().by_name["--fp8-recipe"])
    assert support.status == "refused" and "tensorwise is followed" in support.note


def test_the_command_line_page_has_every_verb() -> None:
    page = (ROOT / "docs/command-line.md").read_text()
    assert [verb for verb in VERBS if f"| `{verb} " not in page] == []
