"""Data that a script trains on besides plain text: packed documents, conversations, gaps to fill.

Documents that are packed are compared with the mask of `--reset-attention-mask` in Megatron's own
attention, which nothing of ours makes.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch

from megatron_hetero.errors import UsageError
from megatron_hetero.lab.verify.small.text import write_text_dataset
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.model.samples import datasets
from megatron_hetero.runtime.model.samples.packed import other_documents, packed_parameters
from tests.runtime.flag_runs import one_process_job, plan_and_one, plan_job, read_log
from tests.runtime.test_flag_files import LOSS, equal

LAYOUT = "tp1:1,tp2:2,tp1:1 @4 | tp1:4 @2"
"""With an inner stage, to which stock Megatron gives no batch."""
VALIDATION = r"validation loss at iteration \d+ .* lm loss value: (\S+)"
TEXT = (
    "--vocab-size=257", "--null-tokenizer-eod-id=256", "--init-method-std=0.3",
    "--position-embedding-type=rope",
)  # fmt: skip
CHAT = (
    "--sft", "--vocab-size=257", "--seq-length=48", "--max-position-embeddings=48",
    "--position-embedding-type=rope", "--init-method-std=0.3", "--eval-iters=1",
    "--eval-interval=2",
)  # fmt: skip


class Words:
    """Numbers of some words."""

    def tokens_to_ids(self, tokens: list[str]) -> list[int]:
        return [250 - place for place in range(len(tokens))]

    def ids_to_text(self, ids: Any, remove_special_tokens: bool) -> str:
        return "".join(map(chr, ids))

    def text_to_ids(self, text: str) -> list[int]:
        return list(map(ord, text))


class BytesOfConversations:
    """A tokenizer of text as bytes, of whose conversations the answers count."""

    eod, pad, vocab_size = 256, 0, 257
    unique_identifiers: ClassVar[dict[str, str]] = {"kind": "bytes"}
    _tokenizer = Words()

    def tokenize_conversation(self, conversation: list[dict[str, str]], **_: Any) -> Any:
        tokens: list[int] = []
        targets: list[int] = []
        for message in conversation:
            own = [*message["content"].encode(), self.eod]
            tokens += own
            targets += own if message["role"] == "assistant" else [-100] * len(own)
        return numpy.array(tokens), numpy.array(targets)


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forked, and have it too."""
    monkeypatch.setattr(datasets, "build_tokenizer", lambda args: BytesOfConversations())


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    write_text_dataset(tmp_path / "text", 6000)
    return [f"--data-path={tmp_path / 'text'}", "--split=100,0,0"]


@pytest.fixture
def chat(tmp_path: Path) -> list[str]:
    drawn = random.Random(1)
    words = ("stages", "of", "unlike", "depth", "read", "where", "documents", "begin")

    def said(number: int) -> str:
        return " ".join(drawn.choice(words) for _ in range(number))

    lines = []
    for _ in range(64):
        messages = []
        for _ in range(drawn.randint(1, 3)):
            messages.append({"role": "system", "content": "s"})
            messages.append({"role": "user", "content": said(1)})
            messages.append({"role": "assistant", "content": said(drawn.randint(1, 4))})
        lines.append(json.dumps({"messages": messages}))
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return [f"--data-path={path}", "--split=80,20,0"]


def test_packed_documents_on_every_stage(text: list[str], tmp_path: Path) -> None:
    ours = plan_job(tmp_path / "plan", [*TEXT, "--dataloader-inter-document-masking"], LAYOUT, text)
    masked = [*TEXT, "--reset-attention-mask", "--reset-position-ids"]
    one = one_process_job(tmp_path / "one", masked, LAYOUT, text)
    plain = one_process_job(tmp_path / "plain", TEXT, LAYOUT, text)
    run_jobs([ours, one, plain], 120)
    equal(read_log(ours), read_log(one), 3)
    assert read_log(plain).losses != pytest.approx(read_log(one).losses, rel=100 * LOSS)


@pytest.mark.slow
def test_conversations(tokenizer: None, chat: list[str], tmp_path: Path) -> None:
    """`--sft`: prompts do not count, and validation is the mean over micro-batches."""
    ours, one = plan_and_one(tmp_path / "one", CHAT, LAYOUT, chat)
    equal(ours, one, 3)
    assert len(ours.numbers(VALIDATION)) >= 2
    assert ours.numbers(VALIDATION) == pytest.approx(one.numbers(VALIDATION), rel=LOSS)
    # Two sequences in a micro-batch follow one another; validation has them one by one.
    wide = [*CHAT, "--micro-batch-size=2", "--global-batch-size=12", "--train-iters=2"]
    single, one_single = plan_and_one(
        tmp_path / "two", [*wide, "--eval-micro-batch-size=1"], LAYOUT, chat
    )
    equal(single, one_single, 2)
    assert single.numbers(VALIDATION) == pytest.approx(one_single.numbers(VALIDATION), rel=LOSS)
    double = one_process_job(tmp_path / "double", wide, LAYOUT, chat)
    run_jobs([double], 120)
    assert read_log(double).losses == pytest.approx(one_single.losses, rel=LOSS)
    seen = read_log(double).numbers(VALIDATION)
    assert seen != pytest.approx(one_single.numbers(VALIDATION), rel=2 * LOSS)


@pytest.mark.slow
def test_gaps_are_drawn_by_the_number_of_a_sample(
    tokenizer: None, text: list[str], tmp_path: Path
) -> None:
    """`--fim-data`: both ends of a pipeline, and all replicas, see the same gaps."""
    flags = ["--vocab-size=257", "--fim-data", "--fim-rate=0.9", "--fim-spm-rate=0.5"]
    ours, one = plan_and_one(tmp_path / "fim", flags, LAYOUT, text)
    equal(ours, one, 3)
    plain = one_process_job(tmp_path / "plain", ["--vocab-size=257"], LAYOUT, text)
    run_jobs([plain], 120)
    assert read_log(plain).losses != pytest.approx(one.losses, rel=100 * LOSS)


@pytest.mark.slow
def test_a_phase_begins_its_data_anew(text: list[str], tmp_path: Path) -> None:
    """`--phase-transition-iterations`: the job ends with a phase, and goes on with another."""
    flags = [
        "--vocab-size=257", "--train-samples=24", "--save=save", "--load=save",
        "--save-interval=100", "--phase-transition-iterations=2",
    ]  # fmt: skip
    first = plan_and_one(tmp_path, flags, LAYOUT, text)
    second = plan_and_one(tmp_path, flags, LAYOUT, text)
    for ours, one in (first, second):
        equal(ours, one, 2)
    whole = one_process_job(tmp_path / "whole", [*flags[:2]], LAYOUT, text)
    run_jobs([whole], 120)
    assert read_log(whole).losses[:2] == pytest.approx(first[1].losses, rel=LOSS)
    assert read_log(whole).losses[2:] != pytest.approx(second[1].losses, rel=100 * LOSS)


def test_what_a_token_must_not_see() -> None:
    mask = other_documents(torch.tensor([0, 2, 2, 3]))
    assert (~mask[0, 0]).long().tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize("starts", [[0, 5], [0, 5, 3, 8], [1, 8], [0, 0]])
def test_lengths_that_do_not_add_up(starts: list[int]) -> None:
    batch: dict[str, Any] = {"cu_seqlens": torch.tensor([starts]), "max_seqlen": torch.tensor([5])}
    with pytest.raises(UsageError, match="a multiple of --seq-length 8"):
        packed_parameters(batch, 8)
