"""`data`: what is written is what Megatron reads back; bad lines are named, nothing is half."""

from __future__ import annotations

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_hetero.cli.main import main
from megatron_hetero.errors import EnvironmentMismatchError, FileFormatError, UsageError
from megatron_hetero.lab.data import command
from megatron_hetero.lab.data.command import DataRequest, write_data
from megatron_hetero.lab.data.encode import byte_tokens, tokenizer_of
from megatron_hetero.runtime.job.checks import needs
from megatron_hetero.runtime.job.local.jobs import RankFailedError
from megatron_hetero.runtime.job.local.launch import run_jobs
from tests.runtime.flag_runs import plan_job, read_log

LINES = [
    '{"text": "Grüße"}', '{"text": ', "[1, 2]", '{"title": "x"}', '{"text": 3}', '{"text": ""}', "",
    '{"text": "two\\nlines", "id": 7}',
]  # fmt: skip


def read(prefix: Path, key: str = "text") -> list[list[int]]:
    data = IndexedDataset(str(prefix.with_name(f"{prefix.name}_{key}_document")))
    assert len(data.document_indices) - 1 == len(data)
    return [data[i].tolist() for i in range(len(data))]


def test_documents_of_json_lines_and_why_others_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes("\n".join(LINES).encode() + b"\n\xff\n")
    written = write_data(DataRequest((file,), tmp_path / "out" / "a", None))
    assert read(tmp_path / "out" / "a") == [byte_tokens("Grüße"), byte_tokens("two\nlines")]
    assert (written.num_documents, written.num_left_out) == (2, 6)
    assert written.num_tokens == sum(map(len, read(tmp_path / "out" / "a")))
    assert [fault.partition(": ")[0] for fault in written.faults] == [
        f"{file}:{n}" for n in (2, 3, 4, 5, 6)
    ]
    assert [fault.partition(": ")[2][:12] for fault in written.faults[1:]] == [
        "not a JSON o", 'no key "text', '"text" is no', '"text" is em',
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("cut", "texts"),
    [
        ("paragraph", ["a\nb", "c", "d"]),
        ("line", ["a", "b", "c", "d"]),
        ("file", ["a\nb\n\n\nc\n \nd"]),
    ],
)
def test_plain_text_is_cut_where_asked(cut: str, texts: list[str], tmp_path: Path) -> None:
    file = tmp_path / "a.txt.gz"
    file.write_bytes(gzip.compress(b"a\nb\n\n\nc\n \nd\n"))
    write_data(DataRequest((file,), tmp_path / "a", None, cut=cut))  # type: ignore[arg-type]
    assert read(tmp_path / "a") == [byte_tokens(text) for text in texts]


def test_workers_change_nothing(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"body": "x" * (n % 50)}) + "\n" for n in range(1500)))
    for workers in (1, 2):
        request = DataRequest((file, file), tmp_path / str(workers), None, "body", workers=workers)
        assert write_data(request).num_left_out == 60
    ends = [(tmp_path / f"{n}_body_document.bin").read_bytes() for n in (1, 2)]
    assert ends[0] == ends[1]
    assert read(tmp_path / "1", "body") == read(tmp_path / "2", "body")


def test_nothing_half_is_left(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(LINES))
    with pytest.raises(FileFormatError, match=r"a\.jsonl:2: not JSON"):
        write_data(DataRequest((file,), tmp_path / "a", None, strict=True))
    with pytest.raises(FileFormatError, match="none of the documents"):
        write_data(DataRequest((file,), tmp_path / "a", None, key="of nobody"))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"a\n\n" * 9999)[:-20])
    with pytest.raises(FileFormatError, match=r"b\.txt\.gz: it cannot be read"):
        write_data(DataRequest((tmp_path / "b.txt.gz",), tmp_path / "a", None))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.txt.gz"]
    write_data(DataRequest((file,), tmp_path / "a", None))
    before = (tmp_path / "a_text_document.bin").read_bytes()
    with pytest.raises(UsageError, match="is there already"):
        write_data(DataRequest((file,), tmp_path / "a", None))
    assert (tmp_path / "a_text_document.bin").read_bytes() == before


def test_a_packed_file_with_other_bytes_in_its_middle(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(bytes(range(256))))
    packed[10:50] = b"\xff" * 40  # behind the header: a block of a kind that there is not
    (tmp_path / "b.txt.gz").write_bytes(packed)
    with pytest.raises(FileFormatError, match=r"b\.txt\.gz: it cannot be read"):
        write_data(DataRequest((tmp_path / "b.txt.gz",), tmp_path / "a", None))


def test_a_worker_that_is_killed_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system ends processes for want of memory; `multiprocessing.Pool` would wait forever."""
    file = tmp_path / "a.txt"
    file.write_text("a\n\ndie\n\nb\n\n")

    def die_at_a_word(text: str) -> list[int]:
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return byte_tokens(text)

    monkeypatch.setattr(command, "byte_tokens", die_at_a_word)
    with pytest.raises(RankFailedError, match="Give fewer than --workers 2"):
        write_data(DataRequest((file,), tmp_path / "a", None, workers=2))
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_ctrl_c_ends_workers_without_a_word(tmp_path: Path) -> None:
    """The terminal interrupts them all; one line answers, no worker shows a traceback."""
    file = tmp_path / "a.txt"
    file.write_text("a\n\n")
    code = (
        "import os, signal, sys\n"
        "from megatron_hetero.lab.data import command\n"
        "from megatron_hetero.cli.main import main\n"
        "command.byte_tokens = lambda text: os.killpg(0, signal.SIGINT) or signal.pause()\n"
        f"sys.exit(main(['data', {str(file)!r}, '-o', {str(tmp_path / 'a')!r}, '--bytes', "
        "'--workers', '2']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, start_new_session=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 130
    assert done.stderr.count("interrupted:") == 1
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """They would wait for work forever, and keep the pipe of stdout open."""
    file = tmp_path / "a.txt"
    file.write_text("a\n\n")
    code = (
        "import os, signal, sys, time\n"
        "from megatron_hetero.lab.data import command\n"
        "from megatron_hetero.cli.main import main\n"
        "command.byte_tokens = lambda text: os.kill(os.getppid(), signal.SIGKILL) or [1]\n"
        f"main(['data', {str(file)!r}, '-o', {str(tmp_path / 'a')!r}, '--bytes', '--workers', '2'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=50, check=False
    )
    assert done.returncode == -signal.SIGKILL


def test_names_and_places_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.txt"
    file.write_text("a\n\n")

    def refusal(*words: str) -> tuple[int, str]:
        status = main(["data", str(file), "--bytes", *words])
        return status, capsys.readouterr().err

    for name in (".", ".."):
        status, said = refusal("-o", name)
        assert status == 2
        assert "name the files" in said
    status, said = refusal("-o", str(tmp_path / "b"), "--key", "meta/text")
    assert (status, "--key 'meta/text'" in said) == (2, True)
    status, said = refusal("-o", str(file / "b"))
    assert (status, "the folder cannot be made" in said) == (4, True)
    monkeypatch.setattr(command, "_add", no_space)
    status, said = refusal("-o", str(tmp_path / "b"))
    assert (status, "b_text_document: cannot be written: No space left" in said) == (4, True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def no_space(*unused: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_megatrons_own_tokenizer(tmp_path: Path) -> None:
    """Numbers are the tokens of Megatron's NullTokenizer; one outside of its vocabulary is none."""
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "5 6 7"}\n{"text": "five"}\n{"text": "5 99999"}\n')
    flags = ("--tokenizer-type=NullTokenizer", "--vocab-size=100")
    written = write_data(DataRequest((file,), tmp_path / "a", flags))
    assert read(tmp_path / "a") == [[5, 6, 7, 99]]
    assert "the tokenizer refuses it" in written.faults[0]
    assert "outside of the vocabulary of 100" in written.faults[1]


def test_a_text_without_tokens_is_no_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blanks alone would become a document of its end, which `preprocess_data.py` never writes."""
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "5 6"}\n{"text": "  "}\n{"text": "7"}\n')

    def encode(text: str) -> list[int]:
        return [*map(int, text.split()), 99]

    monkeypatch.setattr(command, "tokenizer_of", lambda flags: (encode, 100))
    written = write_data(DataRequest((file,), tmp_path / "a", ()))
    assert read(tmp_path / "a") == [[5, 6, 99], [7, 99]]
    assert written.faults == [f"{file}:2: the tokenizer finds no token in it"]


def test_a_tokenizer_that_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="name the tokenizer"):
        tokenizer_of(())
    monkeypatch.setattr(needs, "_is_installed", lambda package: False)
    with pytest.raises(EnvironmentMismatchError, match="pip install sentencepiece"):
        tokenizer_of(("--tokenizer-type=Llama2Tokenizer", "--tokenizer-model=x"))


def test_the_door(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(LINES))
    assert main(["data", str(file), "-o", str(tmp_path / "a"), "--bytes", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["documents"], data["left_out"]) == (2, 5)
    assert data["flags"][:2] == ["--data-path", str(tmp_path / "a_text_document")]
    assert main(["data", str(file), "-o", str(tmp_path / "a"), "--bytes"]) == 2
    assert main(["data", str(file), "-o", str(tmp_path / "b"), "--bytes", "--seed", "1"]) == 2
    assert main(["data", str(tmp_path / "none"), "-o", str(tmp_path / "b"), "--bytes"]) == 2


def test_planning_imports_no_torch_for_it() -> None:
    code = "import sys, megatron_hetero.cli.data; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_job_trains_on_it(tmp_path: Path) -> None:
    """A job reads the data with the flags that the verb prints."""
    request = DataRequest((Path(__file__),), tmp_path / "a", None, cut="line")
    write_data(request)
    flags = ["--data-path", str(request.data_path), "--split=1,0,0", "--vocab-size=257"]
    job = plan_job(tmp_path / "plan", flags, data=())
    run_jobs([job], 120)
    losses = read_log(job).losses
    assert len(losses) == 3 and losses[-1] < losses[0]
