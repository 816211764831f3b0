"""The commands of docs/stories.md, each as printed, in a folder of its own."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.flags.launchers.job import LaunchJob
from megatron_hetero.plan.file import load_plan

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from pages import Terminal, is_marked, made_section, sections  # noqa: E402

STORIES = (ROOT / "docs" / "stories.md").read_text()


def section_of(title: str) -> str:
    """One section of the page."""
    return next(text for text in sections(ROOT / "docs/stories.md") if f"## {title}\n" in text)


def commands_of(title: str) -> list[str]:
    """The commands of one section, without the program's name."""
    lines = re.findall(r"^megatron-hetero (.*)$", section_of(title), re.MULTILINE)
    assert lines, title
    return lines


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


TITLES = ("A100 and RTX cards", "Two sites", "One odd GPU", "Three GPUs", "A budget", "A lost node")


def told() -> Iterator[object]:
    """Each story; where the page shows nothing of what is printed, of a small job as well."""
    for title in TITLES:
        is_shown = is_marked(section_of(title))
        if not is_shown:
            yield pytest.param(title, True, id=f"{title}, a small job")
        marks = [] if is_shown else [pytest.mark.slow]
        yield pytest.param(title, False, id=title, marks=marks)


def shrink_jobs(folder: Path) -> None:
    """Leave a few layers and micro-batches of each file of Megatron flags."""
    for path in folder.rglob("*.flags"):
        text = re.sub(r"--num-layers \d+", "--num-layers 4", path.read_text())
        path.write_text(re.sub(r"--global-batch-size \d+", "--global-batch-size 8", text))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("title", "is_small"), list(told()))
def test_a_story(title: str, is_small: bool, here: Path) -> None:
    """Its commands run, in their order, and print what the page shows of them."""
    if is_small:
        shrink_jobs(here / "examples")
    terminal = Terminal(here)
    for command in commands_of(title):
        if not command.startswith("verify"):  # minutes of training: tests/runtime has that
            terminal.run(command)
    text = section_of(title)
    assert made_section(text, ROOT / "docs" / "stories.md", terminal).text == text, "make pages"
    for path in here.glob("*.json"):
        assert main(["validate", str(path)]) == 0
        assert main(["flags", str(path)]) == 0
        LaunchJob(load_plan(path)).check()


def test_every_example_has_a_story_or_a_test() -> None:
    told = set(re.findall(r"examples/([\w.-]+)/", STORIES))
    elsewhere = set(re.findall(r"examples/([\w.-]+)", (ROOT / "README.md").read_text()))
    tools = "".join(path.read_text() for path in (ROOT / "tools").glob("*.py"))
    tools += "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    named = told | elsewhere | set(re.findall(r"examples/([\w.-]+)", tools))
    assert {path.name for path in (ROOT / "examples").iterdir()} <= named


def test_the_words_of_the_concepts_page_are_a_layout() -> None:
    from megatron_hetero.plan.layout import format_layout, parse_layout

    page = (ROOT / "docs" / "concepts.md").read_text()
    line = "tp4:20,tp2(5:3):12 @12 | tp1:32 @4"
    assert line in page and line in (ROOT / "docs/images/concepts.svg").read_text()
    assert format_layout(parse_layout(line)) == line


@pytest.mark.slow
def test_the_story_of_two_sites_is_true(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At 2 Gb/s the second site stays idle."""
    path = here / "examples/two-sites/cluster.yaml"
    path.write_text(path.read_text().replace("bandwidth: 10 Gb/s", "bandwidth: 2 Gb/s"))
    model = str(here / "examples/two-sites/gpt-2.7b.flags")
    assert main(["plan", "--cluster", str(path), "--model", model, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["idle_devices"] and all(d.startswith("south") for d in shown["idle_devices"])
