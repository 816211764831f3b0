"""A fleet as Kubernetes objects for llm-d and for Dynamo: pods of one machine each.

llm-d (`guides/` of llm-d/llm-d): Deployments whose pods bear `llm-d.ai/guide` and `llm-d.ai/role`;
the router's chart picks an endpoint among the pods of a guide, and a decode pod's first container
hands prompts to a prefill pod.  Dynamo (`deploy/operator/api/v1beta1` of ai-dynamo/dynamo): a
DynamoGraphDeployment with a frontend, and a component for each kind of replica.

Both leave the choice of a machine's GPUs to the device plug-in, and route by load: `routes.json`
has the plan's rates.  A plan with both routes has two of everything.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from ruamel.yaml import YAML

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.flags.launchers.job import LaunchFile
from megatron_hetero.flags.launchers.pod import gpu_resource
from megatron_hetero.serving.fleet.plan import ServingPlan
from megatron_hetero.serving.launch.processes import EngineProcess, processes_of
from megatron_hetero.serving.launch.vllm import vllm_command

LLM_D_IMAGE = "vllm/vllm-openai:v0.27.1"
"""Of llm-d's recipes (`recipes/modelserver/components/images/gpu-vllm/release`)."""
SIDECAR_IMAGE = "ghcr.io/llm-d/llm-d-router-disagg-sidecar:v0.8.0"
DYNAMO_IMAGE = "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.3.1"
_PORT, _ENGINE_PORT = 8000, 8200
"""Of a pod, and of vLLM behind the sidecar in pods that decode."""
_MOST_COMPONENTS = 25
"""Of a DynamoGraphDeployment (`kubebuilder:validation:MaxItems`)."""
_SHARED_MEMORY = {"name": "shm", "emptyDir": {"medium": "Memory"}}


def llm_d_files(plan: ServingPlan, image: str | None) -> tuple[LaunchFile, ...]:
    """Return a manifest of Deployments, and the values of the router of each route.

    Raises:
        UnsupportedError: a replica that is not one pod of vLLM.
    """
    documents = []
    # One Deployment for each kind of replica on a route: pods of a Deployment are alike.
    for route, groups in _routes(plan, "llm-d").items():
        for number, group in enumerate(groups):
            phase = group[0].replica.phase
            labels = {
                "llm-d.ai/guide": f"hetero-{route}",
                # Pods that do both are endpoints for decode too, where no prefill is apart.
                "llm-d.ai/role": "decode" if phase == "both" else phase,
                "megatron-hetero/shape": str(number),
            }
            documents.append({
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": f"hetero-{phase}-{number}", "labels": labels},
                "spec": {
                    "replicas": len(group),
                    "selector": {"matchLabels": labels},
                    "template": {
                        "metadata": {"labels": labels},
                        "spec": _llm_d_pod(plan, group, image or LLM_D_IMAGE),
                    },
                },
            })  # fmt: skip
    values = [
        LaunchFile(f"router-{route}.values.yaml", _yaml([_router_values(route)]))
        for route in _routes(plan, "llm-d")
    ]
    return (LaunchFile("fleet.yaml", _yaml(documents)), *values)


def dynamo_files(plan: ServingPlan, image: str | None) -> tuple[LaunchFile, ...]:
    """Return a manifest with a DynamoGraphDeployment for each route.

    Raises:
        UnsupportedError: a replica that is not one pod of vLLM, or too many kinds of replicas.
    """
    documents = []
    for route, groups in _routes(plan, "dynamo").items():
        if len(groups) >= _MOST_COMPONENTS:
            raise UnsupportedError(
                f"--for dynamo: the plan has {len(groups)} kinds of replicas, and a "
                f"DynamoGraphDeployment has {_MOST_COMPONENTS} components with its frontend; "
                "launch it --for llm-d"
            )
        # The frontend takes the requests of all components.
        frontend = {"name": "main", "image": image or DYNAMO_IMAGE}
        components: list[dict[str, Any]] = [
            {"name": "Frontend", "type": "frontend", "replicas": 1,
             "podTemplate": {"spec": {"containers": [frontend]}}}
        ]  # fmt: skip
        for number, group in enumerate(groups):
            phase = group[0].replica.phase
            components.append({
                "name": f"{phase.capitalize()}{number}",
                "type": "worker" if phase == "both" else phase,
                "replicas": len(group),
                "podTemplate": {"spec": _dynamo_pod(plan, group, image or DYNAMO_IMAGE)},
            })  # fmt: skip
        documents.append({
            "apiVersion": "nvidia.com/v1beta1",
            "kind": "DynamoGraphDeployment",
            "metadata": {"name": f"hetero-{route}"},
            "spec": {"backendFramework": "vllm", "components": components},
        })  # fmt: skip
    return (LaunchFile("fleet.yaml", _yaml(documents)),)


def _routes(plan: ServingPlan, target: str) -> dict[str, list[list[EngineProcess]]]:
    """Return the kinds of replicas of each route: "whole", and "apart" where prefill is.

    Raises:
        UnsupportedError: a replica that is not one pod of vLLM.
    """
    if plan.engine.name == "sglang":
        raise UnsupportedError(
            f"--for {target}: its manifests are written for vLLM alone; plan with --engine vllm, "
            "or launch --for sglang"
        )
    # Route -> (phase, shape) -> processes.
    found: dict[str, dict[tuple[str, str], list[EngineProcess]]] = {}
    for process in processes_of(plan):
        replica = process.replica
        if process.num_ranks > 1:
            raise UnsupportedError(
                f"--for {target}: {replica.name} ({replica.shape}) spans several machines, and the "
                "manifest has pods of one machine; launch it --for vllm"
            )
        route = "whole" if replica.phase == "both" else "apart"
        kinds = found.setdefault(route, {})
        kinds.setdefault((replica.phase, replica.shape), []).append(process)
    return {route: list(kinds.values()) for route, kinds in found.items()}


def _llm_d_pod(plan: ServingPlan, group: Sequence[EngineProcess], image: str) -> dict[str, Any]:
    """Return the pod of replicas of one kind."""
    # Pods that decode have the sidecar on the public port, and the engine behind it.
    decodes = group[0].replica.phase == "decode"
    port = _ENGINE_PORT if decodes else _PORT
    words = _engine_flags(plan, group[0])
    probe = {"httpGet": {"path": "/v1/models", "port": port}, "periodSeconds": 5}
    container = {
        "name": "modelserver",
        "image": image,
        "command": ["vllm", "serve"],
        "args": [plan.model.source, *words, "--port", str(port)],
        **_common(plan, group[0]),
        "ports": [{"containerPort": port, "name": "modelserver"}],
        # A large model takes its time to load: half an hour before it counts as failed.
        "startupProbe": {**probe, "failureThreshold": 360},
        "readinessProbe": probe,
    }
    pod = {"containers": [container], "volumes": [_SHARED_MEMORY], **_placed(group)}
    if decodes:
        proxy = {
            "name": "routing-proxy",
            "image": SIDECAR_IMAGE,
            # As `recipes/modelserver/base/single-host/pd/vllm`; it expects the engine on 8200.
            "args": [f"--port={_PORT}", "--kv-connector=nixlv2", "--secure-serving=false"],
            "ports": [{"containerPort": _PORT, "name": "sidecar"}],
            "restartPolicy": "Always",
        }  # fmt: skip
        pod["initContainers"] = [proxy]
    return pod


def _dynamo_pod(plan: ServingPlan, group: Sequence[EngineProcess], image: str) -> dict[str, Any]:
    """Return the pod of replicas of one kind."""
    phase = group[0].replica.phase
    mode = [] if phase == "both" else ["--disaggregation-mode", phase]
    container = {
        "name": "main",
        "image": image,
        "command": ["python3", "-m", "dynamo.vllm"],
        "args": ["--model", plan.model.source, *mode, *_engine_flags(plan, group[0])],
        **_common(plan, group[0]),
    }
    return {"containers": [container], "volumes": [_SHARED_MEMORY], **_placed(group)}


def _engine_flags(plan: ServingPlan, process: EngineProcess) -> tuple[str, ...]:
    """Return vLLM's flags without its command, its model, and where it listens."""
    # Words behind `vllm serve MODEL`; a pod listens as its manifest says.
    argv = list(vllm_command(plan, process).argv[3:])
    for flag in ("--host", "--port"):
        place = argv.index(flag)
        del argv[place : place + 2]
    return tuple(argv)


def _common(plan: ServingPlan, process: EngineProcess) -> dict[str, Any]:
    """Return the environment, the GPUs and the shared memory of an engine's container."""
    replica = process.replica
    environment: list[Mapping[str, Any]] = [
        {"name": name, "value": value}
        for name, value in vllm_command(plan, process).environment.items()
        # The device plug-in chooses the GPUs, and the pod has its own address.
        if name == "VLLM_PP_LAYER_PARTITION"
    ]
    # Keys and values are agreed on at the pod's own address.
    if replica.phase != "both":
        address = {"fieldRef": {"fieldPath": "status.podIP"}}
        environment.append({"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": address})
    gpus = {gpu_resource(replica.stages[0].gpu): str(replica.num_gpus)}
    return {
        **({"env": environment} if environment else {}),
        "resources": {"limits": gpus, "requests": gpus},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }


def _placed(group: Sequence[EngineProcess]) -> dict[str, Any]:
    """Return what keeps the pods on their machines, whose cards and links the plan was made for."""
    # The pods may be on any machine of their kind in the plan.
    hosts = sorted({process.host for process in group})
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": hosts}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [here]}]}
    resource = gpu_resource(group[0].replica.stages[0].gpu)
    return {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}},
        "tolerations": [{"key": resource, "operator": "Exists", "effect": "NoSchedule"}],
    }


def _router_values(route: str) -> dict[str, Any]:
    """Return the values of llm-d's router chart for a route, beside `recipes/router/base.values`:
    least requests under way, and where prefill is apart its own profile."""
    plugins = ["active-request-scorer", "max-score-picker"]
    # Without its producer the scorer has nothing to read.
    declared = [{"type": name} for name in ("inflight-load-producer", *plugins)]
    if route == "whole":
        config = {
            "plugins": declared,
            "schedulingProfiles": [_profile("default", plugins)],
        }
    else:
        # Apart: a request is prefilled by one profile and decoded by the other.
        decider = "always-disagg-pd-decider"
        handler = {
            "type": "disagg-profile-handler",
            "parameters": {"deciders": {"prefill": decider}},
        }
        filters = ["prefill-filter", "decode-filter"]
        config = {
            "plugins": [{"type": decider}, handler, *({"type": n} for n in filters), *declared],
            "schedulingProfiles": [
                _profile("prefill", ["prefill-filter", *plugins]),
                _profile("decode", ["decode-filter", *plugins]),
            ],
        }
    document = {"apiVersion": "llm-d.ai/v1", "kind": "EndpointPickerConfig", **config}
    name = "hetero-plugins.yaml"
    epp = {"pluginsConfigFile": name, "pluginsCustomConfig": {name: _yaml([document])}}
    labels = {"llm-d.ai/guide": f"hetero-{route}"}
    return {"router": {"epp": epp, "modelServers": {"matchLabels": labels}}}


def _profile(name: str, plugins: Sequence[str]) -> dict[str, Any]:
    return {"name": name, "plugins": [{"pluginRef": plugin} for plugin in plugins]}


def _yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    writer = YAML()
    writer.default_flow_style = False
    # Shared parts are written out: not every reader knows aliases.
    writer.representer.ignore_aliases = lambda *_: True
    text = io.StringIO()
    writer.dump_all(documents, text)
    return text.getvalue()
