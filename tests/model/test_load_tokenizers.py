"""The size of the vocabulary, as the flags of a tokenizer say it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_hetero.errors import ModelError
from megatron_hetero.model.load import load_workload
from tests.model.test_load import MINIMAL

WITHOUT_VOCABULARY = [*MINIMAL[:10], *MINIMAL[12:]]


@pytest.mark.parametrize(
    ("flags", "size", "note"),
    [
        ("--tokenizer-type GPT2BPETokenizer --vocab-file no/file.json", 50257, "assumed"),
        ("--vocab-file no/vocab.json --merge-file no/merges.txt", 50257, "assumed"),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model no/file", 32000, "assumed"),
        (
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B",
            128256,
            "assumed",
        ),
        ("--tokenizer-type TikTokenizer --tokenizer-model no/file.json", 131072, "default"),
    ],
)
def test_a_tokenizer_says_the_vocabulary(flags: str, size: int, note: str) -> None:
    workload = load_workload(None, [*WITHOUT_VOCABULARY, *flags.split()])
    assert workload.model.vocab_size == size
    assert f"vocabulary of {size}: " in workload.source
    assert note in workload.source
    assert "--vocab-size" not in workload.megatron_args


def test_a_long_tokenizer_is_counted(tmp_path: Path) -> None:
    """That of GPT-OSS has 28 MB, and 1.5 million values with its merges as pairs."""
    vocabulary = {f"token-{number}": number for number in range(1000)}
    merges = [["token" * 4, "merge" * 4]] * 400_000
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": vocabulary, "merges": merges}, "added_tokens": []})
    )
    assert (tmp_path / "tokenizer.json").stat().st_size > 16 << 20
    flags = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}"
    workload = load_workload(None, [*WITHOUT_VOCABULARY, *flags.split()])
    assert workload.model.vocab_size == 1000


@pytest.mark.parametrize("text", ["[" * 1_000_000, "{", '{"model": [1]}', '{"added_tokens": [{}]}'])
def test_a_broken_tokenizer_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    flags = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {path}"
    with pytest.raises(ModelError, match="the vocabulary cannot be counted"):
        load_workload(None, [*WITHOUT_VOCABULARY, *flags.split()])


def test_a_tokenizer_that_only_the_shell_knows(tmp_path: Path) -> None:
    """As in NVIDIA's scripts, whose files are parameters of the script."""
    path = tmp_path / "train.sh"
    path.write_text(
        "VOCAB_FILE=$1\nMERGE_FILE=$2\ntorchrun pretrain_gpt.py "
        + " ".join(WITHOUT_VOCABULARY)
        + " --vocab-file $VOCAB_FILE --merge-file $MERGE_FILE\n"
    )
    workload = load_workload(path)
    assert workload.model.vocab_size == 50257
    assert workload.unread_flags == ("--vocab-file", "--merge-file")


@pytest.mark.parametrize("kind", ["NullTokenizer", "GPTSentencePieceTokenizer"])
def test_a_tokenizer_that_does_not_say_it(kind: str) -> None:
    flags = [*WITHOUT_VOCABULARY, "--tokenizer-type", kind, "--tokenizer-model", "no/file"]
    with pytest.raises(ModelError, match="--vocab-size"):
        load_workload(None, flags)


def test_files_of_tokenizers_are_counted(tmp_path: Path) -> None:
    pieces = [b"\x0a\x03abc", b"\x0a\x01d\x15\x00\x00\x80\xbf"]
    model = b"".join(b"\x0a" + bytes([len(p)]) + p for p in pieces) + b"\x12\x02\x08\x01"
    (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "c": 2}')
    added = '[{"id": 1, "content": "b"}, {"id": 2, "content": "<eos>"}]'
    (tmp_path / "tokenizer.json").write_text(
        f'{{"added_tokens": {added}, "model": {{"vocab": {{"a": 0, "b": 1}}}}}}'
    )
    for flags, size in (
        (f"--tokenizer-type Llama2Tokenizer --tokenizer-model {tmp_path}/tokenizer.model", 2),
        (f"--tokenizer-type GPT2BPETokenizer --vocab-file {tmp_path}/vocab.json", 3),
        (f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}", 3),
    ):
        workload = load_workload(None, [*WITHOUT_VOCABULARY, *flags.split()])
        assert workload.model.vocab_size == size
        assert f"counted in {tmp_path}" in workload.source
    (tmp_path / "tokenizer.model").write_bytes(model[:-1])
    flags = f"--tokenizer-type Llama2Tokenizer --tokenizer-model {tmp_path}/tokenizer.model"
    with pytest.raises(ModelError, match=r"cut off.*--vocab-size N"):
        load_workload(None, [*WITHOUT_VOCABULARY, *flags.split()])
