"""Documents of indexed data: whole, in an order that does not depend on how many are asked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.utils import Split

from megatron_hetero.errors import FileFormatError, InfeasiblePlanError, UsageError
from megatron_hetero.runtime.sequences.documents import (
    DocumentDataset,
    Longest,
    check_documents,
    parts,
)
from tests.runtime.sequences.flexible_runs import write_documents

LENGTHS = (5, 1, 9, 3, 7, 2, 4)


def dataset(prefix: Path, indices: Any, num_samples: int | None = None, seed: int = 1) -> Any:
    config: Any = SimpleNamespace(
        random_seed=seed, sequence_length=8, split="1", split_matrix=None, mmap_bin_files=True,
        tokenizer=SimpleNamespace(unique_identifiers={}, eos=0, eod=0),
        allow_ambiguous_pad_tokens=False,
    )  # fmt: skip
    low = DocumentDataset.build_low_level_dataset(str(prefix), config)
    assert DocumentDataset.numel_low_level_dataset(low) == len(low.document_indices) - 1
    numbers = numpy.asarray(indices, dtype=numpy.int32)
    return DocumentDataset(low, str(prefix), numbers, num_samples, Split.train, config)


def test_every_epoch_has_every_document_once_and_whole(tmp_path: Path) -> None:
    written = write_documents(tmp_path / "text", LENGTHS)
    made = dataset(tmp_path / "text", range(7), 21)
    assert len(made) == 21
    epochs = [[made[7 * e + i]["name"] for i in range(7)] for e in range(3)]
    names = [f"document {d} of {tmp_path / 'text'}" for d in range(7)]
    assert all(sorted(epoch) == names for epoch in epochs)
    assert epochs[0] != epochs[1]
    for i in range(21):
        number = int(made[i]["name"].split()[1])
        assert made[i]["tokens"].tolist() == written[number].tolist()


def test_the_order_is_that_of_the_seed_alone(tmp_path: Path) -> None:
    """A job that goes on, or goes on for longer, reads what it would have read."""
    write_documents(tmp_path / "text", LENGTHS)
    short, long = (dataset(tmp_path / "text", range(7), n) for n in (10, 40))
    order = [long[i]["name"] for i in range(40)]
    assert [short[i]["name"] for i in range(10)] == order[:10]
    assert [long[i]["name"] for i in reversed(range(40))] == order[::-1]
    other = dataset(tmp_path / "text", range(7), 40, seed=2)
    assert [other[i]["name"] for i in range(40)] != order


def test_a_split_has_its_documents_and_none_that_is_empty(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(f"{tmp_path / 'text'}.bin", dtype=numpy.int32)
    for pieces in ([[1, 2], [3]], [], [[4]], [[5, 6, 7]]):
        for piece in pieces:
            builder.add_item(torch.tensor(piece))
        builder.end_document()
    builder.finalize(f"{tmp_path / 'text'}.idx")
    made = dataset(tmp_path / "text", range(3))
    assert sorted(made[i]["tokens"].tolist() for i in range(len(made))) == [[1, 2, 3], [4]]
    with pytest.raises(FileFormatError, match="its train split has no document with tokens"):
        dataset(tmp_path / "text", [1])


def test_a_document_that_is_too_long_is_named_before_the_first_step(tmp_path: Path) -> None:
    write_documents(tmp_path / "text", LENGTHS)
    made = dataset(tmp_path / "text", range(7))
    blend = SimpleNamespace(datasets=[made])
    check_documents(blend, [Longest(9, "it holds", "Cut it.")], 101)
    with pytest.raises(InfeasiblePlanError, match=r"document 2 of .*text has 9 tokens, and it hol"):
        check_documents(blend, [Longest(8, "it holds", "Cut it.")], 101)
    with pytest.raises(UsageError, match="another tokenizer"):
        check_documents(made, [], 50)
    with pytest.raises(UsageError, match="not on a SimpleNamespace"):
        list(parts(SimpleNamespace(datasets=[SimpleNamespace()])))
