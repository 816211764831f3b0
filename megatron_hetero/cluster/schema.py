"""The schema of cluster.yaml, version 1: what may stand in the file, field by field."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
)

from megatron_hetero.cluster.names import check_host_name
from megatron_hetero.cluster.quantities import Bandwidth, Latency, MemorySize, Peak

MAX_GPUS_PER_NODE = 64
MAX_NODES = 8192
MAX_SITES_OF_LINK = 256
MAX_PARALLEL_SIZE = 1024

HostName = Annotated[
    str, AfterValidator(check_host_name), WithJsonSchema({"type": "string", "maxLength": 253})
]
Count = Annotated[int, Field(ge=1, le=MAX_PARALLEL_SIZE)]
Price = Annotated[
    float,
    Field(ge=0, le=1e9, strict=False, description="In any one currency, the same everywhere."),
]


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class IncastSection(_Section):
    """So many `senders` may send to one receiver at once; each one more makes a byte, from any of
    them, take `slowdown` times its own time longer."""

    senders: Annotated[int, Field(ge=1, le=MAX_NODES)]
    slowdown: Annotated[float, Field(ge=0, le=100, strict=False)]


class LinkSection(_Section):
    """A path between two GPUs: one direction of it, as one pair of GPUs sees it."""

    bandwidth: Bandwidth
    latency: Latency
    jitter: Latency = 0.0
    reduce_bandwidth: Bandwidth | None = None
    incast: IncastSection | None = None


class GpuSection(_Section):
    """A GPU by its numbers: all of a new one, or the corrections of one of the catalogue."""

    memory: MemorySize | None = None
    memory_bandwidth: Bandwidth | None = None
    bf16: Peak | None = None
    fp16: Peak | None = None
    fp32: Peak | None = None
    fp8: Peak | None = None
    compute_capability: Annotated[str, Field(pattern=r"^[0-9]{1,2}\.[0-9]$")] | None = None
    price_per_hour: Price | None = None


class NodeSection(_Section):
    """A machine with `count` equal GPUs."""

    name: HostName
    gpu: str
    count: Annotated[int, Field(ge=1, le=MAX_GPUS_PER_NODE)]
    site: HostName = "main"
    host: HostName | None = None
    link: LinkSection | None = None
    price_per_hour: Price | None = None


class SiteLinkSection(LinkSection):
    """The path between the nodes of any two of these sites, both directions.

    Of several lists that hold two sites, the shortest counts.
    """

    sites: Annotated[tuple[str, ...], Field(min_length=2, max_length=MAX_SITES_OF_LINK)]
    price_per_gb: Price | None = None


class MeasuredLinkSection(LinkSection):
    """A measured path between two nodes, both directions; it beats the classes."""

    nodes: Annotated[tuple[str, ...], Field(min_length=2, max_length=2)]


def _one_link_or_by_site(value: Any) -> str:
    is_link = isinstance(value, LinkSection) or (
        isinstance(value, dict) and ("bandwidth" in value or "latency" in value)
    )
    return "link" if is_link else "by site"


class LinksSection(_Section):
    """Links as classes and, where known, measured pairs."""

    inside_node: dict[str, LinkSection] = {}
    between_nodes: (
        Annotated[
            Annotated[LinkSection, Tag("link")] | Annotated[dict[str, LinkSection], Tag("by site")],
            Discriminator(_one_link_or_by_site),
        ]
        | None
    ) = None
    between_sites: tuple[SiteLinkSection, ...] = ()
    measured: tuple[MeasuredLinkSection, ...] = ()


class LimitsSection(_Section):
    """What every plan must keep to."""

    max_tensor_parallel: Count | None = None
    max_pipeline_parallel: Count | None = None
    num_replicas: Count | None = None
    idle: tuple[str, ...] = ()
    first_stage: tuple[str, ...] = ()
    last_stage: tuple[str, ...] = ()
    no_tensor_parallel_across: tuple[str, ...] = ("nodes",)
    no_data_parallel_across_sites: bool = False
    max_price_per_hour: Price | None = None
    as_given: tuple[str, ...] = ()
    memory_reserve: MemorySize = 1 << 30


class ClusterSection(_Section):
    """The whole of cluster.yaml."""

    version: Literal[1]
    gpu_types: dict[str, GpuSection] = {}
    nodes: Annotated[tuple[NodeSection, ...], Field(min_length=1, max_length=MAX_NODES)]
    links: LinksSection = LinksSection()
    limits: LimitsSection = LimitsSection()
