"""Nodes from `scontrol show nodes`: what it prints, and what it never would."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.inventory.draft import link_guess
from megatron_hetero.cluster.inventory.slurm import nodes_from_slurm
from megatron_hetero.errors import ClusterError, FileFormatError

# As Slurm 23.11 prints it, shortened.
NODES = """\
NodeName=gpu-a01 Arch=x86_64 CoresPerSocket=32
   CPUAlloc=0 CPUEfctv=128 CPUTot=128 CPULoad=0.01
   AvailableFeatures=a100,ib
   ActiveFeatures=a100,ib
   Gres=gpu:a100:4(S:0-1)
   NodeAddr=gpu-a01 NodeHostName=gpu-a01 Version=23.11.4
   OS=Linux 5.15.0-91-generic #101-Ubuntu SMP Tue Nov 14 13:30:08 UTC 2023
   RealMemory=1031000 AllocMem=0 FreeMem=1007421 Sockets=2 Boards=1
   State=IDLE ThreadsPerCore=2 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=gpu
   CfgTRES=cpu=128,mem=1031000M,billing=128,gres/gpu=4

NodeName=gpu-r01 Arch=x86_64 CoresPerSocket=16
   Gres=gpu:rtx_4090:2(S:0),gpu:t4:1,shard:8
   State=MIXED+PLANNED ThreadsPerCore=2
   Reason=Gres=gpu:evil:8 NodeName=not-a-node

NodeName=gpu-d01 Arch=x86_64
   Gres=gpu:nvidia_h100_80gb_hbm3:8(S:0,1)
   State=DOWN*+DRAIN ThreadsPerCore=2

NodeName=gpu-h01 Arch=x86_64
   Gres=gpu:nvidia_h100_80gb_hbm3:8(S:0,1-2)
   State=ALLOCATED ThreadsPerCore=2

NodeName=cpu-001 Arch=x86_64
   Gres=(null)
   State=IDLE ThreadsPerCore=2
"""
A100 = {"a100": "A100-80GB"}


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "nodes.txt"
    path.write_text(text)
    return path


@pytest.mark.parametrize("one_line", [False, True])
def test_nodes_with_gpus_in_use_are_taken(tmp_path: Path, one_line: bool) -> None:
    text = NODES
    if one_line:  # scontrol -o
        text = "\n".join(" ".join(b.split("\n   ")) for b in NODES.strip().split("\n\n"))
    found = nodes_from_slurm(written(tmp_path, text), A100)
    assert [(n.name, [(c.gpu, c.count) for c in n.cards]) for n in found.nodes] == [
        ("gpu-a01", [("A100-80GB", 4)]),
        ("gpu-r01", [("RTX-4090", 2), ("T4", 1)]),
        ("gpu-h01", [("H100-80GB", 8)]),
    ]
    assert found.notes == (
        "gpu-r01 has unlike GPUs, written in the order of its Gres; put them in that of the PCI "
        "bus (`nvidia-smi -L` there)",
        "gpu-r01 is taken with all its GPUs: how many of its GPUs are free is not known, for "
        "Slurm's TRES do not count them; `scontrol show nodes -d` does, as GresUsed",
        "gpu-d01 is left out: its state is DOWN*+DRAIN",
        "Slurm's partitions, for `launch --for slurm`: --partition A100-80GB=gpu",
        "3 nodes are taken, 1 without GPUs left out",
    )


def test_init_writes_a_file_that_loads(tmp_path: Path, capsys) -> None:
    path, output = written(tmp_path, NODES), tmp_path / "cluster.yaml"
    words = ["init", "--from-slurm", str(path), "-o", str(output)]
    assert main(words) == 4
    said = capsys.readouterr().err
    assert (
        '"a100" could be A100-40GB or A100-40GB-PCIe or A100-80GB or' in said
        and "--gpu-name a100=" in said
    )
    assert not output.exists()
    network = ["--between-nodes", "100 Gb/s,4 us"]
    assert main([*words, "--gpu-name", "a100=A100-80GB", *network]) == 0
    cluster = load_cluster(output)
    assert cluster.node_links["gpu-a01", "gpu-h01"].bytes_per_s == 12.5e9
    # What collectives reach of the sheet's 300 GB/s.
    reached = cluster.node_by_name["gpu-a01"].link.bytes_per_s
    assert link_guess("A100-80GB")[0] == f"{reached / 1e9:.0f} GB/s"
    kinds = {name: cluster.node_of(name).gpu_type.name for name in cluster.device_by_name}
    assert [kinds[f"gpu-r01:{i}"] for i in range(3)] == ["RTX-4090", "RTX-4090", "T4"]
    assert main([*words, "--gpu-name", "a100=A100-80GB"]) == 2  # never over a file


def test_marks_behind_a_state_are_read(tmp_path: Path) -> None:
    states = ("IDLE*", "MIXED$", "IDLE@", "ALLOCATED^", "IDLE~", "IDLE#+CLOUD", "IDLE-")
    text = "\n".join(
        f"NodeName=n{i}\n Gres=gpu:t4:1\n State={state}\n" for i, state in enumerate(states)
    )
    found = nodes_from_slurm(written(tmp_path, text), {})
    assert [node.name for node in found.nodes] == ["n4", "n5", "n6"]
    assert "n0 is left out: its state is IDLE*" in found.notes
    assert "n4, n5: each is powered down" in " ".join(found.notes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not what `scontrol show nodes` prints"),
        ("PartitionName=gpu\n", "is not what `scontrol show nodes` prints"),
        ("NodeName=-oProxyCommand=x\n Gres=gpu:t4:1\n State=IDLE\n", "not a host name"),
        ("NodeName=a;reboot\n Gres=gpu:t4:1\n State=IDLE\n", ":1: NodeName: .*not a host name"),
        ("\n\nNodeName=\n", ":3: NodeName: .*not a host name"),
        ("NodeName=a\n Gres=gpu:4\n State=IDLE\n", "--gpu-name gpu="),
        ("NodeName=a\n Gres=gpu:a100\n State=IDLE\n", "in a way that is not known here"),
        ("NodeName=a\n Gres=gpu:t4:99999\n State=IDLE\n", "in a way that is not known here"),
        ("NodeName=a\n Gres=(null)\n State=IDLE\n", "in use; no Gres of a node names a gpu"),
        ("NodeName=a\n Gres=gpu:t4:1\n State=DOWN\n", "a is left out: its state is DOWN"),
    ],
)
def test_other_texts_are_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        nodes_from_slurm(written(tmp_path, text), {})


def test_all_open_names_are_asked_for_at_once(tmp_path: Path) -> None:
    text = "\n\n".join(
        f"NodeName={name}\n Gres=gpu:{gpus}\n State=MIXED\n AllocTRES=gres/gpu=1"
        for name, gpus in (("a", "4"), ("b", "a100:2"), ("c", "t4:1"), ("d", "8"))
    )
    path = written(tmp_path, text)
    with pytest.raises(ClusterError) as caught:
        nodes_from_slurm(path, {})
    first, second, last = str(caught.value).splitlines()
    assert first.endswith("node a: Slurm does not say which GPUs these are (Gres=gpu:4)")
    assert 'node b: "a100" could be A100-40GB or' in second
    assert last == "say which: --gpu-name gpu=GPU --gpu-name a100=GPU"
    found = nodes_from_slurm(path, {"gpu": "L4", "a100": "A100-80GB"})
    assert [cards.gpu for node in found.nodes for cards in node.cards] == [
        "L4", "A100-80GB", "T4", "L4",
    ]  # fmt: skip


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "nodes.txt"
    path.write_bytes(b"NodeName=\xff\xfe")
    with pytest.raises(FileFormatError, match="not UTF-8"):
        nodes_from_slurm(path, {})


def test_an_unknown_type_becomes_one_to_fill_in(tmp_path: Path, capsys) -> None:
    text = (
        'NodeName=a\n Gres=gpu:x"}-{y:2\n State=IDLE\n\nNodeName=b\n Gres=gpu:t4:1\n State=IDLE\n'
    )
    output = tmp_path / "cluster.yaml"
    path = written(tmp_path, text)
    assert main(["init", "--from-slurm", str(path), "-o", str(output)]) == 0
    assert "fill in its question marks" in " ".join(capsys.readouterr().out.split())
    assert 'memory: "? GB"' in output.read_text()
    with pytest.raises(ClusterError, match=r"gpu_types\.x-y\.memory"):
        load_cluster(output)
