"""Files of measured steps: our CSV, and what `vllm bench serve` saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.errors import FileFormatError
from megatron_hetero.serving.prices.profile_file import COLUMNS, read_measured_steps
from megatron_hetero.serving.prices.work import StepWork

HEADER = ",".join(COLUMNS)
DECODE = "l4,vllm,0.32,llama,1,16-bit,decode,1,512,8,0.05"
PREFILL = "L4,vllm,0.32,llama,1,16-bit,prefill,512,0,1,0.3"
BENCH: dict[str, Any] = {
    "date": "20261101-100000", "backend": "vllm", "model_id": "llama", "gpu": "L4",
    "version": "0.32", "max_concurrency": 1, "completed": 20, "total_input_tokens": 10240,
    "total_output_tokens": 2560, "median_ttft_ms": 300.0, "median_itl_ms": 41.5,
}  # fmt: skip


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_rows_become_steps(tmp_path: Path) -> None:
    path = _write(tmp_path / "steps.csv", f"{HEADER}\n{DECODE}\n\n{PREFILL}\n")
    decode, prefill = read_measured_steps([path], ())
    assert (decode.gpu, decode.batch, decode.context, decode.where) == ("L4", 8, 512, f"{path}:2")
    assert decode.num_layers is None and decode.keys_values == "16-bit"
    assert decode.work == StepWork(8, 8, 0, 8 * 512)
    assert prefill.where == f"{path}:4"
    assert prefill.work == StepWork(512, 1, 512 * 513 / 2, 0)
    path = _write(tmp_path / "own.csv", f"{HEADER},layers,kv\n{DECODE},1,fp8\n".replace("l4", "my"))
    (step,) = read_measured_steps([path], {"my"})
    assert (step.gpu, step.num_layers, step.keys_values) == ("my", 1, "fp8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ':1: there is no column "gpu"'),
        (HEADER + "\n", "no steps below the header"),
        (HEADER + ",speed\n", ':1: column "speed" is not known'),
        (HEADER + ",gpu\n", ':1: there are two columns "gpu"'),
        (HEADER + "\n" + DECODE + ",1\n", ":2: 12 values under 11 columns"),
        (HEADER + "\n" + DECODE.replace("l4", "l5"), ':2: "l5" is not a GPU'),
        (HEADER + "\n" + DECODE.replace("vllm", "trt"), ':2: engine "trt" is none of vllm, sglang'),
        (HEADER + "\n" + DECODE.replace("16-bit", "bf16"), ':2: weights "bf16" is none of'),
        (HEADER + "\n" + DECODE.replace("decode", "mixed"), ':2: phase "mixed" is none of'),
        (HEADER + "\n" + DECODE.replace("decode,1,", "decode,2,"), ":2: tokens 2 in decode"),
        (HEADER + "\n" + DECODE.replace(",8,", ",0,"), ':2: batch "0" is no whole number'),
        (HEADER + "\n" + DECODE.replace(",8,", ",1e3,"), ':2: batch "1e3" is no whole number'),
        (HEADER + "\n" + DECODE.replace("512", "-1"), ":2: context -1 is not from 0"),
        (HEADER + "\n" + DECODE.replace("0.05", "nan"), ":2: seconds nan is not finite"),
        (HEADER + "\n" + DECODE.replace("0.05", "0"), ":2: seconds 0 is not above 0"),
        (HEADER + "\n" + DECODE.replace("0.05", "50 ms"), ':2: seconds "50 ms" is no number'),
        (HEADER + "\n" + DECODE.replace("llama", ""), ":2: model is empty"),
        (HEADER + '\n"' + DECODE, ":2: "),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        read_measured_steps([_write(tmp_path / "steps.csv", text)], ())


def test_a_result_of_vllm_bench_serve_is_two_steps(tmp_path: Path) -> None:
    path = _write(tmp_path / "one.json", json.dumps(BENCH))
    decode, prefill = read_measured_steps([path], ())
    assert (decode.batch, decode.context, decode.seconds) == (1, 576.0, 0.0415)
    assert (prefill.tokens, prefill.context, prefill.seconds) == (512, 0.0, 0.3)
    # Where requests wait for each other the first token is no step of its own.
    path = _write(tmp_path / "ten.json", json.dumps({**BENCH, "max_concurrency": 10}))
    (decode,) = read_measured_steps([path], ())
    assert decode.batch == 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"median_itl_ms": None}, ":1: median_itl_ms None is no number"),
        ({"gpu": None}, ':1: there is no "gpu"; run vllm bench serve with --metadata gpu='),
        ({"max_concurrency": None}, ":1: max_concurrency None is no number"),
        ({"max_concurrency": 11}, ":1: completed 20 requests at max_concurrency 11"),
        ({"weights": "int3"}, ':1: weights "int3" is none of'),
    ],
)
def test_a_bad_result_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = _write(tmp_path / "bench.json", json.dumps({**BENCH, **change}))
    with pytest.raises(FileFormatError, match=message):
        read_measured_steps([path], ())


def test_a_result_of_bench_latency_is_told_from_it(tmp_path: Path) -> None:
    path = _write(tmp_path / "latency.json", json.dumps({"avg_latency": 1.0, "latencies": [1.0]}))
    with pytest.raises(FileFormatError, match="bench latency writes neither lengths nor batch"):
        read_measured_steps([path], ())
