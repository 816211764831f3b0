"""Plans and a cluster on disk for the tests of verbs."""

from __future__ import annotations

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.layout import parse_layout
from tests.cli.example import CLUSTER, MODEL, PLAN, QUICK, Printed

LAYOUT = "tp2:3,tp1:1 @4 | tp1:4 @2"


@pytest.fixture
def layout_plan(tmp_path: Path):
    """Writes the plan of a layout line and returns its path."""

    def write(layout: str = LAYOUT, name: str = "plan.json") -> Path:
        path = tmp_path / name
        save_plan(plan_from_layout(parse_layout(layout)), path)
        return path

    return write


@pytest.fixture(scope="session")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """The example's plan: written, and as `plan --json` printed it."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        assert main([*PLAN, "-o", str(path), "--json"]) == 0
    return Printed(path, out.getvalue(), err.getvalue())


@pytest.fixture
def plan_path(printed: Printed) -> Path:
    """The example's plan."""
    return printed.path


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Three of the GPUs and a plan of four of the layers, for verbs that plan again."""
    folder = tmp_path_factory.mktemp("small")
    cluster, path = folder / "cluster.yaml", folder / "plan.json"
    text = Path(CLUSTER).read_text()
    assert "count: 4" in text
    cluster.write_text(text.replace("count: 4", "count: 2"))
    words = ["plan", "--cluster", str(cluster), "--model", MODEL, *QUICK, "-o", str(path)]
    assert main([*words, "--json", "--", "--num-layers", "4"]) == 0
    return cluster, path
