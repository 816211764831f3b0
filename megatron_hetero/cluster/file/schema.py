"""The schema of cluster.yaml, version 1, field by field."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from megatron_hetero.cluster.file.quantities import Bandwidth, Latency, MemorySize, Peak
from megatron_hetero.cluster.makers import Library
from megatron_hetero.cluster.names import check_host_name
from megatron_hetero.files.format_version import Version1
from megatron_hetero.units import format_bandwidth

MAX_GPUS_PER_NODE = 64
MAX_PAIRS_PER_NODE = 256
MAX_NODES = 8192
MAX_SITES_OF_LINK = 256
MAX_PARALLEL_SIZE = 1024

HostName = Annotated[
    str, AfterValidator(check_host_name), WithJsonSchema({"type": "string", "maxLength": 253})
]
Count = Annotated[int, Field(ge=1, le=MAX_PARALLEL_SIZE)]
Price = Annotated[
    float,
    Field(ge=0, le=1e9, description="In any one currency, the same everywhere."),
]

_GpuIndex = Annotated[int, Field(ge=0, lt=MAX_GPUS_PER_NODE)]
_UPLINK = Field(description="Most bytes per second that all of it together sends, or receives.")


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class IncastSection(_Section):
    """A limit of concurrent senders: up to `senders` may send to one receiver at once; each one
    more makes a byte, from any of them, take `slowdown` times its own time longer."""

    senders: Annotated[int, Field(ge=1, le=MAX_NODES)]
    slowdown: Annotated[float, Field(ge=0, le=100)]


class RingSection(_Section):
    """What each GPU gets in a ring of `size` GPUs or more, in each direction."""

    size: Annotated[int, Field(ge=3, le=MAX_PARALLEL_SIZE)]
    bandwidth: Bandwidth


class LinkSection(_Section):
    """A path between two GPUs: one direction of it, as one pair of GPUs sees it."""

    bandwidth: Bandwidth
    latency: Latency
    jitter: Latency = 0.0
    reduce_bandwidth: Bandwidth | None = None
    incast: IncastSection | None = None
    groups: Annotated[
        tuple[RingSection, ...],
        Field(
            max_length=16,
            strict=False,  # a list, also behind a validator that sees Python's values
            description="What rings of several GPUs get, where they crowd a bus that a pair has "
            "for itself.",
        ),
    ] = ()

    @model_validator(mode="after")
    def _no_ring_has_more_than_a_pair(self) -> Self:
        for ring in self.groups:
            if ring.bandwidth > self.bandwidth:
                raise ValueError(
                    f"groups: a ring of {ring.size} cannot have {format_bandwidth(ring.bandwidth)} "
                    f"where a pair has {format_bandwidth(self.bandwidth)}"
                )
        if len({ring.size for ring in self.groups}) < len(self.groups):
            raise ValueError("groups: a size of ring is given twice")
        return self


class GpuSection(_Section):
    """A GPU by its numbers: all of a new one, or the corrections of one of the catalogue."""

    memory: MemorySize | None = None
    memory_bandwidth: Bandwidth | None = None
    bf16: Peak | None = None
    fp16: Peak | None = None
    fp32: Peak | None = None
    fp8: Peak | None = None
    compute_capability: Annotated[str, Field(pattern=r"^[0-9]{1,2}\.[0-9]$")] | None = None
    library: (
        Annotated[Library, Field(description="Communication library of its machines.")] | None
    ) = None
    launch_time: (
        Annotated[
            Latency, Field(description="Time of the host for each operator that it launches.")
        ]
        | None
    ) = None
    price_per_hour: Price | None = None


class CardsSection(_Section):
    """Cards side by side on a machine's PCI bus: `count` of a single `type`.

    `link` joins any two of them.  `reserve` is memory of each that something else uses, a screen
    for example; `limits.memory_reserve` is kept free beside it.
    """

    type: str
    count: Annotated[int, Field(ge=1, le=MAX_GPUS_PER_NODE)]
    link: LinkSection | None = None
    reserve: MemorySize | None = None


class CardPairSection(LinkSection):
    """Path between any two of the cards given by place on the PCI bus: an NVLink bridge, a slot of
    few lanes."""

    cards: Annotated[tuple[_GpuIndex, ...], Field(min_length=2, max_length=MAX_GPUS_PER_NODE)]


class NicsSection(_Section):
    """NICs of a machine, all alike.  `gpus` are the GPUs near each, by their places on the PCI bus;
    left out, the GPUs are divided among them in order, as evenly as they go."""

    count: Annotated[int, Field(ge=1, le=MAX_GPUS_PER_NODE)]
    bandwidth: Bandwidth
    gpus: Annotated[tuple[tuple[_GpuIndex, ...], ...], Field(max_length=MAX_GPUS_PER_NODE)] = ()


class NodeSection(_Section):
    """A machine: `count` equal GPUs of type `gpu`, or `gpus` of several types in the order of its
    PCI bus.

    `link` joins any two of its cards for which nothing closer is said (`pairs`, a link of the
    cards' entry).  `root_complex` is what all traffic between unlike cards of the machine, or
    between cards that are joined unlike, shares, both directions together.
    """

    name: HostName
    gpu: str | None = None
    count: Annotated[int, Field(ge=1, le=MAX_GPUS_PER_NODE)] | None = None
    gpus: Annotated[tuple[CardsSection, ...], Field(max_length=MAX_GPUS_PER_NODE)] = ()
    site: HostName = "main"
    host: HostName | None = None
    link: LinkSection | None = None
    pairs: Annotated[tuple[CardPairSection, ...], Field(max_length=MAX_PAIRS_PER_NODE)] = ()
    root_complex: Bandwidth | None = None
    uplink: Annotated[Bandwidth | None, _UPLINK] = None
    nics: NicsSection | None = None
    price_per_hour: Price | None = None

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        if self.gpus and (self.gpu is not None or self.count is not None):
            raise ValueError('both "gpus" and "gpu"/"count" are given; keep one of the two forms')
        if not self.gpus and (self.gpu is None or self.count is None):
            missing = "gpu" if self.gpu is None else "count"
            raise ValueError(
                f'the key "{missing}" is missing: write gpu and count (equal cards), or gpus: '
                "[{type: RTX-4090, count: 1}, {type: RTX-3090, count: 2}]"
            )
        if self.num_cards > MAX_GPUS_PER_NODE:
            raise ValueError(f"{self.num_cards} cards; a machine has {MAX_GPUS_PER_NODE} at most")
        return self

    @property
    def cards(self) -> tuple[CardsSection, ...]:
        """Return its cards in the order of the bus, in either form."""
        if self.gpus:
            return self.gpus
        return (CardsSection(type=self.gpu or "", count=self.count or 0),)

    @property
    def num_cards(self) -> int:
        """Count all its GPUs."""
        return sum(cards.count for cards in self.cards)


class SiteSection(_Section):
    """Capacities that the nodes of a site share."""

    uplink: Annotated[Bandwidth | None, _UPLINK] = None


class SiteLinkSection(LinkSection):
    """The path between the nodes of any two of these sites, both directions.

    Of several lists that hold two sites, the shortest counts.  `shared` is who shares the bandwidth
    in each direction: all nodes of each pair of sites one line (`pair`), all sites of the list one
    backbone (`all`; towards sites that stand later in the list, and back), or nobody (`none`).
    """

    sites: Annotated[tuple[str, ...], Field(min_length=2, max_length=MAX_SITES_OF_LINK)]
    shared: Literal["pair", "all", "none"] = "pair"
    price_per_gb: Price | None = None


class TypesLinkSection(LinkSection):
    """Path between two cards of different types in the same machine."""

    types: Annotated[tuple[str, ...], Field(min_length=2, max_length=2)]


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
    between_types: tuple[TypesLinkSection, ...] = ()
    between_nodes: (
        Annotated[
            Annotated[LinkSection, Tag("link")] | Annotated[dict[str, LinkSection], Tag("by site")],
            Discriminator(_one_link_or_by_site),
        ]
        | None
    ) = None
    between_sites: tuple[SiteLinkSection, ...] = ()
    measured: tuple[MeasuredLinkSection, ...] = ()

    @field_validator("inside_node", mode="before")
    @classmethod
    def _is_by_type(cls, value: Any) -> Any:
        if _one_link_or_by_site(value) == "link":
            raise ValueError(
                "has one link for each GPU type, with its name before it, for example "
                "inside_node: {A100-80GB: {bandwidth: 200 GB/s, latency: 5 us}}"
            )
        return value


class LimitsSection(_Section):
    """Limits that every plan must keep to."""

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
    library: Annotated[Library, Field(description="Only GPUs with it are used.")] | None = None
    memory_reserve: (
        Annotated[
            MemorySize,
            Field(
                description="Kept free on every GPU for CUDA, libraries and fragments. Left out: "
                "what these are predicted to take, and 1 GB and the largest tensor (1.5 GB at "
                "least) beside it."
            ),
        ]
        | None
    ) = None


class ClusterSection(_Section):
    """The whole of cluster.yaml."""

    version: Version1
    gpu_types: dict[str, GpuSection] = {}
    nodes: Annotated[tuple[NodeSection, ...], Field(min_length=1, max_length=MAX_NODES)]
    sites: dict[str, SiteSection] = {}
    links: LinksSection = LinksSection()
    limits: LimitsSection = LimitsSection()
