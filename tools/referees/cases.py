"""A benchmark case: one YAML file that names referee, cluster, model, batch and anchor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import GpuType, Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import Placement
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.errors import ClusterError, FileFormatError, UnsupportedError
from megatron_hetero.files import read_yaml, validate_document
from megatron_hetero.model.spec import ModelSpec, Workload
from megatron_hetero.model.training import TrainingSpec
from tools.referees import hexiscale
from tools.referees.hexiscale import DEVICE_TYPES, Hexiscale
from tools.referees.hexiscale_costs import HexiscaleCosts
from tools.referees.sailor import Sailor, capacity_bytes
from tools.referees.sailor_costs import SailorCosts
from tools.referees.sailor_tables import MEMORY_GIB, NO_ROUTE_S, SailorTables

PositiveInt = Annotated[int, Field(gt=0, le=100_000)]
Positive = Annotated[float, Field(gt=0)]
_HEADS = {"7B": 32, "13B": 40, "30B": 52, "70B": 64}
_SLOW_LINK = Link(1e9, 0.0)
"""Stands where the planner wants a link; the referee's own network is what counts."""
_LONG_MESSAGE = 256e6
"""Bytes by which the planner may tell paths apart."""


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class MachinesSection(_Section):
    """`count` machines with `gpus` GPUs of one of the referee's types each."""

    device: str | int
    gpus: PositiveInt
    count: PositiveInt = 1
    zone: str = "us-central1-a"

    @property
    def device_type(self) -> str:
        """Its name; YAML reads 4090 as a number."""
        return str(self.device)


class ClusterSection(_Section):
    """Machines; HexiScale's model also wants one bandwidth between all of them."""

    machines: Annotated[tuple[MachinesSection, ...], Field(min_length=1)]
    between_machines_gb_per_s: Positive | None = None


class BatchSection(_Section):
    """Sequences of one step, and the micro-batch sizes that may be chosen."""

    sequences: PositiveInt
    micro_batch_sizes: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1,)


class AnchorSection(_Section):
    """The score to beat and where it comes from."""

    value: Positive
    unit: Literal["s", "it/s", "tokens/s"]
    source: str


class CaseModel(_Section):
    """The file."""

    version: Literal[1]
    case: str
    referee: Literal["hexiscale", "sailor"]
    cluster: ClusterSection
    model: str
    batch: BatchSection
    anchor: AnchorSection


@dataclass(frozen=True)
class Score:
    """What a referee says of a plan; `missing_bytes` above zero is out of memory."""

    step_s: float
    missing_bytes: float


@dataclass(frozen=True)
class Question:
    """A case at one micro-batch size: what is planned, by which prices, and who scores it."""

    cluster: Cluster
    workload: Workload
    make_costs: Callable[[Cluster, Workload, Profile | None], CostModel]
    score: Callable[[Placement], Score]


@dataclass(frozen=True)
class Case:
    """A checked case."""

    model: CaseModel
    questions: tuple[Question, ...]

    def score(self, step_s: float) -> float:
        """Seconds of a step in the anchor's unit."""
        workload = self.questions[0].workload
        match self.model.anchor.unit:
            case "s":
                return step_s
            case "it/s":
                return 1 / step_s
            case "tokens/s":
                return self.model.batch.sequences * workload.model.seq_length / step_s

    def ratio(self, step_s: float) -> float:
        """How much better than the anchor: above 1 is faster."""
        score, anchor = self.score(step_s), self.model.anchor
        return anchor.value / score if anchor.unit == "s" else score / anchor.value


def load_case(path: Path | str) -> Case:
    """Read and check a case.

    Raises:
        FileFormatError: not a case, or one of things that its referee does not know.
    """
    document = read_yaml(path)
    model = validate_document(document, CaseModel, FileFormatError)
    build = _hexiscale if model.referee == "hexiscale" else _sailor
    try:
        questions = tuple(build(model, size) for size in model.batch.micro_batch_sizes)
    except FileFormatError as error:
        raise FileFormatError(f"{path}: {error}") from None
    return Case(model, questions)


def _hexiscale(case: CaseModel, micro_batch_size: int) -> Question:
    if case.model not in hexiscale.MODELS:
        raise FileFormatError(
            f"model: found {case.model!r}; the referee knows {', '.join(hexiscale.MODELS)}"
        )
    if case.cluster.between_machines_gb_per_s is None:
        raise ClusterError("cluster: between_machines_gb_per_s is missing")
    shape = hexiscale.MODELS[case.model]
    memory = {name: row.memory_bytes for name, row in DEVICE_TYPES.items()}
    peaks = {name: row.flops_per_s for name, row in DEVICE_TYPES.items()}
    between = case.cluster.between_machines_gb_per_s * 1024**3
    cluster = _cluster(case.cluster, memory, peaks)
    model = _model(
        shape.hidden_size,
        shape.num_layers,
        _HEADS[case.model],
        hexiscale.SEQ_LENGTH,
        hexiscale.VOCAB_SIZE,
    )
    workload = _workload(case, model, micro_batch_size, recompute="full")
    referee = Hexiscale(shape, between, micro_batch_size)

    def make_costs(
        cluster: Cluster, workload: Workload, profile: Profile | None = None
    ) -> HexiscaleCosts:
        return HexiscaleCosts(cluster, workload, referee)

    def score(placement: Placement) -> Score:
        pipelines = make_costs(cluster, workload).pipelines(placement)
        step_s = referee.step_s(pipelines)
        if step_s >= hexiscale.NOT_EXPRESSIBLE_S:
            raise UnsupportedError(
                "replicas hold a layer at widths that the referee cannot match (1, 2 and 5 are "
                "such); the plan cannot be scored"
            )
        return Score(step_s, referee.missing_bytes(pipelines))

    return Question(cluster, workload, make_costs, score)


def _sailor(case: CaseModel, micro_batch_size: int) -> Question:
    if case.cluster.between_machines_gb_per_s is not None:
        raise ClusterError("cluster: between_machines_gb_per_s is HexiScale's; Sailor has tables")
    tables = SailorTables(case.model, micro_batch_size)
    shape = tables.shape
    memory = {gpu: capacity_bytes(gpu) for gpu in MEMORY_GIB}

    def link(sender: Node, receiver: Node) -> Link:
        """Tells the search which paths are alike; the referee has its own prices of them."""
        here, there = ((node.site, node.gpu_type.name, 1) for node in (sender, receiver))
        return Link(_LONG_MESSAGE / tables.message_s(here, there, _LONG_MESSAGE), 0.0)

    cluster = _cluster(case.cluster, memory, dict.fromkeys(MEMORY_GIB, 1.0), link)
    model = _model(
        shape.hidden_size, shape.num_layers, shape.num_heads, shape.seq_length, shape.vocab_size
    )
    workload = _workload(case, model, micro_batch_size)
    referee = Sailor(case.model, micro_batch_size)

    def make_costs(
        cluster: Cluster, workload: Workload, profile: Profile | None = None
    ) -> SailorCosts:
        return SailorCosts(cluster, workload, referee)

    def score(placement: Placement) -> Score:
        pipelines = make_costs(cluster, workload).pipelines(placement)
        most = max(replica.num_micro_batches for replica in placement.replicas)
        step_s = referee.step_s(pipelines, most)
        if step_s >= NO_ROUTE_S:
            raise UnsupportedError(
                "the plan has neighbours between whose zones and GPU types Sailor's tables have no "
                "network; it cannot be scored"
            )
        return Score(step_s, referee.missing_bytes(pipelines))

    return Question(cluster, workload, make_costs, score)


def _cluster(
    section: ClusterSection,
    memory_bytes: dict[str, int],
    peaks: dict[str, float],
    link: Callable[[Node, Node], Link] = lambda *_: _SLOW_LINK,
) -> Cluster:
    nodes: list[Node] = []
    for i, machines in enumerate(section.machines):
        name = machines.device_type
        if name not in memory_bytes:
            raise ClusterError(
                f"cluster.machines[{i}].device: found {name!r}; the referee knows "
                f"{', '.join(memory_bytes)}"
            )
        peak = peaks[name]
        gpu = GpuType(
            name,
            memory_bytes[name],
            1e12,
            {"fp32": peak, "fp16": peak, "bf16": peak, "fp8": None},
            None,
            "the referee's table",
        )
        for _ in range(machines.count):
            host = f"m{len(nodes):04d}"
            nodes.append(Node(host, gpu, machines.gpus, machines.zone, host, _SLOW_LINK))
    between: dict[tuple[str, str, str, str], Link] = {}
    links: dict[tuple[str, str], Link] = {}
    for a, b in permutations(nodes, 2):
        key = a.site, a.gpu_type.name, b.site, b.gpu_type.name
        if key not in between:
            between[key] = link(a, b)
        links[a.name, b.name] = between[key]
    return Cluster(tuple(nodes), links, Limits(memory_reserve_bytes=0), "benchmark case")


def _model(hidden: int, layers: int, heads: int, seq_length: int, vocab: int) -> ModelSpec:
    return ModelSpec(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        vocab_size=vocab,
        seq_length=seq_length,
        max_position_embeddings=seq_length,
    )


def _workload(
    case: CaseModel,
    model: ModelSpec,
    micro_batch_size: int,
    recompute: Literal["none", "full"] = "none",
) -> Workload:
    if case.batch.sequences % micro_batch_size:
        raise FileFormatError(
            f"batch: {case.batch.sequences} sequences are no multiple of micro-batch size "
            f"{micro_batch_size}"
        )
    training = TrainingSpec(case.batch.sequences, micro_batch_size)
    return Workload(model, replace(training, recompute=recompute), (), f"case {case.case}")
