"""JobSets: which pods one has, and that each starts the part of its own machine."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from megatron_hetero.errors import UnsupportedError, UsageError
from megatron_hetero.flags.launchers.job import LaunchJob
from megatron_hetero.flags.launchers.kubernetes import kubernetes_files
from megatron_hetero.flags.launchers.node_script import node_script
from megatron_hetero.plan.file import plan_from_data
from tests.flags.launch_jobs import files, job, mixed_plan
from tests.flags.launchers.test_pytorchjob import hosts_of, plan_on


def documents(made: LaunchJob) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the ConfigMap of a job, and the replicated jobs of its JobSet."""
    (manifest,) = kubernetes_files(made)
    config, jobset = YAML(typ="safe").load_all(manifest.text)
    return config, jobset["spec"]["replicatedJobs"]


def pod_of(part: dict[str, Any]) -> dict[str, Any]:
    """Return the pod of a replicated job."""
    return part["template"]["spec"]["template"]["spec"]


def container_of(part: dict[str, Any]) -> dict[str, Any]:
    """Return the container of a replicated job."""
    return pod_of(part)["containers"][0]


def test_a_pod_starts_the_part_of_its_machine_wherever_it_comes_to(tmp_path: Path) -> None:
    """Alike nodes of two sites share a template, and the plan's order of them is not left to
    Kubernetes: by the index of their pods, stages would cross the slow line as often as not."""
    made = job(plan=plan_on(*("A100-80GB",) * 4, a=1, b=1, c=1, d=1))
    config, (first, others) = documents(made)
    for name, text in config["data"].items():
        (tmp_path / name).write_text(text)
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$@" "node=$MEGATRON_HETERO_NODE"\n')
    (tmp_path / "torchrun").chmod(0o755)
    # The pod that the others call is one of its own, on the first node.
    named = [host.host for host in made.plan.hosts]
    assert first["name"] == "part0" and first["template"]["spec"]["completions"] == 1
    assert hosts_of(first["template"]["spec"]) == named[:1]
    assert others["template"]["spec"]["completions"] == 3
    assert hosts_of(others["template"]["spec"]) == named[1:]
    for index, (rank, host) in enumerate(reversed(list(enumerate(made.plan.hosts)))):
        container = container_of(others if rank else first)
        bash, script, *words = container["command"]
        (variable,) = container["env"]
        assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
        # Pods come to the nodes in another order than the plan's.
        environment = {variable["name"]: host.host, "JOB_COMPLETION_INDEX": str(index)}
        done = subprocess.run(
            [bash, str(tmp_path / Path(script).name), *words],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", **environment},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert f"--node-rank {rank} " in done.stdout and f"node={host.node}" in done.stdout
        assert "--master-addr megatron-hetero-part0-0-0.megatron-hetero " in done.stdout


def test_the_manifest_holds_the_plan_and_the_script() -> None:
    config, parts = documents(job())
    assert plan_from_data(json.loads(config["data"]["plan.json"])) == mixed_plan()
    script = node_script(job(), exports_names=True).text
    assert config["data"]["train.sh"].rstrip() == script.rstrip()
    # Node b has three GPUs, of which the plan uses 0 and 2: their numbers need all three.
    limits = [container_of(part)["resources"]["limits"] for part in parts]
    assert limits == [{"nvidia.com/gpu": 4}, {"nvidia.com/gpu": 3}]


@pytest.mark.parametrize(
    ("gpu_type", "resource"), [("MI300X", "amd.com/gpu"), ("RTX-4090", "nvidia.com/gpu")]
)
def test_a_pod_asks_for_the_gpus_of_their_maker(gpu_type: str, resource: str) -> None:
    plan = mixed_plan()
    hosts = (plan.hosts[0], replace(plan.hosts[1], gpu_type=gpu_type))
    _, parts = documents(job(plan=replace(plan, hosts=hosts)))
    assert container_of(parts[1])["resources"]["limits"] == {resource: 3}
    assert pod_of(parts[1])["tolerations"][0]["key"] == resource


@pytest.mark.parametrize(
    ("types", "resource"),
    [(("MI300X", "MI250"), "amd.com/gpu"), (("L4", "T4"), "nvidia.com/gpu"), (("L4", "MI250"), "")],
)
def test_a_node_of_unlike_gpus_has_one_maker(types: tuple[str, str], resource: str) -> None:
    plan = mixed_plan()
    unlike = replace(plan.hosts[1], gpu_type=None, gpu_types=types)
    made = job(plan=replace(plan, hosts=(plan.hosts[0], unlike)))
    if resource:
        assert container_of(documents(made)[1][1])["resources"]["limits"] == {resource: 3}
        return
    with pytest.raises(UnsupportedError, match="GPUs of several makers"):
        documents(made)


def test_a_plan_that_no_config_map_holds_is_refused() -> None:
    plan = mixed_plan()
    reasons = {f"b:{index}": "x" * 1000 for index in range(1200)}
    with pytest.raises(UsageError, match="a ConfigMap holds 1048576"):
        files("kubernetes", plan=replace(plan, idle_reasons=reasons))
