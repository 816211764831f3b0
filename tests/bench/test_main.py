"""Every benchmark is found by its name, and every command of a page or a result is one."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tools import results
from tools.bench.__main__ import benchmarks, listing, loaded, main

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize("name", benchmarks())
def test_a_benchmark_says_what_it_is_and_how_it_is_called(name: str) -> None:
    module, parser = loaded(name)
    assert f"tools/bench {name}" in (module.__doc__ or "")
    assert all(flag in parser.format_usage() for names, _ in module.OPTIONS for flag in names)
    assert callable(module.run)


def commands() -> list[str]:
    """Return the commands of results, of blocks of pages, and of sentences that have options."""
    found = [results.load(name).command for name in results.names()]
    for page in PAGES:
        found += re.findall(r"^(?:sudo )?(python tools/bench [^\n>#]+)", page.read_text(), re.M)
        found += re.findall(r"`((?:python )?tools/bench [^`]+ --[^`]+)`", page.read_text())
    return sorted({line.partition("tools/bench ")[2] for line in found if "tools/bench " in line})


def test_the_commands_of_pages_and_results_are_understood() -> None:
    assert len(commands()) > 30
    for command in commands():
        name, *words = shlex.split(command)
        loaded(name)[1].parse_args(words)


def test_every_name_of_a_page_is_one() -> None:
    for page in PAGES:
        for name in re.findall(r"tools/bench ([\w-]+)", page.read_text()):
            assert name in (*benchmarks(), "NAME"), f"{page.name}: tools/bench {name}"


def test_without_a_name_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in benchmarks())
    assert listing().count("\n") + 1 == len(benchmarks())


def test_another_name_is_answered_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plannars"]) == 2
    assert "no benchmark 'plannars', but ablation, annealing," in capsys.readouterr().err


def test_a_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch-counts", "--cases", "1"]) == 0
    counts, sites = results.tables_in(capsys.readouterr().out)
    assert len(counts.rows) == 4 and len(sites.rows) == 5
