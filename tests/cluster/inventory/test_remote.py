"""`discover --hosts` with an ssh of our own on the PATH: what it is told, and what it answers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.inventory import remote
from megatron_hetero.cluster.inventory.draft import link_guess
from megatron_hetero.cluster.nics import Nics

# Recorded: `nvidia-smi --query-gpu=... --format=csv,noheader,nounits` and `nvidia-smi topo -m`.
A100 = "".join(
    f"{i}, NVIDIA A100-SXM4-80GB, 81920, 8.0, 00000000:0{i}:00.0, Disabled, 4, 4, 16, Disabled\n"
    for i in range(2)
)
A100_TOPOLOGY = """\
\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV12\t0-31\t0
GPU1\tNV12\t X \t0-31\t0

Legend:

  X    = Self
"""
RTX = "0, NVIDIA GeForce RTX 4090, 24564, 8.9, 00000000:01:00.0, Disabled, 12, 4, 16, Disabled\n"
MIXED = RTX.replace("Disabled", "Enabled", 1) + "".join(
    f"{i}, NVIDIA GeForce RTX 3090, 24576, 8.6, 00000000:4{i}:00.0, Disabled, 1, 4, 16, Disabled\n"
    for i in (1, 2)
)
MIXED_TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2
GPU0\t X \tPHB\tSYS
GPU1\tPHB\t X \tPHB
GPU2\tSYS\tPHB\t X
"""
FAKE = """\
#!{python}
import json, pathlib, sys
here = pathlib.Path({here!r})
with open(here / "calls", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
host, command = sys.argv[-2].rpartition("@")[2], sys.argv[-1]
answer = json.loads((here / "answers.json").read_text()).get(host)
if answer is None:
    print(f"ssh: connect to host {{host}} port 22: Connection \\x1b[31mrefused", file=sys.stderr)
    sys.exit(255)
if "slow" in answer:
    import time; time.sleep(30)
what = "topology" if "topo" in command else "ports" if "grep" in command else "gpus"
if what == "ports":
    print(answer.get(what, ""), end="")
    sys.exit(2)  # some files are missing
if what not in answer:
    print("bash: nvidia-smi: command not found", file=sys.stderr)
    sys.exit(127)
print(answer[what], end="")
if "fails" in answer:
    print("Warning: Permanently added 'x' to the list of known hosts.", file=sys.stderr)
    sys.exit(9)
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a program called ssh first on the PATH; its answers by host."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "ssh"
    program.write_text(FAKE.format(python=sys.executable, here=str(tmp_path)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def answers(**hosts: dict[str, object]) -> None:
        found = {name.replace("_", "-"): answer for name, answer in hosts.items()}
        (tmp_path / "answers.json").write_text(json.dumps(found))

    return answers


def calls(tmp_path: Path) -> list[list[str]]:
    return [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]


def test_hosts_become_a_file_that_loads(ssh, tmp_path: Path) -> None:
    ssh(a100_0={"gpus": A100, "topology": A100_TOPOLOGY}, rtx_0={"gpus": RTX})
    output = tmp_path / "cluster.yaml"
    assert main(["discover", "--hosts", "a100-0,me@rtx-0", "-o", str(output)]) == 0
    cluster = load_cluster(output)
    assert [(n.name, n.host, n.gpu_type.name, n.num_gpus) for n in cluster.nodes] == [
        ("a100-0", "a100-0", "A100-80GB", 2),
        ("rtx-0", "rtx-0", "RTX-4090", 1),
    ]
    # What collectives reach of the sheet's 300 GB/s.
    assert link_guess("A100-80GB")[0] == f"{cluster.nodes[0].link.bytes_per_s / 1e9:.0f} GB/s"
    told = calls(tmp_path)
    assert len(told) == 3  # one GPU has no topology
    for words in told:
        assert words[:-3] == ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-T"]
        assert words[-3] == "--" and words[-2] in ("a100-0", "me@rtx-0")
        assert words[-1] in (
            "nvidia-smi --query-gpu=index,name,memory.total,compute_cap,pci.bus_id,display_active,"
            "memory.used,pcie.link.gen.max,pcie.link.width.current,mig.mode.current "
            "--format=csv,noheader,nounits",
            "nvidia-smi topo -m",
        )


def test_nics_of_hosts_are_found(ssh, tmp_path: Path) -> None:
    topology = """\
\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity
GPU0\t X \tNV12\tPXB\tSYS\t0-31
GPU1\tNV12\t X \tSYS\tPXB\t32-63
NIC0\tPXB\tSYS\t X \tSYS
NIC1\tSYS\tPXB\tSYS\t X

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""
    folder = "/sys/class/infiniband"
    ports = "".join(f"{folder}/mlx5_{i}/ports/1/rate:200 Gb/sec (4X HDR)\n" for i in (0, 1))
    ssh(a100_0={"gpus": A100, "topology": topology, "ports": ports})
    output = tmp_path / "cluster.yaml"
    assert main(["discover", "--hosts", "a100-0", "-o", str(output)]) == 0
    (node,) = load_cluster(output).nodes
    assert node.nics == Nics(25e9, (0, 1))
    assert calls(tmp_path)[-1][-1] == "grep -sH . " + " ".join(
        f"{folder}/mlx5_{i}/ports/1/{name}" for i in (0, 1) for name in ("rate", "state")
    )


def test_a_hostfile_as_mpi_has_it(ssh, tmp_path: Path, capsys) -> None:
    same = {"gpus": RTX}
    answers = {"node.a": same, "node.b": same, "10.0.0.1": same}
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# our machines\nnode.a slots=1\n\nroot@node.b slots=1 # left\n10.0.0.1\n")
    assert main(["discover", "--hostfile", str(hostfile), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown["gpus"]) == set(answers)
    for line in ("name: node, gpu: RTX-4090, count: 1, host: node.a",
                 "name: node-2, gpu: RTX-4090, count: 1, host: node.b",
                 "name: 10-0-0-1, gpu: RTX-4090, count: 1, host: "):  # fmt: skip
        assert line in shown["cluster"].replace('"', "")
    output = tmp_path / "cluster.yaml"
    output.write_text(shown["cluster"])
    assert [n.host for n in load_cluster(output).nodes] == list(answers)


def test_a_machine_with_unlike_gpus_comes_whole(ssh, tmp_path: Path) -> None:
    ssh(box={"gpus": MIXED, "topology": MIXED_TOPOLOGY})
    output = tmp_path / "cluster.yaml"
    assert main(["discover", "--hosts", "box", "-o", str(output)]) == 0
    cluster = load_cluster(output)
    assert list(cluster.machines) == ["box"]
    kinds = {d: cluster.node_of(d).gpu_type.name for d in cluster.device_by_name}
    assert kinds == {"box:0": "RTX-4090", "box:1": "RTX-3090", "box:2": "RTX-3090"}
    assert "reserve: 1 GiB" in output.read_text()  # the RTX 4090 drives a screen


def test_every_host_that_fails_is_named(
    ssh, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "LIMIT_S", 2)
    ssh(good={"gpus": RTX}, bare={}, odd={"gpus": "<html>"}, slow={"slow": True})
    output = tmp_path / "cluster.yaml"
    words = ["discover", "--hosts", "good,gone,bare,odd,slow", "-o", str(output)]
    assert main(words) == 5
    said = capsys.readouterr().err
    assert "4 of 5 hosts did not answer, and nothing was written" in said
    assert "gone: ssh ended with 255: ssh: connect to host gone" in said
    assert "bare: nvidia-smi there ended with 127: bash: nvidia-smi: command not found" in said
    assert "odd: nvidia-smi answered" in said
    assert "slow: no answer within 2 s" in said
    assert "\x1b[31m" not in said  # another machine's text does not steer this terminal
    assert not output.exists()


@pytest.mark.parametrize(
    "hosts",
    ["-oProxyCommand=reboot", "a;reboot", "a b", "$(reboot)", ",", "a,,b", "a,a", "-l@a", "a@b@c"],
)
def test_names_that_could_be_commands_never_reach_ssh(
    ssh, hosts: str, tmp_path: Path, capsys
) -> None:
    ssh()
    assert main(["discover", f"--hosts={hosts}"]) == 2
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize(
    ("host", "what"),
    [
        ("2001:db8::1", "IPv6 addresses are not read; give the machine a name"),
        ("root@[fe80::1%eth0]", "IPv6 addresses are not read; give the machine a name"),
        ("a100-0:22", "a port does not stand behind it; one of ssh's belongs into ~/.ssh/config"),
    ],
)
def test_colons_of_a_host_are_explained(ssh, host: str, what: str, capsys) -> None:
    ssh()
    assert main(["discover", f"--hosts={host}"]) == 2
    assert what in capsys.readouterr().err


def test_without_a_topology_it_says_how_to_go_on(ssh, capsys) -> None:
    ssh(wsl={"gpus": A100, "topology": "Not Supported"})
    assert main(["discover", "--hosts", "wsl"]) == 5
    said = capsys.readouterr().err
    assert "wsl: nvidia-smi topo -m on wsl is no output of" in said
    assert "--topology FILE" in said and "init --node NAME=2xA100-80GB`" in said


def test_no_host_at_all_is_refused(ssh, tmp_path: Path) -> None:
    ssh()
    with pytest.raises(SystemExit) as ended:
        main(["discover", "--hosts="])
    assert ended.value.code == 2
    assert not (tmp_path / "calls").exists()


def test_without_ssh_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["discover", "--hosts", "a"]) == 5
    assert "no `ssh` on this machine" in capsys.readouterr().err


def test_the_words_of_nvidia_smi_are_shown(ssh, capsys) -> None:
    """It prints its errors to stdout, and ssh a warning to stderr."""
    ssh(a={"gpus": "NVIDIA-SMI has failed: no driver\n", "fails": True})
    assert main(["discover", "--hosts", "a"]) == 5
    assert "a: nvidia-smi there ended with 9: NVIDIA-SMI has failed: no dr" in " ".join(
        capsys.readouterr().err.split()
    )


def test_a_host_in_other_letters_is_the_same(ssh, capsys) -> None:
    ssh(a={"gpus": RTX}, A={"gpus": RTX})
    assert main(["discover", "--hosts", "a,me@A"]) == 2
    assert "the host a is named twice" in capsys.readouterr().err


def test_a_host_whose_cards_mig_divides_is_named(ssh, capsys) -> None:
    divided = A100.replace("16, Disabled\n", "16, Enabled\n", 1)
    ssh(a={"gpus": divided, "topology": A100_TOPOLOGY}, b={"gpus": RTX})
    assert main(["discover", "--hosts", "a,b"]) == 5
    said = capsys.readouterr()
    assert "a: MIG divides GPU 0" in " ".join(said.err.split()) and not said.out


def test_what_is_of_one_machine_does_not_go_with_hosts(ssh, tmp_path: Path, capsys) -> None:
    assert main(["discover", "--hosts", "a", "--topology", str(tmp_path / "x")]) == 2
    assert "--topology is of one machine" in capsys.readouterr().err


def test_a_driver_cannot_write_into_the_file(ssh, tmp_path: Path, capsys) -> None:
    ssh(box={"gpus": '0, X"}\n- {name: evil} 5, 8192, 8.9", evil: "x\n'})
    assert main(["discover", "--hosts", "box"]) == 5
    ssh(box={"gpus": f'0, My "Card": {{x}}, 8192, 8.9" evil: "x, 0000:01:00.0, {"evil, " * 4}1\n'})
    assert main(["discover", "--hosts", "box"]) == 0
    text = capsys.readouterr().out
    assert "My-Card-x: {memory: 8192 MiB" in text and "evil" not in text
