"""PyTorchJobs: which plans one holds, and that each pod starts the part of its own machine."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from megatron_hetero.errors import UnsupportedError, UsageError
from megatron_hetero.flags.launchers.job import LaunchJob
from megatron_hetero.flags.launchers.pytorchjob import pytorchjob_files
from megatron_hetero.plan.plan import Plan
from tests.flags.launch_jobs import job, mixed_plan
from tests.flags.test_stock import placed


def documents(made: LaunchJob) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ConfigMap and the PyTorchJob of a job."""
    (manifest,) = pytorchjob_files(made)
    config, pytorchjob = YAML(typ="safe").load_all(manifest.text)
    return config, pytorchjob


def plan_on(*kinds: str, **gpus: int) -> Plan:
    """Return a plan on four GPUs of the nodes that are named, each of its kind."""
    order = [f"{node}:{i}" for node, count in gpus.items() for i in range(count)]
    plan = placed(order, **gpus)
    pairs = zip(plan.hosts, kinds, strict=True)
    return replace(plan, hosts=tuple(replace(host, gpu_type=kind) for host, kind in pairs))


def hosts_of(replicas: dict[str, Any]) -> list[str]:
    """Return the nodes on which the pods of a role may run."""
    affinity = replicas["template"]["spec"]["affinity"]["nodeAffinity"]
    (terms,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"].values()
    fields = [field for term in terms for field in term["matchFields"]]
    # The API server refuses a field of several values, and other fields.
    assert all(len(f["values"]) == 1 and f["key"] == "metadata.name" for f in fields)
    return [field["values"][0] for field in fields]


def test_the_master_is_the_first_node_and_workers_are_the_others() -> None:
    made = job(master_port=29511)
    _, pytorchjob = documents(made)
    specs = pytorchjob["spec"]["pytorchReplicaSpecs"]
    assert {role: spec["replicas"] for role, spec in specs.items()} == {"Master": 1, "Worker": 1}
    named = [host.host for host in made.plan.hosts]
    assert hosts_of(specs["Master"]) + hosts_of(specs["Worker"]) == named
    limits = [s["template"]["spec"]["containers"][0]["resources"]["limits"] for s in specs.values()]
    parts = [{"nvidia.com/gpu": part.gpus_per_node} for part in made.components]
    assert limits == parts and parts[0] != parts[1]
    for spec in specs.values():
        (port,) = spec["template"]["spec"]["containers"][0]["ports"]
        # The operator sets MASTER_PORT, which train.sh reads, from the port of this name.
        assert port == {"name": "pytorchjob-port", "containerPort": 29511}


def test_a_pod_starts_the_part_of_its_machine(tmp_path: Path) -> None:
    made = job()
    config, pytorchjob = documents(made)
    for name, text in config["data"].items():
        (tmp_path / name).write_text(text)
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$@" "node=$MEGATRON_HETERO_NODE"\n')
    (tmp_path / "torchrun").chmod(0o755)
    spec = pytorchjob["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    bash, script, *words = spec["containers"][0]["command"]
    (variable,) = spec["containers"][0]["env"]
    assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    for rank, host in enumerate(made.plan.hosts):
        # What the operator adds to a pod; its RANK follows the order of the pods.
        ranks = {"RANK": "7", "MASTER_PORT": "29500", "MASTER_ADDR": "megatron-hetero-master-0"}
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", variable["name"]: host.host, **ranks}
        done = subprocess.run(
            [bash, str(tmp_path / Path(script).name), *words],
            env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert f"--node-rank {rank} " in done.stdout and f"node={host.node}" in done.stdout
        assert "--master-addr megatron-hetero-master-0 --master-port 29500" in done.stdout


def test_workers_of_unlike_types_share_a_template_if_their_numbers_are_equal() -> None:
    plan = plan_on("H100-80GB", "A100-80GB", "RTX-4090", a=2, b=1, c=1)
    _, pytorchjob = documents(job(plan=plan))
    workers = pytorchjob["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert workers["replicas"] == 2 and len(hosts_of(workers)) == 2


@pytest.mark.parametrize(
    ("kinds", "gpus"),
    [
        (("A100-80GB",) * 3, {"a": 1, "b": 2, "c": 1}),
        (("A100-80GB", "A100-80GB", "MI300X"), {"a": 2, "b": 1, "c": 1}),
    ],
)
def test_workers_that_no_template_describes_are_refused(
    kinds: tuple[str, ...], gpus: dict[str, int]
) -> None:
    made = job(plan=plan_on(*kinds, **gpus))
    with pytest.raises(
        UnsupportedError, match=r"unlike \(.*: . x A100.*--for kubernetes \(a JobSet"
    ):
        pytorchjob_files(made)


def test_one_machine_has_no_workers() -> None:
    _, pytorchjob = documents(job(plan=plan_on("A100-80GB", a=4)))
    assert list(pytorchjob["spec"]["pytorchReplicaSpecs"]) == ["Master"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"image": None}, "--image is missing"), ({"is_installed_by_script": True}, "--wheel")],
)
def test_pods_have_what_their_image_has(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        pytorchjob_files(replace(LaunchJob(mixed_plan(), image="hetero:1"), **changes))
