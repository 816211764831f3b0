"""What the pages show is true: examples load, schemas are fresh, links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

from megatron_hetero.cli.main import VERBS, main
from megatron_hetero.cluster.description import cluster_hash, load_cluster

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import make_options_page  # noqa: E402

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


def test_the_page_of_options_is_what_the_parsers_say() -> None:
    page = make_options_page.page()
    assert make_options_page.PAGE.read_text() == page, "run python tools/make_options_page.py"
    assert "` |  |" not in page, "an argument has no help"


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
    example = ROOT / "examples/a100-rtx4090/cluster.yaml"
    assert cluster_hash(load_cluster(path)) == cluster_hash(load_cluster(example))


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A working directory with a copy of the examples, and a terminal of 80 columns."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.usefixtures("examples")
def test_the_readme_shows_what_the_planner_answers(capsys: pytest.CaptureFixture[str]) -> None:
    folder = "examples/a100-rtx4090"
    files = ["--cluster", f"{folder}/cluster.yaml", "--model", f"{folder}/gpt-7b.sh"]
    assert main(["plan", *files, "-o", "plan.json"]) == 0
    assert f"```\n{capsys.readouterr().out}```\n" in (ROOT / "README.md").read_text()


@pytest.mark.usefixtures("examples")
def test_the_readme_shows_the_plan_of_the_second_example(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = "examples/rtx3080-rtx4090"
    assert main(
        ["plan", "--cluster", f"{folder}/cluster.yaml", "--model", f"{folder}/gpt-1.3b.sh"]
    ) == 0  # fmt: skip
    out = capsys.readouterr().out
    table = out[out.index("Replica 0") : out.index("\n\ntime: ")]
    page = (ROOT / "README.md").read_text()
    assert textwrap.indent(table, "  ") in page
    slower = re.search(r"best of stock Megatron .* \+([0-9.]+%)", out)
    assert slower is not None
    assert f"stock Megatron's own takes {slower[1]} longer" in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_command_line_page_has_every_verb() -> None:
    page = (ROOT / "docs/command-line.md").read_text()
    assert [verb for verb in VERBS if f"| `{verb} " not in page] == []
