"""`init`: its questions, on a real terminal too, and the flags that answer them without one."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_hetero.cli.ask_cluster import ask_cluster
from megatron_hetero.cli.main import main
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.inventory.text import cluster_yaml
from megatron_hetero.errors import UsageError


class Person:
    """Answers questions by what they begin with, each answer once; Enter for the others."""

    def __init__(self, **answers: list[str]) -> None:
        self.answers = {key.replace("_", " "): list(texts) for key, texts in answers.items()}
        self.asked: list[str] = []
        self.told: list[str] = []

    def read(self, question: str) -> str:
        self.asked.append(question)
        assert len(self.asked) < 200, self.told
        for start, texts in self.answers.items():
            if question.lower().startswith(start.lower()) and texts:
                return texts.pop(0)
        return ""

    def cluster(self, tmp_path: Path):
        draft = ask_cluster(self.read, self.told.append)
        path = tmp_path / "cluster.yaml"
        path.write_text(cluster_yaml(draft.nodes, "from a test", draft.network))
        return load_cluster(path)


def test_enter_all_the_way_gives_a_file_that_loads(tmp_path: Path) -> None:
    person = Person()
    (node,) = person.cluster(tmp_path).nodes
    assert (node.name, node.gpu_type.name, node.num_gpus) == ("rtx-4090-0", "RTX-4090", 4)
    assert person.told == []
    assert all(question.rstrip().endswith("]:") for question in person.asked)  # a default each


def test_sites_kinds_and_an_own_type(tmp_path: Path) -> None:
    person = Person(
        How_many_sites=["2"],
        Name_of_site=["lab", "attic"],
        How_many_kinds_of_machines_at_lab=["2"],
        GPU_of_kind_1_at_lab=["h100-sxm"],
        GPU_of_kind_2_at_lab=["own"],
        Its_name=["BIG-CARD"],
        Its_memory_bandwidth=["2 TB/s"],
        Its_memory=["48 GB"],
        Its_dense=["200 TFLOPS"],
        Its_communication=["rccl"],
        GPUs_in_one_machine_of_kind_1_at_lab=["8"],
        GPUs_in_one_machine=["1", "2"],
        How_many_such_machines_at_lab=["2"],
        Host_name=["h0", "h1"],
        Between_two_machines_at_lab=["100 Gb/s", "4 us"],
        Between_lab_and_attic=["2 Gb/s", "20 ms"],
    )
    cluster = person.cluster(tmp_path)
    assert [(n.name, n.gpu_type.name, n.num_gpus, n.site) for n in cluster.nodes] == [
        ("h0", "H100-80GB", 8, "lab"),
        ("h1", "H100-80GB", 8, "lab"),
        ("big-card-0", "BIG-CARD", 1, "lab"),
        ("rtx-4090-0", "RTX-4090", 2, "attic"),
    ]
    own = cluster.node_by_name["big-card-0"].gpu_type
    assert (own.memory_bytes, own.memory_bytes_per_s, own.library) == (48 * 10**9, 2e12, "RCCL")
    assert cluster.node_links["h0", "h1"].bytes_per_s == 12.5e9
    assert cluster.node_links["h0", "rtx-4090-0"].latency_s == pytest.approx(0.02)
    assert cluster.nodes[0].link.bytes_per_s == 408e9  # of 450 what NCCL reaches in its table


def test_an_unknown_makers_library_has_to_be_said(tmp_path: Path) -> None:
    person = Person(GPU_of_kind_1=["own"], Its_communication=["", "nccl"])
    (node,) = person.cluster(tmp_path).nodes
    assert (node.gpu_type.name, node.gpu_type.library) == ("MY-CARD", "NCCL")
    assert ["name shows no maker" in told for told in person.told] == [True]
    known = Person(GPU_of_kind_1=["own"], Its_name=["Instinct-MI-400"])
    (node,) = known.cluster(tmp_path).nodes
    assert (node.gpu_type.library, known.told) == ("RCCL", [])


def test_an_answer_that_cannot_be_is_explained_and_asked_again(tmp_path: Path) -> None:
    person = Person(
        How_many_sites=["none", "0", "-1", "999", "1"],
        GPU_of_kind_1=["A100", "Gaudi2", "a100 80gb"],
        GPUs_in_one=["65", "2"],
        Between_two_GPUs_of_a_machine=["25", "25 Gb/s", "3"],
        Host_name=["-x", "a b", "ok"],
    )
    (node,) = person.cluster(tmp_path).nodes
    assert (node.name, node.gpu_type.name, node.num_gpus) == ("ok", "A100-80GB", 2)
    said = "\n".join(person.told)
    for words in ("'999' is not a number from 1 to 32", '"A100-40GB-PCIe" or "A100-80GB"',
                  "could not train: Gaudi2", "'65' is not a number", "without a unit",
                  '"-x" is not a host name'):  # fmt: skip
        assert words in said, words


def test_the_same_name_is_not_taken_twice(tmp_path: Path) -> None:
    person = Person(How_many_such=["2"], Host_name=["a", "A", "b"])
    assert [n.name for n in person.cluster(tmp_path).nodes] == ["a", "b"]
    assert '"A" is a machine already' in person.told[0]


def test_answers_that_end_leave_nothing() -> None:
    answers: Iterator[str] = iter(["2"])

    def read(question: str) -> str:
        try:
            return next(answers)
        except StopIteration:
            raise EOFError from None

    with pytest.raises(UsageError, match="the answers ended at: Name of site 1"):
        ask_cluster(read, lambda words: None)


def on_a_terminal(words: list[str], cwd: Path, answer: bytes | None) -> tuple[int, str]:
    """Run a command line on a terminal of its own; `answer` each question, None for Ctrl-C."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_hetero", *words],
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd, close_fds=True,
        env={**os.environ, "TERM": "dumb"},
    )  # fmt: skip
    os.close(theirs)
    shown, ends = b"", time.monotonic() + 60
    try:
        while time.monotonic() < ends:
            if not select.select([ours], [], [], 1)[0]:
                # Python loses the one that comes between its prompt and its read.
                if answer is None and b"]:" in shown:
                    process.send_signal(signal.SIGINT)
                continue
            try:
                more = os.read(ours, 4096)
            except OSError:  # the other side has closed
                break
            if not more:
                break
            shown += more
            if shown.rstrip(b" ").endswith(b"]:"):
                if answer is None:
                    process.send_signal(signal.SIGINT)
                else:
                    os.write(ours, answer)
                shown += b"\n"
        return process.wait(30), shown.decode()
    finally:
        process.kill()
        os.close(ours)


def test_on_a_terminal_it_asks_and_writes(tmp_path: Path) -> None:
    code, shown = on_a_terminal(["init"], tmp_path, b"\n")
    assert code == 0, shown
    assert "How many sites have machines [1]:" in shown
    assert load_cluster(tmp_path / "cluster.yaml").nodes[0].gpu_type.name == "RTX-4090"
    code, shown = on_a_terminal(["init"], tmp_path, b"\n")
    assert code == 2 and "How many" not in shown  # said before anybody answers


def test_ctrl_c_at_a_question_leaves_nothing(tmp_path: Path) -> None:
    code, shown = on_a_terminal(["init"], tmp_path, None)
    assert code == 130, shown
    assert "interrupted" in shown and not (tmp_path / "cluster.yaml").exists()


def test_without_a_terminal_it_says_what_to_give(tmp_path: Path, capsys) -> None:
    assert main(["init", "-o", str(tmp_path / "c.yaml")]) == 2
    assert "--from-slurm" in capsys.readouterr().err


def test_flags_answer_the_same_questions(tmp_path: Path) -> None:
    output = tmp_path / "c.yaml"
    words = ["init", "--node", "a=8xH100@lab", "--node", "b=1xMY@lab", "--node", "c=2xrtx 4090@far",
             "--own-type", "MY=24 GB,900 GB/s,120 TFLOPS,RCCL",
             "--between-nodes", "lab=25 Gb/s,3 us",
             "--between-sites", "lab,far=1 Gb/s,8 ms", "-o", str(output)]  # fmt: skip
    assert main(words) == 0
    cluster = load_cluster(output)
    assert [n.site for n in cluster.nodes] == ["lab", "lab", "far"]
    assert cluster.node_by_name["b"].gpu_type.library == "RCCL"
    assert cluster.node_links["a", "b"].bytes_per_s == 3.125e9
    assert cluster.node_links["c", "a"].latency_s == pytest.approx(0.008)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--from-slurm", "x"], "give one of them"),
        (["--between-nodes", "far=1 Gb/s,1 us"], 'there is no site "far"'),
        (["--between-nodes", "25,1 us"], "without a unit"),
        (["--between-nodes", "25 Gb/s"], "write BANDWIDTH,LATENCY"),
        (["--between-sites", "main,main=1 Gb/s,1 us"], "name two sites"),
        (["--own-type", "X=1 GB,2 GB/s"], "write NAME=MEMORY"),
        (["--own-type", "X=1 GB,2 GB/s,3 TFLOPS,MPI"], "a library is one of NCCL"),
        (["--gpu-name", "a100"], "write NAME=VALUE"),
    ],
)
def test_flags_that_cannot_be(more: list[str], words: str, tmp_path: Path, capsys) -> None:
    output = tmp_path / "c.yaml"
    assert main(["init", "--node", "a=8xH100", *more, "-o", str(output)]) == 2
    assert words in capsys.readouterr().err
    assert not output.exists()


def test_a_gpu_that_the_catalogue_lacks_is_answered_with_the_flag(tmp_path: Path, capsys) -> None:
    output = tmp_path / "c.yaml"
    assert main(["init", "--node", "a=2xMyGPU", "-o", str(output)]) == 4
    assert "--own-type MyGPU=24 GB,900 GB/s,120 TFLOPS,NCCL" in capsys.readouterr().err


def test_unlike_gpus_of_one_machine_are_one_answer(tmp_path: Path) -> None:
    person = Person(
        GPU_of_kind_1=["1xRTX-4090+RTX-3090", "1xRTX-4090+2xown", "1x rtx 4090 + 2xRTX-3090"],
        Between_two_unlike_GPUs_of_a_machine=["10 GB/s", "9 us"],
        Host_name=["box"],
    )
    cluster = person.cluster(tmp_path)
    assert [d.name for d in cluster.devices] == ["box:0", "box:1", "box:2"]
    kinds = [cluster.gpu_type(device).name for device in cluster.devices]
    assert kinds == ["RTX-4090", "RTX-3090", "RTX-3090"]
    assert cluster.link(cluster.devices[0], cluster.devices[1]).bytes_per_s == 10e9
    assert "'RTX-3090' is not COUNTxGPU" in person.told[0]
    assert "describe the GPU as a kind of its own first" in person.told[1]


def test_nics_and_prices_of_machines(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    code = main(
        ["init", "--node", "a[0-1]=8xA100-80GB", "--node", "b=4xRTX-4090", "-o", str(path),
         "--nics", "a[0-1]=4x200 Gb/s", "--price", "12.50", "--price", "RTX-4090=1.2"]
    )  # fmt: skip
    assert code == 0
    nodes = {node.name: node for node in load_cluster(path).nodes}
    assert [nodes[name].price_per_hour for name in ("a0", "a1", "b")] == [12.5, 12.5, 1.2]
    nics = nodes["a1"].nics
    assert nics is not None and nics.near == (0, 0, 1, 1, 2, 2, 3, 3)
    assert nics.bytes_per_s == 25e9 and nodes["b"].nics is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nics", "c=2x100 Gb/s"], "there is no machine, site or GPU c in the list; it has a"),
        (["--nics", "200 Gb/s"], "write COUNTxBANDWIDTH"),
        (["--nics", "8x200 Gb/s"], "machine a has 4 GPUs"),
        (["--nics", "2x200"], "--nics 2x200: "),
        (["--price", "a=cheap"], "write a number for an hour"),
        (["--price", "RTX-9999=3"], "there is no machine, site or GPU RTX-9999"),
        (["--free"], "--free goes with --from-slurm"),
        (["--gpu-name", "a=A100-80GB"], "--gpu-name goes with --from-slurm or"),
    ],
)
def test_nics_and_prices_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    path = tmp_path / "cluster.yaml"
    assert main(["init", "--node", "a=4xA100-80GB", "-o", str(path), *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split()) and not path.exists()


def test_an_own_type_without_a_maker_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    assert main(
        ["init", "--node", "a=2xMY", "--own-type", "MY=24 GB,900 GB/s,120 TFLOPS", "-o", str(path)]
    ) == 2  # fmt: skip
    assert "the name shows no maker" in capsys.readouterr().err and not path.exists()


OWN = ("--own-type", "MY=24 GB,900 GB/s,120 TFLOPS,NCCL")


@pytest.mark.parametrize(
    "words",
    [OWN, ("--between-nodes", "25 Gb/s,30 us"), ("--between-sites", "a,b=1 Gb/s,8 ms")],
)
def test_what_the_questions_ask_for_is_not_taken_in_silence(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    # Refused before anything is asked, on a terminal and without one.
    assert main(["init", *words]) == 2
    assert f"{words[0]} goes with --node" in capsys.readouterr().err


def test_an_own_type_is_not_ignored_beside_a_scheduler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nodes.txt"
    path.write_text("NodeName=a\n Gres=gpu:a100:4\n State=IDLE\n")
    assert main(["init", "--from-slurm", str(path), *OWN]) == 2
    assert "--own-type goes with --node" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("--node", "a=1xA10"), ("--from-slurm", "x"), ("--from-kubernetes", "x"),
        ("--from-skypilot", "x"), ("--nics", "2x100 Gb/s"), ("--price", "3"), OWN, ("--free",),
        ("--gpu-name", "a=A10"), ("--between-nodes", "1 Gb/s,1 us"),
        ("--between-sites", "a,b=1 Gb/s,1 ms"),
    ],
)  # fmt: skip
def test_a_job_refuses_what_describes_a_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    path = tmp_path / "train.sh"
    flags = ["--", "--num-layers=2", "--hidden-size=64", "--num-attention-heads=4"]
    assert main(["init", "--job", "-o", str(path), *words, *flags]) == 2
    assert f"{words[0]} describes a cluster" in capsys.readouterr().err and not path.exists()


def slurm_list(*names: str, gres: str = "gpu:h200:8") -> str:
    """Return the lines of `scontrol show nodes` that count here."""
    return "\n".join(f"NodeName={name} Gres={gres}\n   State=IDLE\n" for name in names)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (slurm_list("a", "b", "a"), 'list.txt: 1 of the machines is there more than once ("a")'),
        (
            slurm_list(*(f"n{i}" for i in range(8193))),
            "list.txt: 8193 machines with GPUs; a cluster file has at most 8192",
        ),
        (slurm_list("a", gres="gpu:h200:0"), "no node with GPUs is in use"),
    ],
    ids=["twice", "too many", "no cards"],
)
def test_a_list_that_no_file_can_hold_is_named(
    text: str, words: str, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the list; it used to name a line of a file that was never kept."""
    monkeypatch.chdir(tmp_path)
    Path("list.txt").write_text(text)
    assert main(["init", "--from-slurm", "list.txt"]) == 4
    assert words in " ".join(capsys.readouterr().err.split())
    assert not Path("cluster.yaml").exists()


def test_too_many_entries_are_counted(tmp_path: Path, capsys) -> None:
    path = tmp_path / "cluster.yaml"
    lines = [f"  - {{name: n{i}, gpu: L4, count: 1}}" for i in range(8193)]
    path.write_text("\n".join(["version: 1", "nodes:", *lines]))
    assert main(["plan", "--memory", "--model", "m.sh", "--cluster", str(path)]) == 4
    assert "nodes: has 8193 entries; at most 8192 are read" in capsys.readouterr().err
