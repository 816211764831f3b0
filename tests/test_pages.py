"""Pages show what commands print and result files say today; the mechanism notices where not."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import pages  # noqa: E402
import results  # noqa: E402
from pages import Made, PageError, Terminal  # noqa: E402

STORIES = ROOT / "docs" / "stories.md"


def marked_sections() -> Iterator[object]:
    """Each section with marks; the stories are run by test_examples.py."""
    for page in pages.marked_pages():
        if page == STORIES:
            continue
        for text in pages.sections(page):
            if pages.is_marked(text):
                title = text.splitlines()[0].strip("# ")
                marks = [pytest.mark.slow] if pages.SLOW in text else []
                yield pytest.param(page, text, id=f"{page.name}: {title}", marks=marks)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("page", "text"), list(marked_sections()))
def test_a_page_shows_what_is_found_today(page: Path, text: str, tmp_path: Path) -> None:
    made = pages.made_section(text, page, Terminal(tmp_path))
    assert made.text == text, "run make pages"
    assert made.stale(text, page) == [], "run make pages"


def test_pages_that_are_printed_whole_are_what_their_tools_print() -> None:
    for tool in pages.PRINTED:
        assert tool.PAGE.read_text() == tool.page(), f"run {tool.__name__}.py"


def test_a_source_archive_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert results._commit() == "a source archive"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert results._commit() == "a source archive"


def test_rows_carry_the_commit_of_the_run_that_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table with a column of commits keeps it, though the command prints none."""
    command = "echo '| job | s |\n| --- | --- |\n| b | 3 |'"
    rows = [["a", "1", "old"], ["b", "2", "old"]]
    table = results.Table(["job", "s", "commit"], rows)
    before = results.Result(command, "measured", "old", "", "", tables={"jobs": table})

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert words[-2:] == ["--only", "b"]
        return subprocess.CompletedProcess(words, 0, "| job | s |\n| --- | --: |\n| b | 3 |\n")

    monkeypatch.setattr(results, "_commit", lambda: "new")
    monkeypatch.setattr(results.subprocess, "run", run)
    made = results.again_in_part(before, ["b"])
    assert made.tables["jobs"].rows == [["a", "1", "old"], ["b", "3", "new"]]
    assert made.commit == "new"


def test_rows_that_begin_alike_are_replaced_together() -> None:
    table = results.Table(["job", "s"], [["a", "1"], ["b", "2"], ["b", "3"], ["c", "4"]])
    made = table.with_rows(results.Table(["job", "s"], [["b", "5"], ["b", "6"]]), "jobs")
    assert made.rows == [["a", "1"], ["b", "5"], ["b", "6"], ["c", "4"]]
    with pytest.raises(SystemExit, match="jobs: d are no rows"):
        table.with_rows(results.Table(["job", "s"], [["d", "7"]]), "jobs")
    with pytest.raises(SystemExit, match="the new rows are no rows"):
        table.with_rows(results.Table(["job", "h"], [["a", "7"]]), "jobs")


def test_mean_gaps_are_those_of_the_table() -> None:
    import paper_claims

    kept = results.load("paper")
    assert paper_claims.gap_figures(kept.tables["mfu"]) == kept.figures


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "name",
    # Some commands read a FOLDER of others' tables that is no part of this repository.
    [
        name
        for name in results.names()
        if (result := results.load(name)).kind == "computed" and "FOLDER" not in result.command
    ],
)
def test_a_computed_result_is_found_again(name: str) -> None:
    before = results.load(name)
    if name == "paper":
        import paper_claims

        now = paper_claims.result()
    else:
        now = results.again(before)
    assert (now.figures, now.tables) == (before.figures, before.tables)


class Fake(Terminal):
    """Prints what it is told to."""

    def _run(self, command: str) -> str:
        (self.folder / "plan.json").write_text("{}")
        (self.folder / "map.svg").write_text('<?xml version="1.0"?>\n<svg/>\n')
        return f"{command}\nstep 4.2 s\nend\n"


@pytest.fixture
def terminal(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


def made(text: str, terminal: Terminal) -> Made:
    return pages.made_section(text, ROOT / "docs" / "page.md", terminal)


def test_an_output_is_put_between_its_marks_and_a_figure_into_its_sentence(terminal: Fake) -> None:
    text = "## Title\n  <!-- shown: plan then from step then to end -->\nold\n  <!-- end -->\n"
    text += "It takes <!-- shown: same then find step ([0-9.]+) -->9<!-- end --> s.\n"
    new = made(text, terminal).text
    assert "  <!-- shown: plan then from step then to end -->\n  ```\n  step 4.2 s\n  ```\n" in new
    assert "<!-- shown: same then find step ([0-9.]+) -->4.2<!-- end --> s." in new
    assert made(new, terminal).text == new


def test_a_command_runs_once_for_all_its_marks(terminal: Fake) -> None:
    ran: list[str] = []
    terminal._run = lambda command: ran.append(command) or "x 1\n"  # type: ignore[method-assign,func-returns-value]
    made(
        "<!-- run: a -->\nx <!-- shown: same then find x (.) --><!-- end -->\n"
        "x <!-- shown: a then find x (.) --><!-- end -->\n",
        terminal,
    )
    assert ran == ["a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- shown: plan -->\nno end\n", "mark or its end is missing"),
        ("an end <!-- end -->\n", "mark or its end is missing"),
        ("a\n<!-- shown: plan then find (s) -->s<!-- end --> b\n", "stands first in its line"),
        ("<!-- shown: plan then from nowhere -->\n<!-- end -->\n", "finds nothing"),
        ("x <!-- shown: plan then find (nothing) --><!-- end -->\n", "finds nothing"),
        ("<!-- shown: plan then show step -->\n<!-- end -->\n", "finds nothing"),
        ("<!-- result: gaps then table nothing -->\n<!-- end -->\n", "ask for one `table NAME`"),
        ("<!-- picture: report plan.json then map.svg -->\n<!-- end -->\n", r"no !\[words\]"),
    ],
)
def test_a_mark_that_cannot_be_followed_is_named(text: str, message: str, terminal: Fake) -> None:
    with pytest.raises(PageError, match=message):
        made(text, terminal)


def test_a_command_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(PageError, match=r"validate nothing\.json` ended with status 4"):
        Terminal(tmp_path).run("validate nothing.json")


def test_a_picture_carries_the_hashes_of_its_plan_and_of_the_code_that_drew_it(
    terminal: Fake, tmp_path: Path
) -> None:
    text = "<!-- picture: report plan.json then map.svg -->\n![map](images/x.svg)\n<!-- end -->\n"
    section = made(text, terminal)
    [(path, picture)] = section.pictures.items()
    assert path == ROOT / "docs" / "images" / "x.svg"
    _, stamp, drawing = picture.splitlines()
    assert pages._hash(b"{}") in stamp and drawing == "<svg/>"
    there = tmp_path / "there.svg"
    there.write_text(picture)
    assert Made(text, {there: picture}).stale(text, path) == []
    there.write_text(picture.replace(pages._hash(b"{}"), pages._hash(b"another plan")))
    assert Made(text, {there: picture}).stale(text, path) == [there]


def unmarked(page: Path) -> str:
    """A page without what stands between marks."""
    return re.sub(
        r"<!-- (shown|result|picture): .*?<!-- end -->", "", page.read_text(), flags=re.DOTALL
    )


@pytest.mark.parametrize("page", pages.all_pages(), ids=lambda page: page.name)
def test_outputs_and_pictures_of_plans_stand_between_marks(page: Path) -> None:
    rule = re.search(r"^ *─{10,}$", unmarked(page), re.MULTILINE)
    assert rule is None, "a table that a command printed"


def test_every_picture_but_the_drawn_one_is_made_by_a_mark() -> None:
    marked = "".join(page.read_text() for page in pages.all_pages())
    made = set(re.findall(r"<!-- picture: [^\n]*-->\s*!\[[^]]*\]\(images/([^)]+)\)", marked))
    there = {path.name for path in (ROOT / "docs" / "images").iterdir()}
    assert there == made | {"concepts.svg"}


def test_a_page_that_differs_is_stale() -> None:
    assert Made("new").stale("old", STORIES) == [STORIES]
    assert Made("same").stale("same", STORIES) == []


def test_tables_go_from_markdown_to_a_result_and_back() -> None:
    text = (
        "words\n| job | s |\n| --- | --: |\n| a \\| b | 1.5 |\n| c |  |\n\n| x |\n| --- |\n| y |\n"
    )
    first, second = results.tables_in(text)
    assert first.columns == ["job", "s"] and first.rows == [["a \\| b", "1.5"], ["c", ""]]
    assert first.markdown() == "| job | s |\n| --- | --: |\n| a \\| b | 1.5 |\n| c |  |\n"
    assert second.rows == [["y"]]


def test_a_figure_over_a_column_has_the_decimals_of_its_cells() -> None:
    table = results.Table(("job", "gap %"), (("a", "1.5"), ("b", "-2.5 %"), ("c", 1_000)))
    assert table.over("median", "gap %") == "1.5"
    assert table.over("largest", "gap %") == "1000.0"
    assert table.over("least", "gap %") == "-2.5"
    with pytest.raises(KeyError, match="no column 'x'"):
        table.over("mean", "x")


def test_a_command_and_its_tables_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    prints = "print('| a |\\n| --- |\\n| 1 |\\n\\n| b |\\n| --- |\\n| 2 |')"
    words = ["new", "--tables", "first", "second", "--kind", "computed", "--"]
    assert results.main([*words, "python", "-c", prints]) == 0
    made = results.load("new")
    assert made.kind == "computed"
    assert {name: table.rows for name, table in made.tables.items()} == {
        "first": [["1"]], "second": [["2"]],
    }  # fmt: skip
    assert results.main(["new"]) == 0
    assert results.load("new").tables == made.tables
    assert results.main([]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("new ")


def test_some_rows_are_made_again_and_the_others_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    tool = tmp_path / "tool.py"
    tool.write_text("import sys\nprint(f'| job | s |\\n| --- | --: |\\n| {sys.argv[2]} | 2 |')\n")
    columns, rows = ["job", "s"], [["a", "1"], ["b", "1"], ["c", "1"]]
    old = results.Result(
        f"python {tool}",
        "computed",
        "older",
        "2026-01-01",
        "",
        {},
        {"jobs": results.Table(columns, rows)},
    )
    results.save(old, "slow")
    assert results.main(["slow", "--rows", "b"]) == 0
    made = results.load("slow")
    assert made.tables["jobs"].rows == [["a", "1"], ["b", "2"], ["c", "1"]]
    assert made.command == old.command
    assert made.commit.startswith("older; b: ")
    with pytest.raises(SystemExit, match="d are no rows"):
        results.main(["slow", "--rows", "d"])


def test_results_say_when_where_and_by_which_command() -> None:
    for name in results.names():
        result = results.load(name)
        program, *words = result.command.split()
        what = words[0]
        if what == "-m":
            # A module of the tests, or pytest with the file of one.
            named = words[1] if words[1] != "pytest" else words[-1].removesuffix(".py")
            what = named.replace(".", "/") + ".py"
        assert program == "make" or (program == "python" and (ROOT / what).exists()), name
        assert result.commit and result.machine, name
        assert result.tables or result.figures, name
