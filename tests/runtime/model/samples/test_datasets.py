"""Data sets that flags ask for, and files that cannot be what they are said to be."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.training.arguments import add_megatron_arguments
from megatron.training.datasets.fim_dataset import GPTFIMDatasetConfig

from megatron_hetero.errors import UsageError
from megatron_hetero.runtime.model.samples import datasets


@pytest.mark.parametrize("line", ["[]", "{}", "{"])
def test_a_line_that_is_no_conversation(line: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(f'{{"messages": []}}\n{line}\n')
    read = datasets.Conversations(str(path))
    assert len(read) == 2 and read[0] == []
    with pytest.raises(UsageError, match=r"chat\.jsonl, line 2"):
        read[1]
    with pytest.raises(UsageError, match="No such file"):
        datasets.Conversations(str(tmp_path / "none"))


def test_conversations_are_read_by_the_places_of_their_lines(tmp_path: Path) -> None:
    written = [[{"role": "user", "content": "wörter " * k}] for k in (3, 0, 700, 1)]
    path = tmp_path / "chat.jsonl"
    lines = [json.dumps({"messages": m}, ensure_ascii=bool(k % 2)) for k, m in enumerate(written)]
    path.write_text("\n".join(lines), encoding="utf-8")  # without an end of the last line
    read = datasets.Conversations(str(path))
    assert len(read) == 4
    for index in (2, 0, 3, 1, 2):
        assert read[index] == written[index]


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron's parser, and a tokenizer that is none."""
    none = SimpleNamespace(unique_identifiers={}, eod=0, vocab_size=100)
    monkeypatch.setattr(datasets, "build_tokenizer", lambda args: none)
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))

    def parsed(*flags: str) -> argparse.Namespace:
        return parser.parse_args(["--seq-length=16", *flags])

    return parsed


def test_data_sets_are_as_the_flags_say(parse: Any) -> None:
    found = datasets.dataset_config(parse("--mock-data", "--seed=9", "--eod-mask-loss"))
    assert type(found) is GPTDatasetConfig
    assert (found.random_seed, found.sequence_length, found.split) == (9, 16, "1,1,1")
    assert found.eod_mask_loss and found.create_attention_mask
    assert not found.reset_position_ids and found.mock
    packed = datasets.dataset_config(parse("--mock-data", "--dataloader-inter-document-masking"))
    assert packed.inter_document_masking and not packed.create_attention_mask


def test_gaps_to_fill_have_their_own_settings(parse: Any) -> None:
    found = datasets.dataset_config(parse("--mock-data", "--fim-data", "--fim-rate=0.25"))
    assert isinstance(found, GPTFIMDatasetConfig)
    assert found.fim_rate == 0.25
    assert set(found.fim_extra_tokens or {}) == {"prefix", "middle", "suffix", "pad", "eod"}


@pytest.mark.parametrize(
    ("text", "says"), [(None, "No such file"), ("{", "Expecting"), ("[1]", "an object by data set")]
)
def test_a_file_of_counts_that_is_none(
    text: str | None, says: str, parse: Any, tmp_path: Path
) -> None:
    path = tmp_path / "counts.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=rf"--per-dataset-sequences-path .*counts\.json: .*{says}"):
        datasets.dataset_config(parse("--mock-data", f"--per-dataset-sequences-path={path}"))
    path.write_text('{"a": [3, 2]}')
    found = datasets.dataset_config(parse("--mock-data", f"--per-dataset-sequences-path={path}"))
    assert found.sequences_per_dataset == {"a": [3, 2]}
