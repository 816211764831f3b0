"""A folder of Hugging Face weights, from `serve --model FOLDER` to text: greedy tokens as
`transformers` generates them from the same folder in one process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

aiohttp = pytest.importorskip("aiohttp")
transformers = pytest.importorskip("transformers")

import torch  # noqa: E402

from tests.lab.serve.services import free_port, started, until_it_serves  # noqa: E402

LAYERS = 4
COMMON = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "max_position_embeddings": 128, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
CONFIGS = {
    "llama": lambda vocabulary: transformers.LlamaConfig(
        **COMMON, num_key_value_heads=4, vocab_size=vocabulary, tie_word_embeddings=False
    ),
    "qwen2": lambda vocabulary: transformers.Qwen2Config(
        **COMMON, num_key_value_heads=2, vocab_size=vocabulary, tie_word_embeddings=True
    ),
    "mixtral": lambda vocabulary: transformers.MixtralConfig(
        **COMMON, num_key_value_heads=4, vocab_size=vocabulary, num_local_experts=4,
        num_experts_per_tok=2, tie_word_embeddings=False, sliding_window=None,
    ),
}  # fmt: skip
PROMPTS = (
    "the quick brown fox",
    "serve",
    "a pipeline of unlike stages answers as one process does, token by token, " * 2,
)
NEW_TOKENS, UNUSED_ROWS = 24, 13


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"),
    [("llama", "tp2:3,tp1:1"), ("qwen2", "tp1:1,tp2:3"), ("mixtral", "tp1:2,tp2:2")],
)
def test_a_folder_of_weights_is_served_as_transformers_generates(
    family: str, layout: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    model = _write_model(family, folder)
    port, log = free_port(), tmp_path / "serve.log"
    words = ["serve", "--model", str(folder), "--layout", layout, "--name", "tiny",
             "--kv-tokens", "1024", "--step-tokens", "16", "--port", str(port)]  # fmt: skip
    with started(words, log) as process:
        found = asyncio.run(_ask_all(f"http://127.0.0.1:{port}", process, log))
    assert found == _generated(model, folder)


def _write_model(family: str, folder: Path) -> Any:
    """Write random weights, a configuration and a tokenizer; return the model."""
    from tokenizers import ByteLevelBPETokenizer
    from tokenizers.processors import TemplateProcessing

    words = ByteLevelBPETokenizer()
    words.train_from_iterator(PROMPTS * 4, vocab_size=300, special_tokens=["<end>", "<start>"])
    # Prompts begin with a token of their own, as Llama's do.
    words._tokenizer.post_processor = TemplateProcessing(
        single="<start> $A", special_tokens=[("<start>", 1)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words._tokenizer, bos_token="<start>", eos_token="<end>"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(5)
    # In fp32: tokens of half precision are decided by near ties.
    # Published models have more rows than tokens; these rows are never drawn.
    config = CONFIGS[family](len(tokenizer) + UNUSED_ROWS)
    config.dtype = torch.float32
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(folder)
    return model


def _generated(model: Any, folder: Path) -> list[str]:
    """Return what one process of `transformers` generates, greedily."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    unused = list(range(len(tokenizer), len(tokenizer) + UNUSED_ROWS))
    texts = []
    for prompt in PROMPTS:
        tokens = torch.tensor([tokenizer(prompt)["input_ids"]])
        out = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
            max_new_tokens=NEW_TOKENS, pad_token_id=0, suppress_tokens=unused,
        )[0, tokens.shape[1] :].tolist()  # fmt: skip
        # An end of text ends the answer, and is no part of it.
        texts.append(tokenizer.decode(out[: out.index(0)] if 0 in out else out))
    return texts


async def _ask_all(url: str, process: Any, log: Path) -> list[str]:
    """Ask all prompts side by side, greedily; return their texts."""
    await until_it_serves(url, process, log)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as client:

        async def ask(prompt: str) -> str:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0}
            async with client.post(f"{url}/v1/completions", json=body) as answer:
                data = await answer.json()
                assert answer.status == 200, data
                return str(data["choices"][0]["text"])

        return list(await asyncio.gather(*map(ask, PROMPTS)))
