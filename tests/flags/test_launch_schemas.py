"""Our launch files by the schemas of the systems that read them, and their scripts by ShellCheck.

The schemas in `tools/launch_schemas` are checked always.  Where the systems' own are at hand they
are asked too: MEGATRON_HETERO_CRDS names operators' CustomResourceDefinitions (JobSet's,
PyTorchJob's), parted by ":", MEGATRON_HETERO_SKYPILOT_PYTHON a Python that has `skypilot`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.flags.launchers.batch import batch_options
from megatron_hetero.flags.launchers.install import Wheel, install_script
from megatron_hetero.flags.launchers.pbs import pbs_options
from megatron_hetero.flags.launchers.registry import LAUNCHERS
from megatron_hetero.flags.launchers.slurm import slurm_options
from megatron_hetero.plan.plan import Plan
from tests.flags.launch_jobs import files
from tests.flags.test_stock import placed

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from check_launch_files import folder_faults  # noqa: E402


def plan_on_one_machine() -> Plan:
    """Four A100 of a machine."""
    plan = placed(["a:0", "a:1", "a:2", "a:3"], a=4)
    return replace(plan, hosts=tuple(replace(h, gpu_type="A100-80GB") for h in plan.hosts))


GOLDEN = Path(__file__).parent / "golden"
_OWN_CRDS = [Path(crd) for crd in os.environ.get("MEGATRON_HETERO_CRDS", "").split(":") if crd]
_OWN_PYTHON = os.environ.get("MEGATRON_HETERO_SKYPILOT_PYTHON")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_golden_files_keep_to_the_schemas(launcher: str) -> None:
    assert folder_faults(GOLDEN / launcher) == []
    if _OWN_CRDS:
        assert folder_faults(GOLDEN / launcher, crds=_OWN_CRDS) == []
    if _OWN_PYTHON is not None:
        assert folder_faults(GOLDEN / launcher, skypilot_python=_OWN_PYTHON) == []


def test_files_with_every_option_keep_to_the_schemas(tmp_path: Path) -> None:
    options = slurm_options(["A100-80GB=gpu-a", "rest"], ["32"], "team@lab", "high", "1-12:00:00")
    common = batch_options("team@lab", "1-12:00:00", ["32"], ["400G"])
    install = install_script(Wheel("megatron_hetero-0.1.0-py3-none-any.whl"))
    made = [
        *files("skypilot", is_installed_by_script=True, opens_ports=True),
        *[file for file in files("slurm", slurm=options) if file.name == "job.sbatch"],
        *[file for file in files("pbs", pbs=pbs_options(common, "gpu")) if file.name == "job.pbs"],
        install,
    ]
    for file in made:
        (tmp_path / file.name).write_text(file.text)
    assert folder_faults(tmp_path) == []


def test_files_of_one_machine_on_a_named_interface_keep_to_the_schemas(tmp_path: Path) -> None:
    plan = plan_on_one_machine()
    every = (("", "eth1"),)
    for launcher in LAUNCHERS:
        folder = tmp_path / launcher
        folder.mkdir()
        for file in files(launcher, plan=plan, interfaces=every, is_installed_by_script=False):
            (folder / file.name).write_text(file.text)
            if file.name == "train.sh":
                assert "store_type=file" in file.text and "--master-addr" not in file.text
                assert "export GLOO_SOCKET_IFNAME=eth1\n" in file.text
        assert folder_faults(folder) == []


def planted(launcher: str, name: str, was: str, becomes: str, folder: Path) -> Path:
    """The golden files of a launcher with one change."""
    job = folder / "job"
    shutil.copytree(GOLDEN / launcher, job)
    text = (job / name).read_text()
    assert was in text
    (job / name).write_text(text.replace(was, becomes, 1))
    return job


@pytest.mark.parametrize(
    ("was", "becomes", "fault"),
    [
        ("replicatedJobs:", "replicatedJob:", "spec lacks replicatedJobs"),
        ("replicatedJobs:", "replicas: 1\n  replicatedJobs:", "spec.replicas is unknown"),
        ("replicas: 1", "replicas: one", "replicas is 'one', not of type integer"),
        ("replicas: 1", "replicas: -1", "replicas is -1; its minimum is 0"),
        ("- name: part0", "- name: A_", "does not match"),
        ("jobset.x-k8s.io/v1alpha2", "jobset.x-k8s.io/v1", "apiVersion v1; served are v1alpha2"),
        ("enableDNSHostnames", "enableDnsHostnames", "enableDnsHostnames is unknown"),
        ("containerPort", "port", "Job: spec.template.spec.containers.0.ports.0"),
        ("restartPolicy: Never", "restartPolicy: 1", "restartPolicy"),
        ("set -euo pipefail", "cd $missing\n    set -euo pipefail", "train.sh:"),
        ("data:", "dat:", "ConfigMap: "),
    ],
)
def test_faults_planted_in_a_jobset_are_refused(
    was: str, becomes: str, fault: str, tmp_path: Path
) -> None:
    found = folder_faults(planted("kubernetes", "jobset.yaml", was, becomes, tmp_path))
    assert any(fault in line for line in found), found


@pytest.mark.parametrize(
    ("was", "becomes", "fault"),
    [
        ("pytorchReplicaSpecs:", "replicaSpecs:", "spec lacks pytorchReplicaSpecs"),
        ("Master:", "Chief:", "pytorchReplicaSpecs lacks Master"),
        ("replicas: 1", "replicas: 2", "Master.replicas is 2; its maximum is 1"),
        ("cleanPodPolicy: Running", "cleanPodPolicy: Some", "allowed are All, Running, None"),
        ("restartPolicy: Never", "restartPolicy: Perhaps", "restartPolicy is 'Perhaps'"),
        ("kubeflow.org/v1", "kubeflow.org/v2", "apiVersion v2; served are v1"),
        ("fieldPath: spec.nodeName", "path: spec.nodeName", "Pod: spec.containers.0.env.0"),
        ("matchFields", "matchField", "Pod: spec.affinity.nodeAffinity"),
    ],
)
def test_faults_planted_in_a_pytorchjob_are_refused(
    was: str, becomes: str, fault: str, tmp_path: Path
) -> None:
    found = folder_faults(planted("pytorchjob", "pytorchjob.yaml", was, becomes, tmp_path))
    assert any(fault in line for line in found), found


@pytest.mark.parametrize(
    ("launcher", "name", "was", "becomes", "fault"),
    [
        ("skypilot", "part-0.yaml", "num_nodes", "nodes", "nodes is unknown"),
        ("skypilot", "part-0.yaml", "A100-80GB:4", "A100-80GB", "accelerators is 'A100-80GB'"),
        ("skypilot", "part-0.yaml", "not-yet", "1", "envs.MASTER_ADDR is 1, not of type string"),
        ("skypilot", "part-0.yaml", 'if [ "$M', "if [ $M", "run:"),
        ("slurm", "job.sbatch", "--exclusive", "--exclusiv", "'#SBATCH --exclusiv' is not an"),
        ("slurm", "job.sbatch", "--nodes=1", "--nodes=one", "'#SBATCH --nodes=one' is not an"),
        ("pbs", "job.pbs", "#PBS -j oe", "#PBS -j eoo", "'#PBS -j eoo' is not an"),
        ("pbs", "job.pbs", "ngpus=4", "gpus=4", "is not an option of qsub"),
        ("pbs", "job.pbs", '"${nodes[$rank]}" bash', "${nodes[$rank]} bash", "job.pbs:"),
        ("ssh", "start.sh", '"${starters[@]}"', "${starters[@]}", "start.sh:"),
    ],
)
def test_planted_faults_are_refused(
    launcher: str, name: str, was: str, becomes: str, fault: str, tmp_path: Path
) -> None:
    found = folder_faults(planted(launcher, name, was, becomes, tmp_path))
    assert any(fault in line for line in found), found


def test_the_command_names_the_fault_and_exits_with_1(tmp_path: Path) -> None:
    job = planted("slurm", "job.sbatch", "--exclusive", "--exclusiv", tmp_path)
    tool = [sys.executable, str(ROOT / "tools/check_launch_files.py"), str(job)]
    done = subprocess.run(tool, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "job.sbatch:6: '#SBATCH --exclusiv' is not an option" in done.stderr


def test_scripts_of_the_repository_pass_shellcheck() -> None:
    scripts = [*ROOT.glob("tools/*.sh"), ROOT / ".ci/run"]
    program = shutil.which("shellcheck", path=Path(sys.executable).parent)
    assert program is not None, "there is no shellcheck: install the extra dev"
    done = subprocess.run([program, *map(str, scripts)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
