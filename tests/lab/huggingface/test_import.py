"""Hugging Face folders as Megatron checkpoints: the same logits, the same bytes back.

The reference is written here in plain torch, from the papers; `transformers` is not needed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_hetero.lab.huggingface import job
from megatron_hetero.lab.verify.processes.record import read_record
from megatron_hetero.lab.verify.processes.recorder import Recorder
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.state.metadata_reading import read_metadata

VOCAB, LENGTH, HIDDEN, LAYERS, HEADS = 53, 16, 32, 2, 4
Weights = Mapping[str, Tensor]

LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": LENGTH,
    "activation_function": "gelu",
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}


def drawn(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.1)
        + (1.0 if "norm" in name or ".ln_" in name else 0.0) * name.endswith("weight")
        for name, shape in shapes.items()
    }


def llama_weights(num_experts: int = 0) -> dict[str, Tensor]:
    """Return weights of a Llama; with experts, of a Mixtral, under the names of its published
    files."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (HIDDEN,),
            layer + "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            layer + "self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
            layer + "self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
            layer + "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            layer + "post_attention_layernorm.weight": (HIDDEN,),
        }
        mlps = {layer + "mlp.": ("gate_proj", "up_proj", "down_proj")}
        if num_experts:
            shapes[layer + "block_sparse_moe.gate.weight"] = (num_experts, HIDDEN)
            places = (f"{layer}block_sparse_moe.experts.{e}." for e in range(num_experts))
            mlps = dict.fromkeys(places, ("w1", "w3", "w2"))
        for place, (gate, up, down) in mlps.items():
            shapes[f"{place}{gate}.weight"] = shapes[f"{place}{up}.weight"] = (48, HIDDEN)
            shapes[f"{place}{down}.weight"] = (HIDDEN, 48)
    return drawn(shapes)


def llama_logits(w: Weights, tokens: Tensor) -> Tensor:
    channels = HIDDEN // HEADS
    frequencies = 10000.0 ** (-torch.arange(0, channels, 2) / channels)
    angles = torch.outer(torch.arange(LENGTH).float(), frequencies)
    cos, sin = (torch.cat((f(angles), f(angles)), dim=-1) for f in (torch.cos, torch.sin))

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        h = norm(x, w[layer + "input_layernorm.weight"])
        q, k, v = (split_heads(h @ w[f"{layer}self_attn.{n}_proj.weight"].T) for n in "qkv")
        k, v = (t.repeat_interleave(2, dim=1) for t in (rotated(k), v))
        x = x + attended(rotated(q), k, v) @ w[layer + "self_attn.o_proj.weight"].T
        h = norm(x, w[layer + "post_attention_layernorm.weight"])
        if layer + "mlp.gate_proj.weight" in w:
            x = x + gated(h, w, layer + "mlp.", ("gate_proj", "up_proj", "down_proj"))
        else:
            x = x + routed(h, w, layer + "block_sparse_moe.")
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def gated(h: Tensor, w: Weights, place: str, names: tuple[str, str, str]) -> Tensor:
    gate, up, down = (w[f"{place}{name}.weight"].T for name in names)
    return (F.silu(h @ gate) * (h @ up)) @ down


def routed(h: Tensor, w: Weights, place: str) -> Tensor:
    """Jiang et al. 2024 (Mixtral of Experts), section 2.1: a softmax over the chosen two."""
    chosen, experts = (h @ w[place + "gate.weight"].T).topk(2, dim=-1)
    outputs = [
        gated(h, w, f"{place}experts.{e}.", ("w1", "w3", "w2"))
        for e in range(w[place + "gate.weight"].shape[0])
    ]
    picked = torch.stack(outputs, dim=-2).gather(
        -2, experts.unsqueeze(-1).expand(*experts.shape, HIDDEN)
    )
    return (chosen.softmax(-1).unsqueeze(-1) * picked).sum(-2)


def gpt2_weights() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (VOCAB, HIDDEN),
        "transformer.wpe.weight": (LENGTH, HIDDEN),
    }
    sizes = {"attn.c_attn": (HIDDEN, 3 * HIDDEN), "attn.c_proj": (HIDDEN, HIDDEN)}
    sizes |= {"mlp.c_fc": (HIDDEN, 4 * HIDDEN), "mlp.c_proj": (4 * HIDDEN, HIDDEN)}
    for i in range(LAYERS):
        for name, (rows, columns) in sizes.items():
            shapes[f"transformer.h.{i}.{name}.weight"] = (rows, columns)
            shapes[f"transformer.h.{i}.{name}.bias"] = (columns,)
    for name in [f"h.{i}.ln_{j}" for i in range(LAYERS) for j in (1, 2)] + ["ln_f"]:
        shapes |= {f"transformer.{name}.{kind}": (HIDDEN,) for kind in ("weight", "bias")}
    return drawn(shapes)


def gpt2_logits(w: Weights, tokens: Tensor) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (HIDDEN,), w[name + ".weight"], w[name + ".bias"], 1e-5)

    def conv(x: Tensor, name: str) -> Tensor:
        return x @ w[name + ".weight"] + w[name + ".bias"]

    x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][:LENGTH]
    for i in range(LAYERS):
        layer = f"transformer.h.{i}."
        q, k, v = conv(norm(x, layer + "ln_1"), layer + "attn.c_attn").chunk(3, dim=-1)
        x = x + conv(attended(*map(split_heads, (q, k, v))), layer + "attn.c_proj")
        x = x + conv(
            F.gelu(conv(norm(x, layer + "ln_2"), layer + "mlp.c_fc")), layer + "mlp.c_proj"
        )
    return norm(x, "transformer.ln_f") @ w["transformer.wte.weight"].T


def split_heads(x: Tensor) -> Tensor:
    """[b, s, heads * channels] -> [b, heads, s, channels]."""
    return x.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    hidden = torch.ones(LENGTH, LENGTH).triu(1).bool()
    return (scores.masked_fill(hidden, -1e9).softmax(-1) @ v).transpose(1, 2).flatten(2)


CASES = {
    "llama": (LLAMA, llama_weights, llama_logits),
    "mixtral": (MIXTRAL, lambda: llama_weights(4), llama_logits),
    "gpt2": (GPT2, gpt2_weights, gpt2_logits),
}


def folder_of(path: Path, config: Mapping[str, object], weights: Weights) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(dict(weights), path / "model.safetensors")
    return path


def in_a_process(name: str, folder: Path, function: Callable[[], object]) -> None:
    run_jobs([LocalJob(name, 1, lambda rank: function() and None, folder / name)], 120)


@pytest.mark.parametrize("kind", CASES)
def test_the_same_logits_and_the_same_bytes_back(kind: str, tmp_path: Path) -> None:
    config, make_weights, logits_of = CASES[kind]
    weights = make_weights()
    source = folder_of(tmp_path / "hf", config, weights)
    checkpoint, target = tmp_path / "checkpoint", tmp_path / "back"
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(2))

    in_a_process("import", tmp_path, lambda: job.import_weights(source, checkpoint))
    # Before experts the norm has a name of its own in Transformer Engine's layers, the default.
    keys = set(read_metadata(checkpoint / "release" / ".metadata").state_dict_metadata)
    own_name = "decoder.layers.0.pre_mlp_layernorm.weight" in keys
    assert own_name == (kind == "mixtral")

    def forward() -> None:
        def act(model: list[torch.nn.Module]) -> None:
            from megatron.training.checkpointing import load_checkpoint

            load_checkpoint(model, None, None, strict=True)
            positions = torch.arange(LENGTH).expand_as(tokens)
            mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
            with torch.no_grad():
                torch.save(model[0].eval()(tokens, positions, mask), tmp_path / "logits")

        job._with_model(source / "config.json", [f"--load={checkpoint}", "--finetune"], act)

    in_a_process("forward", tmp_path, forward)
    found = torch.load(tmp_path / "logits", weights_only=True)
    wanted = logits_of(weights, tokens)
    assert (found - wanted).abs().max() <= 2e-6 * wanted.abs().max()

    in_a_process(
        "export", tmp_path, lambda: job.export_weights(checkpoint, target, source / "config.json")
    )
    back = load_file(target / "model.safetensors")
    assert set(back) == set(weights)
    assert all(torch.equal(back[name], weights[name]) for name in weights)
    assert (target / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_an_asymmetric_plan_trains_from_it(kind: str, tmp_path: Path) -> None:
    """The first loss under a plan of unlike widths is that of one process."""
    config, make_weights, _ = CASES[kind]
    source = folder_of(tmp_path / "hf", config, make_weights())
    checkpoint = tmp_path / "checkpoint"
    in_a_process("import", tmp_path, lambda: job.import_weights(source, checkpoint))
    from megatron_hetero.model.load import load_workload

    batch = ["--micro-batch-size=1", "--global-batch-size=4", f"--seq-length={LENGTH}"]
    argv = [
        *load_workload(source / "config.json", batch).megatron_args,
        *("--train-iters=1", "--lr=1e-3", "--mock-data", "--tokenizer-type=NullTokenizer"),
        *("--eval-iters=0", "--eval-interval=10", f"--load={checkpoint}", "--finetune"),
        f"--data-cache-path={tmp_path / 'cache'}",
        "--sequence-parallel",
    ]
    found = []
    # The vocabulary is padded to multiples of 4 in both, by 4 alone and by 2 times the width 2.
    for name, layout, ranks, multiple in (
        ("one", "tp1:2 @4", 1, 4),
        ("plan", "tp2:1,tp1:1 @4", 3, 2),
    ):
        flags = [f"--hetero-layout={layout}", f"--make-vocab-size-divisible-by={multiple}"]

        def train(rank: int, flags: list[str] = flags, name: str = name) -> None:
            recorder = Recorder()
            entry.main([*argv, *flags], recorder)
            recorder.save(tmp_path / f"{name}-{rank}")

        run_jobs([LocalJob(name, ranks, train, tmp_path / name)], 120)
        losses = read_record(tmp_path / f"{name}-{ranks - 1}").losses
        found.append(losses[min(losses)])
    assert found[1] == pytest.approx(found[0], rel=1e-6)
