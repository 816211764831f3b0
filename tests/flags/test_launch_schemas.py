"""Our launch files by the schemas of the systems that read them.

The schemas are not ours and not here: MEGATRON_HETERO_JOBSET_CRD names JobSet's
CustomResourceDefinition, MEGATRON_HETERO_SKYPILOT_PYTHON a Python that has `skypilot`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden"
_OPTIONS = {
    "kubernetes": ("MEGATRON_HETERO_JOBSET_CRD", "--jobset-crd"),
    "skypilot": ("MEGATRON_HETERO_SKYPILOT_PYTHON", "--skypilot-python"),
}
_CRD = """\
spec:
  names: {kind: JobSet}
  versions:
    - name: v1alpha2
      schema:
        openAPIV3Schema:
          type: object
          properties:
            apiVersion: {type: string}
            kind: {type: string}
            metadata: {type: object}
            spec:
              type: object
              required: [replicatedJobs]
              properties:
                network: {type: object, x-kubernetes-preserve-unknown-fields: true}
                failurePolicy: {type: object, x-kubernetes-preserve-unknown-fields: true}
                replicatedJobs:
                  type: array
                  items:
                    type: object
                    required: [name]
                    x-kubernetes-preserve-unknown-fields: true
                    properties:
                      name: {type: string, pattern: "^[a-z0-9-]+$"}
                      replicas: {type: integer, minimum: 0}
"""


def check(folder: Path, *words: str) -> tuple[int, str]:
    tool = [sys.executable, str(ROOT / "tools/check_launch_files.py"), str(folder), *words]
    done = subprocess.run(tool, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("launcher", _OPTIONS)
def test_the_golden_files_keep_to_the_systems_own_schema(launcher: str) -> None:
    variable, option = _OPTIONS[launcher]
    if variable not in os.environ:
        pytest.skip(f"{variable} not set: {launcher} files not checked by {launcher}'s schema")
    assert check(GOLDEN / launcher, option, os.environ[variable]) == (0, "")


@pytest.mark.slow
def test_slurm_accepts_the_golden_job() -> None:
    if shutil.which("sbatch") is None:
        pytest.skip("no sbatch: the Slurm job is not checked by Slurm")
    assert check(GOLDEN / "slurm") == (0, "")


@pytest.mark.parametrize(
    ("was", "becomes", "fault"),
    [
        ("replicatedJobs:", "replicatedJob:", "spec lacks replicatedJobs"),
        ("replicatedJobs:", "replicas: 1\n  replicatedJobs:", "spec.replicas is unknown"),
        ("replicas: 1", "replicas: one", "replicas is 'one', not of type integer"),
        ("replicas: 1", "replicas: -1", "replicas is -1; its minimum is 0"),
        ("- name: ", "- name: A_", "does not match"),
        ("jobset.x-k8s.io/v1alpha2", "jobset.x-k8s.io/v1", "apiVersion v1; served are v1alpha2"),
    ],
)
def test_the_checker_refuses_planted_faults(
    was: str, becomes: str, fault: str, tmp_path: Path
) -> None:
    crd = tmp_path / "crd.yaml"
    crd.write_text(_CRD)
    text = (GOLDEN / "kubernetes/jobset.yaml").read_text()
    assert was in text
    job = tmp_path / "job"
    job.mkdir()
    (job / "jobset.yaml").write_text(text)
    assert check(job, "--jobset-crd", str(crd)) == (0, "")
    (job / "jobset.yaml").write_text(text.replace(was, becomes, 1))
    code, printed = check(job, "--jobset-crd", str(crd))
    assert code == 1
    assert fault in printed


def test_what_is_not_checked_is_named() -> None:
    assert check(GOLDEN / "skypilot")[1].count("not checked; give --skypilot-python") > 0
