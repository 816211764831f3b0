"""Kubernetes objects for llm-d and Dynamo: Kubernetes' own schemas, and the plan in them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from ruamel.yaml import YAML

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.serving.fleet.plan import (
    PlannedReplica,
    PlannedStage,
    ServingPlan,
    check_plan,
)
from megatron_hetero.serving.launch.folder import fleet_files
from tests.serving.route.plans import two_replicas

VERSION = kubernetes_validate.latest_version()
DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@pytest.fixture
def plan(tmp_path: Path) -> ServingPlan:
    """Return a fleet of two whole replicas of a kind, an uneven pipeline, prefill and decode."""
    from megatron_hetero.serving.fleet.file import load_serving_plan

    base = load_serving_plan(two_replicas(tmp_path / "serve.json"))
    base = replace(base, engine=replace(base.engine, name="vllm"))

    def replica(name: str, phase: Any, host: str, *stages: tuple[tuple[int, ...], int]) -> Any:
        placed = tuple(
            PlannedStage(tuple(f"{host}:{i}" for i in gpus), host, "H100-80GB", layers)
            for gpus, layers in stages
        )
        return PlannedReplica(name, phase, host, placed, (1.0,), 1024, 16, 0.5)

    made = replace(
        base,
        replicas=(
            replica("a", "both", "m", ((0, 1), 4)),
            replica("b", "both", "n", ((0, 1), 4)),
            replica("c", "both", "n", ((2,), 3), ((3,), 1)),
            replica("d", "prefill", "p", ((0,), 4)),
            replica("e", "decode", "p", ((1,), 4)),
        ),
    )
    check_plan(made)
    return made


def _read(files: Any, name: str) -> list[Any]:
    text = next(file.text for file in files if file.name == name)
    return list(YAML(typ="safe").load_all(text))


def _check_pod(pod: dict[str, Any]) -> None:
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod}
    kubernetes_validate.validate(document, VERSION, strict=True)


def test_llm_d_has_a_deployment_for_each_kind_of_replica(plan: ServingPlan) -> None:
    files, start = fleet_files(plan, "llm-d")
    documents = _read(files, "fleet.yaml")
    for document in documents:
        kubernetes_validate.validate(document, VERSION, strict=True)
        assert DNS_NAME.fullmatch(document["metadata"]["name"])
    found = {d["metadata"]["name"]: d["spec"] for d in documents}
    assert {name: spec["replicas"] for name, spec in found.items()} == {
        "hetero-both-0": 2, "hetero-both-1": 1, "hetero-prefill-0": 1, "hetero-decode-1": 1
    }  # fmt: skip
    pipeline = found["hetero-both-1"]["template"]["spec"]
    (container,) = pipeline["containers"]
    assert {"name": "VLLM_PP_LAYER_PARTITION", "value": "3,1"} in container["env"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert "--pipeline-parallel-size" in container["args"]
    assert not {"--host"} & set(container["args"])
    (term,) = pipeline["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    assert term["matchExpressions"][0]["values"] == ["n"]
    decode = found["hetero-decode-1"]["template"]["spec"]
    assert decode["initContainers"][0]["name"] == "routing-proxy"
    assert decode["containers"][0]["args"][-2:] == ["--port", "8200"]
    assert any("NixlConnector" in word for word in decode["containers"][0]["args"])
    assert "kubectl apply" in start
    for route, profiles in (("whole", {"default"}), ("apart", {"prefill", "decode"})):
        (values,) = _read(files, f"router-{route}.values.yaml")
        labels = values["router"]["modelServers"]["matchLabels"]
        served = [d for d in documents if labels.items() <= d["metadata"]["labels"].items()]
        assert len(served) == 2
        epp = values["router"]["epp"]
        config = YAML(typ="safe").load(epp["pluginsCustomConfig"][epp["pluginsConfigFile"]])
        declared = {plugin["type"] for plugin in config["plugins"]}
        used = {p["pluginRef"] for s in config["schedulingProfiles"] for p in s["plugins"]}
        assert used <= declared
        assert {s["name"] for s in config["schedulingProfiles"]} == profiles


def test_dynamo_has_a_graph_for_each_route(plan: ServingPlan) -> None:
    files, _ = fleet_files(plan, "dynamo", image="own:1")
    whole, apart = _read(files, "fleet.yaml")
    for document in (whole, apart):
        assert document["apiVersion"] == "nvidia.com/v1beta1"
        for component in document["spec"]["components"]:
            assert set(component) == {"name", "type", "replicas", "podTemplate"}
            _check_pod(component["podTemplate"]["spec"])
            assert component["podTemplate"]["spec"]["containers"][0]["image"] == "own:1"
    kinds = [(c["type"], c["replicas"]) for c in whole["spec"]["components"]]
    assert kinds == [("frontend", 1), ("worker", 2), ("worker", 1)]
    kinds = [(c["type"], c["replicas"]) for c in apart["spec"]["components"]]
    assert kinds == [("frontend", 1), ("prefill", 1), ("decode", 1)]
    prefill = apart["spec"]["components"][1]["podTemplate"]["spec"]["containers"][0]
    assert prefill["args"][:4] == ["--model", plan.model.source, "--disaggregation-mode", "prefill"]


def test_what_is_no_pod_of_vllm_is_refused(plan: ServingPlan) -> None:
    one = plan.replicas[2]
    far = replace(one.stages[1], devices=("p:3",), host="p")
    spread = replace(plan, replicas=(replace(one, stages=(one.stages[0], far)),))
    sglang = replace(plan, engine=replace(plan.engine, name="sglang"))
    for target in ("llm-d", "dynamo"):
        with pytest.raises(UnsupportedError, match="spans several machines"):
            fleet_files(spread, target)
        with pytest.raises(UnsupportedError, match="for vLLM alone"):
            fleet_files(sglang, target)
