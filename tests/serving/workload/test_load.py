"""workload.yaml and traces."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megatron_hetero.errors import FileFormatError
from megatron_hetero.serving.workload.load import WorkloadError, load_request_mix
from megatron_hetero.serving.workload.trace import read_trace

ROOT = Path(__file__).resolve().parents[3]


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_example() -> None:
    mix = load_request_mix(ROOT / "examples/serving/workload.yaml")
    chat, documents = mix.classes
    assert (chat.rate_per_s, chat.input_tokens.mean, chat.first_token_s) == (4, 824, 2)
    assert documents.output_tokens.mean == 250
    assert documents.output_tokens.most == 400
    assert (documents.between_tokens_s, documents.shared_prefix) == (0.15, 0.2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: 1", "write either classes"),
        ("version: 1\nclasses: []\ntrace: {file: a.csv}\nclass: 1", r":4: class: unknown key"),
        ("version: 1\nclasses:\n  - {name: a, rate: 0, input: 1, output: 1}", r":3: .*rate"),
        ("version: 1\nclasses:\n  - {name: a, rate: 1, input: 0, output: 1}", r":3: .*input"),
        # A truth value is no rate of 1, and quoted text no number.
        ("version: 1\nclasses:\n  - {name: a, rate: true, input: 1, output: 1}", "it is true"),
        ('version: 1\nclasses:\n  - {name: a, rate: "2", input: 1, output: 1}', 'it is "2"'),
        (
            "version: 1\nclasses:\n  - {name: a, rate: 1, input: 1, output: 1, first_token: 0 s}",
            "0 s is no deadline",
        ),
        (
            "version: 1\nclasses:\n  - {name: a, rate: 1, input: 1, output: 1}\n"
            "  - {name: a, rate: 1, input: 1, output: 1}",
            "given twice",
        ),
        ("version: 1\ntrace: {file: nothing.csv}", "cannot be read"),
    ],
)
def test_faults_have_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        load_request_mix(_write(tmp_path / "workload.yaml", text))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("-3", "output: input should be greater than or equal to 1; it is -3"),
        ("[{tokens: 1, weight: -1}]", "weight: input should be greater than 0; it is -1"),
    ],
)
def test_a_value_of_either_form_has_one_fault(tmp_path: Path, output: str, message: str) -> None:
    """A number of tokens, or a list: faults of the form that was not written stay unsaid."""
    text = f"version: 1\nclasses:\n  - {{name: a, rate: 1, input: 1, output: {output}}}\n"
    with pytest.raises(FileFormatError, match=message) as raised:
        load_request_mix(_write(tmp_path / "workload.yaml", text))
    assert len(str(raised.value).splitlines()) == 1


TRACES = {
    "csv": "arrival_s,input_tokens,output_tokens\n0,10,5\n1.5,20,7\n",
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,10,5\n2023-11-16 18:15:48.1805900,20,7\n",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,10,5,15,Conversation log\n6,ChatGPT,10,0,10,Conversation log\n"
    "6.5,GPT-4,20,7,27,API log\n",
    "mooncake": '{"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [1]}\n'
    '{"timestamp": 1500, "input_length": 20, "output_length": 7, "hash_ids": []}\n',
}


@pytest.mark.parametrize("kind", TRACES)
def test_published_formats_give_the_same_requests(tmp_path: Path, kind: str) -> None:
    rows = read_trace(_write(tmp_path / "trace", TRACES[kind]), kind)
    first = rows[0][0]
    assert [(round(at - first, 6), i, o) for at, i, o in rows] == [(0, 10, 5), (1.5, 20, 7)]


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("csv", "a,b\n1,2\n", r":1: there is no column \"arrival_s\""),
        ("csv", "arrival_s,input_tokens,output_tokens\n1,x,2\n", r":2: input_tokens is 'x'; it "),
        ("csv", "arrival_s,input_tokens,output_tokens\n1\n", r":2: 1 columns are too few"),
        ("csv", "arrival_s,input_tokens,output_tokens\ninf,1,2\n", r":2: the time inf"),
        ("csv", "arrival_s,input_tokens,output_tokens\n1,-4,2\n", r":2: -4 input"),
        ("csv", "arrival_s,input_tokens,output_tokens\n1,4,2\n", "1 requests"),
        ("mooncake", '{"timestamp": 0}\n', r':1: there is no "input_length"'),
        ("mooncake", '{"timestamp": \n', ":1: "),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\nnever,1,2\n", ":2: TIMESTAMP is 'n"),
    ],
)
def test_a_malformed_trace_is_named(tmp_path: Path, kind: str, text: str, message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        read_trace(_write(tmp_path / "trace", text), kind)


def test_a_trace_becomes_classes_by_length_with_its_rate_and_its_longest(tmp_path: Path) -> None:
    lines = ["arrival_s,input_tokens,output_tokens"]
    for number in range(100):
        lines.append(f"{number / 10},{100 + number},{900 if number % 2 else 30}")
    _write(tmp_path / "t.csv", "\n".join(lines))
    text = "version: 1\ntrace: {file: t.csv, speed: 2, classes: 4, first_token: 1 s}"
    mix = load_request_mix(_write(tmp_path / "workload.yaml", text))
    assert len(mix.trace) == 100
    assert sum(mix.demand) == pytest.approx(20, rel=0.02)
    assert max(c.input_tokens.most for c in mix.classes) == 199
    assert all(c.first_token_s == 1 and math.isinf(c.between_tokens_s) for c in mix.classes)
    assert mix.arrivals(3.0, seed=0)[-1].arrival_s < 3.0
    # Twice the rates for as long as 250 requests take: the trace begins again, half way for good.
    requests = mix.arrivals(6.25, seed=0, scale=2.0)
    assert len(requests) == pytest.approx(250, abs=4)
    assert requests[100].arrival_s == pytest.approx(len(mix.trace) / sum(mix.demand) / 2)
    assert [r.input_tokens for r in requests[100:200]] == [r.input_tokens for r in mix.trace]
    same = "arrival_s,input_tokens,output_tokens\n1,4,2\n1,4,2\n"
    _write(tmp_path / "t.csv", same)
    with pytest.raises(WorkloadError, match="same moment"):
        load_request_mix(tmp_path / "workload.yaml")


def test_poisson_arrivals_have_their_rate_and_their_seed(tmp_path: Path) -> None:
    mix = load_request_mix(ROOT / "examples/serving/workload.yaml")
    requests = mix.arrivals(2000.0, seed=3)
    assert len(requests) == pytest.approx(10_000, rel=0.03)
    assert requests == mix.arrivals(2000.0, seed=3)
    assert requests != mix.arrivals(2000.0, seed=4)
