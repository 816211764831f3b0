"""The picture of a step of dealt sequences."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from megatron_hetero.report.page.dealt_step import dealt_step_figure
from megatron_hetero.sequences.deal.batch import deal_batch
from tools.referees.flexsp import published_tree

SVG = "{http://www.w3.org/2000/svg}"


def test_groups_stand_on_their_ranks_and_sequences_are_as_wide_as_they_take() -> None:
    tree = published_tree("GPT-7B", 8, 4096)
    lengths = [9000, 4000, 3000, 3000, 700, 40]
    deal = deal_batch(tree, lengths)
    figure = dealt_step_figure(tree, lengths, deal)
    shapes = ElementTree.fromstring(figure.standalone())
    assert f"{len(lengths)} sequences" in figure.alt
    blocks = {}
    for rect in shapes.iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        found = title is not None and re.match(
            r"([\d,]+) tokens on ranks (\d+) to (\d+)", title.text or ""
        )
        if found:
            key = int(found[1].replace(",", "")), int(found[2]), int(found[3])
            blocks[key] = float(rect.get("width", "0")), float(rect.get("height", "0"))
    assert blocks
    for (_, first, last), (_, height) in blocks.items():
        assert height == pytest.approx(26 * (last - first + 1) - 0.8, abs=0.2)
    spans = {(g.first, g.stop - 1) for m in deal.micro_batches for g in m.groups}
    assert {(first, last) for _, first, last in blocks} <= spans
    assert {length for length, _, _ in blocks} >= {9000, 4000, 700}
    for micro_batch in deal.micro_batches:
        for group in micro_batch.groups:
            wide = [
                blocks[lengths[k], group.first, group.stop - 1][0]
                for k in sorted(group.sequences, key=lambda k: -lengths[k])
                if (lengths[k], group.first, group.stop - 1) in blocks
            ]
            assert wide == sorted(wide, reverse=True)
