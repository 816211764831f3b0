"""Plans and a cluster on disk for the tests of verbs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.layout import parse_layout

LAYOUT = "tp2:3,tp1:1 @4 | tp1:4 @2"


@pytest.fixture
def layout_plan(tmp_path: Path):
    """Writes the plan of a layout line and returns its path."""

    def write(layout: str = LAYOUT, name: str = "plan.json") -> Path:
        path = tmp_path / name
        save_plan(plan_from_layout(parse_layout(layout)), path)
        return path

    return write
