"""Prices of inference: what has to hold on any card, and figures that can be counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_hetero.cluster.catalogue import gpu_type, gpu_type_names
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.errors import UnsupportedError, UsageError
from megatron_hetero.serving.prices.engine import ENGINES
from megatron_hetero.serving.prices.kernels import card_speed
from megatron_hetero.serving.prices.matrices import Matrix, layer_matrices
from megatron_hetero.serving.prices.memory import cache_pool, weight_bytes
from megatron_hetero.serving.prices.rates import PhaseRates
from megatron_hetero.serving.prices.served import ServedModel, load_served
from megatron_hetero.serving.prices.steps import (
    PipelinePrice,
    ReplicaPipeline,
    ReplicaStage,
    stage_prices,
)
from megatron_hetero.serving.prices.work import StepWork
from megatron_hetero.serving.simulate.queue import ReplicaQueue
from megatron_hetero.serving.simulate.run import FleetRun, SimulatedReplica
from megatron_hetero.serving.workload.requests import (
    Request,
    RequestClass,
    RequestMix,
    TokenLengths,
)

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/serving"
NVLINK = Link(200e9, 3e-6)


def example_served(weights: str = "16-bit", kv: str = "16-bit") -> ServedModel:
    """Return the model of the example."""
    return load_served(EXAMPLE, weights, kv)


def pipeline_of(gpu: str, width: int, *layers: int) -> ReplicaPipeline:
    """Return a pipeline of equally wide stages with so many layers each."""
    stages = tuple(ReplicaStage(gpu_type(gpu), width, n, NVLINK) for n in layers)
    return ReplicaPipeline(stages, (NVLINK,) * (len(layers) - 1))


def test_bytes_of_llama_8b() -> None:
    served = example_served()
    assert served.model.num_layers * served.kv_bytes(width=1) == 2 * 8 * 128 * 32 * 2
    (price,) = stage_prices(pipeline_of("H100-80GB", 1, 32).stages, served)
    assert weight_bytes(price) == pytest.approx(2 * 8.03e9, rel=1e-3)
    (fp8,) = stage_prices(pipeline_of("H100-80GB", 1, 32).stages, example_served("fp8"))
    embeddings = 2 * 128256 * 4096 * 2
    assert weight_bytes(fp8) == pytest.approx(6.98e9 + embeddings, rel=1e-2)


def test_weights_have_the_format_of_the_checkpoint(tmp_path: Path) -> None:
    config = json.loads((EXAMPLE / "config.json").read_text())

    def load(weights: str | None, **quantization: object) -> str:
        data = {**config, "quantization_config": quantization} if quantization else config
        (tmp_path / "config.json").write_text(json.dumps(data))
        return load_served(tmp_path, weights, "16-bit").weights

    assert load(None) == "16-bit"
    assert load("int4") == "int4"
    assert load(None, quant_method="fp8") == load("fp8", quant_method="fp8") == "fp8"
    assert load(None, quant_method="awq", bits=4) == load(None, quant_method="gptq", bits=4)
    with pytest.raises(UsageError, match=r"--weights 16-bit: .* are int4"):
        load("16-bit", quant_method="awq", bits=4)
    with pytest.raises(UnsupportedError, match="'bitsandbytes', whose weights are not priced"):
        load(None, quant_method="bitsandbytes")
    assert load("int4", quant_method="bitsandbytes") == "int4"
    assert load_served(tmp_path, "int4", "16-bit").is_quantized
    assert not load_served(EXAMPLE, "fp8", "16-bit").is_quantized
    # ModelOpt writes a file beside the config, which engines read too.
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="'modelopt', whose weights are not priced"):
        load(None)


def test_a_model_of_few_positions_is_served(tmp_path: Path) -> None:
    """The loader asks for a sequence length, which is the job's and not the user's."""
    config = {
        "model_type": "gpt2", "vocab_size": 50257, "n_layer": 12, "n_embd": 768, "n_head": 12,
        "n_positions": 1024, "activation_function": "gelu_new",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_served(tmp_path, None, "16-bit").most_tokens == 1024


def test_key_value_heads_are_copied_where_a_group_is_wider() -> None:
    served = example_served()
    assert served.kv_bytes(8) == served.kv_bytes(1) / 8
    assert served.kv_bytes(16) == served.kv_bytes(8)
    assert served.allows_width(16)
    assert not served.allows_width(3)
    assert example_served(kv="fp8").kv_bytes(1) == served.kv_bytes(1) / 2


def test_the_fullest_stage_bounds_the_tokens_of_a_pipeline() -> None:
    """vLLM gives all ranks the smallest number of KV blocks of any rank."""
    served, engine = example_served(), ENGINES["vllm"]
    even = cache_pool(pipeline_of("L40S", 1, 16, 16), served, engine).tokens
    uneven = cache_pool(pipeline_of("L40S", 1, 24, 8), served, engine).tokens
    alone = cache_pool(pipeline_of("L40S", 1, 24), served, engine).tokens
    assert even > uneven > 0
    assert uneven % engine.block_tokens == 0
    assert uneven == pytest.approx(alone, rel=0.05)
    assert cache_pool(pipeline_of("T4", 1, 32), served, engine).num_blocks == 0


def test_experts_are_read_as_far_as_tokens_reach_them() -> None:
    matrix = Matrix(8, 8, num_experts=16, active=2)
    assert matrix.touched(0.5) == pytest.approx(1.0)
    assert 1 < matrix.touched(4) < 8
    assert matrix.touched(1000) == pytest.approx(16)
    assert matrix.elements == 8 * 8 * 16


def test_a_layer_divides_into_all_of_its_parameters() -> None:
    model = example_served().model
    whole = sum(m.elements for m in layer_matrices(model, 1))
    for width in (2, 4, 8):
        assert width * sum(m.elements for m in layer_matrices(model, width)) == whole


@pytest.mark.parametrize("gpu", [n for n in gpu_type_names() if gpu_type(n).peak_flops["bf16"]])
def test_steps_take_longer_with_more_work_on_every_card(gpu: str) -> None:
    price = PipelinePrice(pipeline_of(gpu, 2, 32), example_served(), ENGINES["vllm"])
    works = [
        StepWork(1, 1, 0, 100), StepWork(8, 8, 0, 800), StepWork(8, 8, 0, 8000),
        StepWork(520, 8, 131_328, 8000), StepWork(2056, 8, 2_000_000, 8000),
    ]  # fmt: skip
    times = [price.times(work)[0] for work in works]
    assert times == sorted(times)
    assert card_speed(gpu_type(gpu), "bf16").products.seconds(0, 0) == 0.0


def test_decode_of_one_request_reads_the_weights_once() -> None:
    """A token on an H100: 16 GB at the measured part of 3.35 TB/s, and little beside."""
    price = PipelinePrice(pipeline_of("H100-80GB", 1, 32), example_served(), ENGINES["vllm"])
    step_s, _ = price.times(StepWork(1, 1, 0, 512))
    read_s = 15.0e9 / (gpu_type("H100-80GB").memory_bytes_per_s * 0.84)
    assert read_s < step_s < 1.5 * read_s


def test_pipelines_overlap_their_stages_and_are_as_slow_as_the_slowest() -> None:
    served, engine = example_served(), ENGINES["vllm"]
    work = StepWork(64, 64, 0, 65_536)
    one = PipelinePrice(pipeline_of("L40S", 1, 32), served, engine).times(work)
    two = PipelinePrice(pipeline_of("L40S", 1, 16, 16), served, engine).times(work)
    uneven = PipelinePrice(pipeline_of("L40S", 1, 24, 8), served, engine).times(work)
    assert two[0] == pytest.approx(one[0], rel=0.02)
    assert two[1] < 0.6 * one[1] < uneven[1] < one[1]


def test_deadlines_bound_the_batch_and_refuse_what_is_too_slow() -> None:
    rates = PhaseRates(PipelinePrice(pipeline_of("L40S", 1, 32), example_served(), ENGINES["vllm"]))

    def kind(first_s: float, between_s: float, tokens: int = 824) -> RequestClass:
        lengths = TokenLengths(((tokens, 1.0),)), TokenLengths(((253, 1.0),))
        return RequestClass("w", 1.0, *lengths, first_s, between_s)

    free, tight = rates.rate("both", kind(9, 9)), rates.rate("both", kind(9, 0.04))
    assert 0 < tight.per_s < free.per_s
    assert tight.batch < free.batch
    assert tight.between_tokens_s <= 0.04
    assert rates.rate("both", kind(9, 0.01)).per_s == 0
    assert rates.rate("prefill", kind(0.01, 9)).per_s == 0
    assert rates.rate("decode", kind(0.01, 9)).per_s > 0
    assert rates.rate("both", kind(9, 9, tokens=400_000)).per_s == 0
    apart = 1 / (
        1 / rates.rate("prefill", kind(9, 9)).per_s + 1 / rates.rate("decode", kind(9, 9)).per_s
    )
    assert free.per_s == pytest.approx(apart, rel=0.25)


@pytest.mark.parametrize("layers", [(32,), (16, 16)])
@pytest.mark.parametrize(("prompt", "answer"), [(824, 253), (2455, 510)])
def test_the_simulation_serves_what_rates_promise(
    layers: tuple[int, ...], prompt: int, answer: int
) -> None:
    """At 0.9 of the rate requests leave as they come, also where a prompt in one batch of a
    pipeline holds up the other; deeper pipelines throw out requests before, as memory is full."""
    price = PipelinePrice(pipeline_of("RTX-3090", 1, *layers), example_served(), ENGINES["vllm"])
    rates = PhaseRates(price)
    lengths = TokenLengths(((prompt, 1.0),)), TokenLengths(((answer, 1.0),))
    kind = RequestClass("c", 1.0, *lengths)
    per_s = 0.9 * rates.rate("both", kind).per_s
    queue = ReplicaQueue(price, rates.pool, num_lanes=len(layers))
    run = FleetRun([SimulatedReplica(queue, "both", "-", (1.0,))], RequestMix((kind,)))
    run.run([Request(number / per_s, 0, prompt, answer) for number in range(600)])
    ends = sorted(r.last_s for r in run.finished)
    assert 200 / (ends[400] - ends[200]) > 0.85 * per_s


def test_a_replica_serves_one_request_at_a_time_where_no_two_keep_their_deadlines() -> None:
    """Beside the decode of a short answer a long prompt would miss the deadline between tokens."""
    price = PipelinePrice(pipeline_of("H100-80GB", 1, 32), example_served(), ENGINES["vllm"])
    rates = PhaseRates(price)
    lengths = TokenLengths(((8000, 1.0),)), TokenLengths(((4, 1.0),))
    found = rates.rate("both", RequestClass("c", 1.0, *lengths, 4.0, 0.06))
    alone_s = found.first_token_s + 3 * found.between_tokens_s
    assert found.batch == 1
    assert found.between_tokens_s <= 0.06
    assert found.per_s == pytest.approx(1 / alone_s)
    # Several at once serve more, where there is no deadline.
    assert rates.rate("both", RequestClass("c", 1.0, *lengths)).per_s > found.per_s
    assert rates.rate("both", RequestClass("c", 1.0, *lengths, 4.0, 1e-3)).per_s == 0
