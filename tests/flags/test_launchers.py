"""Launch files: golden texts, shells that accept them, and what they start when they are run.

`python -m tests.flags.test_launchers` writes the golden files anew, to be read before they are
committed.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from megatron_hetero.cli.main import main
from megatron_hetero.errors import HeteroError, UsageError
from megatron_hetero.flags.launchers.job import LaunchJob, of_kind, without_unused
from megatron_hetero.flags.launchers.node_script import node_script
from megatron_hetero.flags.launchers.registry import LAUNCHERS
from megatron_hetero.flags.launchers.skypilot import sky_options, skypilot_files
from megatron_hetero.flags.launchers.ssh import ssh_files
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Host
from megatron_hetero.schedule.stock import is_stock
from tests.flags.launch_jobs import SHOW, files, job, mixed_plan, run_script, written
from tests.flags.test_stock import placed

GOLDEN = Path(__file__).parent / "golden"


def golden_files(launcher: str) -> dict[str, str]:
    """Return the text of each file that a launcher writes for the plan of the golden files."""
    # On Slurm an image means pyxis, which not every site has.
    changes = {"image": None} if launcher == "slurm" else {}
    return {file.name: file.text for file in files(launcher, **changes)}


def write_golden(folder: Path) -> None:
    """Write the golden files of all launchers into a folder."""
    for launcher in LAUNCHERS:
        (folder / launcher).mkdir(parents=True, exist_ok=True)
        for name, text in golden_files(launcher).items():
            (folder / launcher / name).write_text(text)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_golden(launcher: str) -> None:
    folder = GOLDEN / launcher
    golden = {path.name: path.read_text() for path in sorted(folder.iterdir())}
    assert golden_files(launcher) == golden


def test_golden_files_written_anew_are_those_of_the_repository(tmp_path: Path) -> None:
    """The command of this file's docstring once wrote a container into Slurm's."""
    write_golden(tmp_path)
    names = {path.relative_to(GOLDEN) for path in GOLDEN.rglob("*.*")}
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*.*")} == names
    for name in names:
        assert (tmp_path / name).read_bytes() == (GOLDEN / name).read_bytes()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_nothing_of_the_environment_is_written(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys reach a job by its own environment or by references to secrets, never in a file."""
    before = files(launcher)
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MASTER_ADDR", "USER"):
        monkeypatch.setenv(name, "s3cr3t")
    assert files(launcher) == before


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_shell_accepts_every_script(launcher: str) -> None:
    for file in files(launcher):
        if file.text.startswith("#!"):
            done = subprocess.run(["bash", "-n"], input=file.text.encode(), capture_output=True)
            assert done.returncode == 0, done.stderr


def test_a_node_starts_its_own_part(tmp_path: Path) -> None:
    folder = written(tmp_path, (node_script(job()),), SHOW)
    done = run_script(folder, "train.sh", "1", "10.0.0.7", NCCL_ALGO="Tree")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split("\n")
    assert words[:10] == [
        *("--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "2"),
        *("--master-addr", "10.0.0.7", "--master-port", "29500"),
    ]
    assert words[10:12] == ["-m", "megatron_hetero.pretrain_gpt"]
    assert words[words.index("--hetero-plan") + 1] == str(folder / "plan.json")
    # A site's own choice of NCCL settings stands; the plan's GPUs are the plan's.
    assert "gpus=0,2 p2p=1 Tree" in words


def test_a_node_finds_its_rank_by_name(tmp_path: Path) -> None:
    folder = written(tmp_path, (node_script(job()),), SHOW)
    second = mixed_plan().hosts[1].host
    done = run_script(folder, "train.sh", "by-name", SLURMD_NODENAME=second)
    assert done.stdout.split("\n")[2:4] == ["--node-rank", "1"]
    done = run_script(folder, "train.sh", "by-name", SLURMD_NODENAME="elsewhere")
    assert done.returncode == 2
    assert "elsewhere is none of the machines of this plan" in done.stderr
    assert run_script(folder, "train.sh", "2").returncode == 2
    assert run_script(folder, "train.sh").returncode != 0


@pytest.mark.parametrize(
    ("torchrun", "code", "words"),
    [
        ("echo well", 0, "all nodes ended well"),
        # Node 1 fails at once; node 0 would run for longer than the test may.
        ('[ "$4" = 1 ] && exit 3; exec sleep 100', 1, "a node failed"),
    ],
)
def test_ssh_starts_all_and_stops_all(tmp_path: Path, torchrun: str, code: int, words: str) -> None:
    folder = written(tmp_path, ssh_files(job()), torchrun)
    done = run_script(folder, "start.sh")
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["node-0.log", "node-1.log"]


def test_alike_nodes_in_a_row_are_one_component() -> None:
    plan = mixed_plan()
    host = plan.hosts[0]
    more = (host, replace(host, node="c", host="c.example"), plan.hosts[1])
    (first, second) = LaunchJob(replace(plan, hosts=more, idle_devices=())).components
    assert [h.node for h in first.hosts] == ["a", "c"]
    assert (first.first_node_rank, second.first_node_rank) == (0, 2)


def test_a_script_of_ones_own_goes_through_the_launch_door() -> None:
    text = node_script(job(script="../Megatron-LM/pretrain_gpt.py")).text
    assert "-m megatron_hetero.launch ../Megatron-LM/pretrain_gpt.py" in text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--seq-length", "128"), "seq_length: plan 64, flags 128"),
        (("--hidden-size", "128"), "hidden_size: plan 64, flags 128"),
        (("--max-position-embeddings", "32"), "less than --seq-length 64"),
    ],
)
def test_added_flags_of_another_job_are_refused(more: tuple[str, ...], words: str) -> None:
    flags = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
    flags += " --max-position-embeddings 128 --global-batch-size 16 --micro-batch-size 1 --bf16"
    workload = load_workload(None, (*flags.split(), "--vocab-size", "256"))
    plan = replace(placed(["a:0", "a:1", "b:0", "b:1"], a=2, b=2), workload=workload)
    assert is_stock(plan)
    node_script(job(plan=plan, more_flags=("--lr", "1e-4")))
    with pytest.raises(HeteroError, match=words):
        node_script(job(plan=plan, more_flags=more))


@pytest.mark.parametrize(
    ("launcher", "changes", "words"),
    [
        ("kubernetes", {"image": None}, "--image is missing"),
        ("kubernetes", {"is_installed_by_script": True}, "pods have what their image has"),
        ("kubernetes", {"image": "a b"}, "--image 'a b'"),
        # It installed a package that no index has.
        ("skypilot", {"image": None}, "rented machines have no megatron-hetero: give --wheel"),
        ("ssh", {"name": "Job 1"}, "--name 'Job 1'"),
        ("ssh", {"master_port": 80}, "allowed is 1024 to 65535"),
        ("ssh", {"plan": plan_from_layout(parse_layout("tp2:1,tp1:1 @2"))}, "names no machines"),
        ("slurm", {"more_flags": ("--tensor-model-parallel-size=8",)}, "tensor-model-parallel"),
        ("slurm", {"more_flags": ("--no-such-flag",)}, "not a flag of Megatron"),
    ],
)
def test_what_cannot_be_launched_is_refused(
    launcher: str, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        files(launcher, **changes)


def test_an_unknown_accelerator_is_refused() -> None:
    plan = mixed_plan()
    hosts = tuple(Host(h.node, h.host, "MI250", h.gpu_indices) for h in plan.hosts)
    with pytest.raises(UsageError, match="SkyPilot has no name for MI250"):
        skypilot_files(LaunchJob(replace(plan, hosts=hosts), image="hetero:1"))


@pytest.mark.parametrize("name", ["a; rm -rf /", "-oProxyCommand=x", "a b", "$(x)"])
def test_a_host_name_never_becomes_a_command(name: str) -> None:
    plan = mixed_plan()
    with pytest.raises(HeteroError):
        replace(job(), plan=replace(plan, hosts=(replace(plan.hosts[0], host=name),))).check()


def test_the_verb_writes_a_folder_and_never_over_one(tmp_path: Path, capsys) -> None:
    path = tmp_path / "plan.json"
    save_plan(mixed_plan(), path)
    folder = tmp_path / "job"
    words = ["launch", str(path), "--for", "ssh", "-o", str(folder), "--json"]
    assert main([*words, "--", "--save", "checkpoints"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["files"] == ["train.sh", "start.sh", "plan.json", "launch.json"]
    assert (folder / "plan.json").read_bytes() == path.read_bytes()
    assert "    --save checkpoints" in (folder / "train.sh").read_text()
    assert os.access(folder / "start.sh", os.X_OK)
    assert main(words) == 2
    assert "not an empty folder" in capsys.readouterr().err


def test_an_interface_of_one_machine_is_its_own() -> None:
    plan = mixed_plan()
    second = plan.hosts[1].node
    made = LaunchJob(plan, interfaces=(("", "eth0"), (second, "ib0")))
    made.check()
    common, _, branches = node_script(made).text.partition('case "$node_rank" in')
    assert "NCCL_SOCKET_IFNAME:-eth0" in common and "ib0" not in common
    assert (
        branches.count("SOCKET_IFNAME:-ib0") == 1 and branches.count("GLOO_SOCKET_IFNAME=ib0") == 1
    )
    assert branches.index(f"# {second}") < branches.index("IFNAME:-ib0")
    with pytest.raises(UsageError, match='"elsewhere" is no machine of the plan'):
        LaunchJob(plan, interfaces=(("elsewhere", "ib0"),)).check()


def test_skypilot_keeps_where_machines_are_rented() -> None:
    options = sky_options(["A100-80GB=gcp/us-central1", "k8s/my-context"], is_spot=True)
    made = files("skypilot", sky=options, image="docker:registry.example/hetero:1")
    tasks = [f.text for f in made if f.name.startswith("part-")]
    assert "\n  infra: gcp/us-central1\n  use_spot: true\n" in tasks[0]
    assert "\n  infra: k8s/my-context\n" in tasks[1]
    assert all("image_id: docker:registry.example/hetero:1\n" in task for task in tasks)
    with pytest.raises(UsageError, match="--infra 'a b'"):
        sky_options(["a b"], is_spot=False)


@pytest.mark.parametrize(
    "place", ["*/us-east-1", "k8s/arn:aws:eks:us-east-1:123:cluster/mine", "k8s/me@here"]
)
def test_skypilot_takes_every_region_and_the_contexts_that_clouds_name(place: str) -> None:
    """As `sky.utils.infra_utils.InfraInfo.from_str` of 0.14.1 reads them."""
    options = sky_options([f"A100-80GB={place}"], is_spot=False)
    made = files("skypilot", sky=options, image="registry.example/hetero:1")
    part = next(f.text for f in made if f.name == "part-0.yaml")
    assert YAML(typ="safe").load(part)["resources"]["infra"] == place


def test_options_of_a_kind_of_gpu_reach_machines_that_have_it_beside_others() -> None:
    """`init --from-slurm` names partitions by GPU, also those of a machine of unlike ones."""
    plan = mixed_plan()
    first, *others = plan.hosts
    types = ("L4",) * (len(first.gpu_indices) - 1) + ("T4",)
    unlike = replace(first, gpu_type=None, gpu_types=types)
    made = LaunchJob(replace(plan, hosts=(unlike, *others)))
    component = made.components[0]
    assert of_kind((("T4", "x"), ("L4", "x"), ("", "y")), component) == "x"
    assert of_kind((("T4", "x"), ("", "y")), component) == "x"
    assert of_kind((("RTX-4090", "x"), ("", "y")), component) == "y"
    assert of_kind(((component.kind, "z"), ("T4", "x"), ("L4", "y")), component) == "z"
    with pytest.raises(UsageError, match=r"has both; give one value as '[0-9] x L4"):
        of_kind((("T4", "x"), ("L4", "y")), component)
    kept, notes = without_unused("--partition", (("T4", "x"), ("V100-16GB", "y")), made)
    assert kept == (("T4", "x"),) and len(notes) == 1


if __name__ == "__main__":
    write_golden(GOLDEN)
