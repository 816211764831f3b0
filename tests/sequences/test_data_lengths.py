"""The lengths of documents of a data set that Megatron itself wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.sequences.lengths import read_lengths
from tools.sequence_lengths import main


def test_documents_are_counted_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = tmp_path / "text"
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    for document in ((5,), (3, 4), (7,), (5,)):
        for length in document:
            builder.add_item(torch.zeros(length, dtype=torch.int32))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    output = tmp_path / "lengths.txt"
    assert main([str(prefix), "-o", str(output)]) == 0
    found = read_lengths(output)
    assert (found.tokens, found.counts) == ((5, 7), (2, 2))
    assert "4 documents, 24 tokens" in capsys.readouterr().err
    (tmp_path / "text.idx").write_bytes(b"nothing of the kind")
    assert main([str(prefix)]) == 4
    assert "no index of Megatron's" in capsys.readouterr().err
    assert main([str(tmp_path / "none")]) == 4
