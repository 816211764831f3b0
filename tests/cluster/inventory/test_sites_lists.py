"""Lists as sites print them: powered-down cloud nodes, slices of cards, partitions, choices."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.inventory.skypilot import nodes_from_skypilot
from megatron_hetero.cluster.inventory.slurm import nodes_from_slurm
from megatron_hetero.cluster.names import expand_names
from megatron_hetero.errors import ClusterError
from tests.timing import assert_within

CLOUD = """\
NodeName=gpu-dy-g5-1 CoresPerSocket=1
   AvailableFeatures=dynamic,g5.12xlarge,gpu
   Gres=gpu:a10g:4
   NodeAddr=gpu-dy-g5-1 NodeHostName=gpu-dy-g5-1
   State=IDLE+CLOUD+POWERED_DOWN ThreadsPerCore=1 TmpDisk=0 Weight=1000 Owner=N/A
   Partitions=gpu

NodeName=gpu-st-g7e-1 Arch=x86_64 CoresPerSocket=1
   Gres=gpu:rtxproserver6000:1
   State=IDLE+CLOUD ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=gpu
   Reason=Node start up [root@2026-03-11T11:05:51]
"""
SLICES = """\
NodeName=gpu-nv2.dept.example.ca Arch=x86_64 CoresPerSocket=56
   Gres=gpu:nvidia_b200:4(S:0-1),gpu:nvidia_b200_2g.45gb:8(S:0-1),gpu:nvidia_b200_3g.90gb:4(S:0-1)
   State=MIXED ThreadsPerCore=2 TmpDisk=0 Weight=1
   AllocTRES=cpu=88,mem=690G,gres/gpu=8,gres/gpu:nvidia_b200=3
NodeName=node-v1 Arch=x86_64 Gres=gpu:tesla_v100-sxm2-32gb:4(S:0-1),nvme:1 State=ALLOCATED+PLANNED
NodeName=node-r1 Arch=x86_64 Gres=gpu:nvidia_geforce_rtx_3090:8(S:0-1) State=IDLE Partitions=gpu
NodeName=node-a1 Gres=gpu:nvidia_a100-sxm4-80gb:8(S:0-7),shard:nvidia_a100:64 State=RESERVED
NodeName=gn3 Arch=x86_64 Gres=gpu:nvidia_h100_80gb_hbm3_1g.10gb:7 State=IDLE Partitions=gpu
"""
SEVERAL = """\
NodeName=node-a1 Gres=gpu:a100:4 State=MIXED AllocTRES=cpu=8,gres/gpu=2,gres/gpu:a100=2
NodeName=node-b1 Gres=gpu:v100:4 State=ALLOCATED
NodeName=gn2 Gres=gpu:rtx6000:4(S:0) State=IDLE
NodeName=cg14 Gres=gpu:a40:1 State=IDLE Partitions=gpua40i
NodeName=p0685 Gres=pfsdir:scratch:1,pfsdir:ess:1,gpfs:project:1 State=ALLOCATED
"""


def written(folder: Path, text: str, name: str = "nodes.txt") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_nodes_of_a_cloud_that_are_powered_down_are_there(tmp_path: Path) -> None:
    found = nodes_from_slurm(written(tmp_path, CLOUD), {"a10g": "A10"})
    assert [(n.name, n.cards[0].gpu) for n in found.nodes] == [
        ("gpu-dy-g5-1", "A10"),
        ("gpu-st-g7e-1", "RTX-PRO-6000-Server"),
    ]
    assert "gpu-dy-g5-1 is powered down" in "\n".join(found.notes)
    assert "--partition gpu" in "\n".join(found.notes)
    # A10G is no A10, and NVIDIA's, as its name shows.
    (card,) = nodes_from_slurm(written(tmp_path, CLOUD), {}).nodes[0].cards
    assert card.gpu not in ("A10", "A100-40GB")


def test_slices_are_left_out_and_whole_cards_kept(tmp_path: Path) -> None:
    found = nodes_from_slurm(written(tmp_path, SLICES), {})
    assert [(n.name, n.cards[0].gpu, n.count) for n in found.nodes] == [
        ("gpu-nv2.dept.example.ca", "B200", 4),
        ("node-v1", "V100-32GB", 4),
        ("node-r1", "RTX-3090", 8),
        ("node-a1", "A100-80GB", 8),
    ]
    said = "\n".join(found.notes)
    assert (
        "gpu-nv2.dept.example.ca is taken without its parts of cards, nvidia_b200_2g.45gb" in said
    )
    assert "gpu-nv2.dept.example.ca has 1 of 4 GPUs free now" in said
    assert "gn3 is left out: its GPUs are cut into parts" in said
    assert "node-a1 is reserved" in said


def test_all_names_that_could_be_several_are_asked_for_at_once(tmp_path: Path) -> None:
    with pytest.raises(ClusterError) as raised:
        nodes_from_slurm(written(tmp_path, SEVERAL), {})
    said = str(raised.value)
    assert 'nodes.txt:1: node node-a1: "a100" could be A100-40GB or' in said
    assert 'nodes.txt:2: node node-b1: "v100" could be V100-16GB or' in said
    assert 'nodes.txt:3: node gn2: "rtx6000" could be' in said
    assert "--gpu-name a100=GPU --gpu-name v100=GPU --gpu-name rtx6000=GPU" in said
    means = {"a100": "A100-80GB", "v100": "V100-32GB", "rtx6000": "RTX-6000-Ada", "x": "T4"}
    found = nodes_from_slurm(written(tmp_path, SEVERAL), means)
    assert len(found.nodes) == 4
    assert "--gpu-name x=...: no card of the list has this name" in found.notes
    assert (
        "node-a1 has 2 of 4 GPUs free now; it is taken with all (--free takes these)" in found.notes
    )
    assert found.notes[-1] == "4 nodes are taken, 1 without GPUs left out"


@pytest.mark.parametrize(
    ("state", "is_taken"),
    [
        ("IDLE", True), ("MIXED+CLOUD", True), ("IDLE+CLOUD+POWERED_DOWN", True),
        ("IDLE+POWERED_DOWN", True), ("IDLE+CLOUD+POWERING_UP", True), ("IDLE~", True),
        ("ALLOCATED+COMPLETING", True), ("RESERVED", True), ("IDLE+PLANNED", True),
        ("DOWN", False), ("DOWN*", False), ("DOWN*+CLOUD+POWERED_DOWN", False),
        ("IDLE+DRAIN", False), ("MIXED+DRAINING", False), ("FUTURE", False), ("MAINT", False),
        ("IDLE+NOT_RESPONDING", False), ("IDLE+MAINT+RESERVED", False), ("FAIL", False),
    ],
)  # fmt: skip
def test_states(state: str, is_taken: bool, tmp_path: Path) -> None:
    text = f"NodeName=z Gres=gpu:t4:1 State=IDLE\nNodeName=a Gres=gpu:t4:1 State={state}\n"
    found = nodes_from_slurm(written(tmp_path, text), {})
    assert [n.name for n in found.nodes] == ["z", "a"][: 1 + is_taken]


def test_partitions_by_kind_and_notes_that_are_folded(tmp_path: Path) -> None:
    text = "".join(
        f"NodeName=d{i} Gres=gpu:t4:1 State=DOWN\nNodeName=h{i} Gres=gpu:l40s:2 State=IDLE "
        f"Partitions=hop,all\nNodeName=t{i} Gres=gpu:t4:1 State=IDLE Partitions=turing\n"
        for i in range(9)
    )
    found = nodes_from_slurm(written(tmp_path, text), {})
    assert found.notes == (
        "d0, d1, d2 and 6 more: each is left out: its state is DOWN",
        "Slurm's partitions, for `launch --for slurm`: --partition L40S=all,hop "
        "--partition T4=turing",
        "18 nodes are taken",
    )


def test_an_unknown_maker_is_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, "NodeName=a Gres=gpu:x9000:1 State=IDLE\n")
    output = tmp_path / "cluster.yaml"
    assert main(["init", "--from-slurm", str(path), "-o", str(output)]) == 0
    assert 'library: "? NCCL, RCCL, HCCL, oneCCL, none"' in output.read_text()
    with pytest.raises(ClusterError, match=r"gpu_types\.x9000"):
        load_cluster(output)
    for name, library in (("nvidia_l20", "NCCL"), ("mlu590", "none"), ("gaudi3", "HCCL")):
        path.write_text(f"NodeName=a Gres=gpu:{name}:1 State=IDLE\n")
        output.unlink()
        assert main(["init", "--from-slurm", str(path), "-o", str(output)]) == 0
        assert f"library: {library}" in output.read_text()


def test_a_long_list_and_a_long_name_are_answered_at_once(tmp_path: Path) -> None:
    text = "".join(f"NodeName=n{i} Gres=gpu:t4:1 State=IDLE\n" for i in range(8000))
    long = f"NodeName=a Gres=gpu:{'x' * 10_000}:1 State=IDLE\n"

    def answered() -> None:
        assert len(nodes_from_slurm(written(tmp_path, text), {}).nodes) == 8000
        with pytest.raises(ClusterError, match="is a name of 10000 characters"):
            nodes_from_slurm(written(tmp_path, long), {})

    assert_within(2, answered)


@pytest.mark.parametrize(
    ("text", "gpu", "notes"),
    [
        ("num_nodes: 2\nresources:\n  any_of:\n  - {cloud: gcp, accelerators: 'A100-80GB:8'}\n"
         "  - {cloud: aws, accelerators: 'H100:8', use_spot: true}\n",
         "A100-80GB", ("of 2 choices the first is taken: cloud gcp", "no place for any_of; `launch",
                       "--task A100-80GB=")),
        ("resources: {accelerators: L4:8, any_of: [{infra: aws}, {infra: gcp}]}",
         "L4", ("of 2 choices the first is taken", "--task L4=")),
        ("resources: {infra: k8s/my-context, accelerators: 'RTXPRO6000:8', network_tier: best}",
         "RTX-PRO-6000-Server", ("has no place for infra, network_tier",)),
        ("resources: {accelerators: ['A100-80GB:8', 'A100:8', 'V100-32GB:8']}",
         "A100-80GB", ("of 3 accelerators the first is taken: A100-80GB:8",)),
        ("resources: {accelerators: {L4:4, A10G:4}}", "L4", ("of 2 accelerators",)),
        ("resources: {accelerators: L4:1, use_spot: true}\nfile_mounts: {/a: s3://b}\n",
         "L4", ("(spot: the cloud may take them away)", "no place for use_spot, file_mounts")),
        ("resources: {accelerators: H100:8}", "H100-80GB", ('"H100" is taken for H100-80GB',)),
    ],
)  # fmt: skip
def test_tasks_say_what_is_taken_and_what_is_left(
    text: str, gpu: str, notes: tuple[str, ...], tmp_path: Path
) -> None:
    found = nodes_from_skypilot([written(tmp_path, text, "task.yaml")], {})
    assert found.nodes[0].cards[0].gpu == gpu
    for note in notes:
        assert note in "\n".join(found.notes)


def test_tasks_take_no_a10g_for_an_a10_and_no_variable_for_a_number(tmp_path: Path) -> None:
    task = written(tmp_path, "resources: {accelerators: {A10G:4, L4:4}}", "task.yaml")
    assert nodes_from_skypilot([task], {}).nodes[0].cards[0].gpu not in ("A10", "L4")
    task.write_text("num_nodes: ${NODES}\nresources: {accelerators: L4:1}\nenvs: {NODES: 2}")
    with pytest.raises(ClusterError, match="SkyPilot fills in no variable there"):
        nodes_from_skypilot([task], {})


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ("a",)),
        ("a[0-2]", ("a0", "a1", "a2")),
        ("n[08-10]", ("n08", "n09", "n10")),
        ("n[1,3-4].lab", ("n1.lab", "n3.lab", "n4.lab")),
        ("[0-1]x", ("0x", "1x")),
    ],
)
def test_ranges_of_names(text: str, names: tuple[str, ...]) -> None:
    assert expand_names(text) == names


@pytest.mark.parametrize("text", ["a[3-1]", "a[", "a[]", "a[1-]", "a[0-99999]", "a[0-1][0-1]"])
def test_other_ranges_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"range|more than"):
        expand_names(text)


def test_init_with_a_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "cluster.yaml"
    words = ["init", "-o", str(output)]
    assert main([*words, "--node", "a[0-3]=8xA100-80GB", "--node", "t=1xT4"]) == 0
    assert [n.name for n in load_cluster(output).nodes] == ["a0", "a1", "a2", "a3", "t"]
    output.unlink()
    assert main([*words, "--node", "a[0-1]=8xA100", "--node", "b=1xV100"]) == 4
    said = capsys.readouterr().err
    assert '"A100" is not a GPU' in said and '"V100" is not a GPU' in said
    assert main([*words, "--node", "a[1=8xT4"]) == 2


FREE = """\
NodeName=a Gres=gpu:a100:4 State=MIXED AllocTRES=cpu=8,gres/gpu=3,gres/gpu:a100=3
NodeName=b Gres=gpu:a100:4 State=ALLOCATED AllocTRES=cpu=48
NodeName=c Gres=gpu:a100:4 State=MIXED CfgTRES=cpu=48,gres/gpu=4 AllocTRES=cpu=8
NodeName=d Gres=gpu:a100:2,gpu:v100s:2 State=MIXED AllocTRES=cpu=8,gres/gpu=2,gres/gpu:v100s=2
NodeName=e Gres=gpu:a100:4 State=MIXED AllocTRES=gres/gpu=4
NodeName=f Gres=gpu:a100:2,gpu:v100s:2 State=MIXED AllocTRES=gres/gpu=2
NodeName=g Gres=gpu:a100:8 State=IDLE AllocTRES=
"""


def test_only_the_free_gpus_of_nodes_in_use(tmp_path: Path) -> None:
    path = tmp_path / "nodes.txt"
    path.write_text(FREE)
    found = nodes_from_slurm(path, {"a100": "A100-80GB"}, is_only_free=True)
    assert [(node.name, node.count) for node in found.nodes] == [
        ("a", 1), ("c", 4), ("d", 2), ("g", 8),
    ]  # fmt: skip
    said = "\n".join(found.notes)
    assert "a has 1 of 4 GPUs free now; the free part is taken: launch it with --share" in said
    assert "e has 0 of 4 GPUs free now; it is left out" in said
    assert "b is left out: no job can start there now" in said
    assert "f is left out: Slurm does not say which of its unlike GPUs are free" in said


def test_gpus_in_use_by_type_count_where_the_node_names_none(tmp_path: Path) -> None:
    path = tmp_path / "nodes.txt"
    in_use = "AllocTRES=gres/gpu=3,gres/gpu:a100=3"
    path.write_text(f"NodeName=a Gres=gpu:4 State=MIXED {in_use}\n")
    found = nodes_from_slurm(path, {"gpu": "A100-80GB"}, is_only_free=True)
    assert [node.count for node in found.nodes] == [1]
