"""The schema of workload.yaml, version 1, field by field."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megatron_hetero.cluster.file.quantities import Latency
from megatron_hetero.files.format_version import Version1

MAX_CLASSES = 64
MAX_TOKENS = 4_000_000

Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Rate = Annotated[float, Field(gt=0, le=1e6, description="Requests per second, on average.")]


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class ValueSection(_Section):
    """Some tokens, and how often: weights count relative to each other."""

    tokens: Tokens
    weight: Annotated[float, Field(gt=0, le=1e9)]


LengthField = Annotated[
    Tokens | Annotated[tuple[ValueSection, ...], Field(min_length=1, max_length=256)],
    Field(description="One number of tokens, or a list of {tokens, weight}."),
]


class DeadlineSection(_Section):
    """Deadlines of a class; what is left out has none."""

    first_token: Annotated[
        Latency | None, Field(description="From arrival to the first token.")
    ] = None
    between_tokens: Annotated[
        Latency | None, Field(description="Mean time between the tokens after the first.")
    ] = None

    @model_validator(mode="after")
    def _above_zero(self) -> Self:
        for name in ("first_token", "between_tokens"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name}: 0 s is no deadline that anything keeps; leave it out")
        return self


class ClassSection(DeadlineSection):
    """Requests that are alike."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
    rate: Rate
    input: LengthField
    output: LengthField
    shared_prefix: Annotated[
        float,
        Field(
            ge=0, lt=1,
            description="Part of the input that all requests of the class begin with.",
        ),
    ] = 0.0  # fmt: skip


class TraceSection(DeadlineSection):
    """A trace of requests.  They are put into classes by the lengths of input and output."""

    file: Annotated[str, Field(min_length=1, description="Relative to workload.yaml.")]
    format: Annotated[
        Literal["csv", "azure", "burstgpt", "mooncake"],
        Field(description="csv has the columns arrival_s, input_tokens, output_tokens."),
    ] = "csv"
    speed: Annotated[
        float, Field(gt=0, le=1e6, description="Rates as a multiple of the trace's.")
    ] = 1.0
    classes: Annotated[
        Literal[1, 4, 9], Field(description="Parts: 1, 2 x 2 or 3 x 3 by input and output.")
    ] = 4


class WorkloadSection(_Section):
    """The whole of workload.yaml: classes, or a trace."""

    version: Version1
    classes: Annotated[tuple[ClassSection, ...], Field(max_length=MAX_CLASSES)] = ()
    trace: TraceSection | None = None
    attainment: Annotated[
        float,
        Field(gt=0, lt=1, description="Part of requests whose deadlines must hold."),
    ] = 0.9

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        # Both forms are given, or neither.
        if bool(self.classes) == (self.trace is not None):
            raise ValueError(
                "write either classes (each with rate, input and output) or a trace (with file)"
            )
        names = [c.name for c in self.classes]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f'classes: the name "{twice[0]}" is given twice')
        return self


def request_mix_json_schema() -> dict[str, Any]:
    """Return the JSON Schema of workload.yaml."""
    schema = WorkloadSection.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "megatron-hetero workload.yaml"
    return schema
