"""The model as it is served."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from megatron_hetero.cluster.makers import FACTS
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.errors import UnsupportedError, UsageError
from megatron_hetero.files import read_json
from megatron_hetero.model.attention_window import attention_window, windowed_layers
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.model.training import Precision

if TYPE_CHECKING:
    from megatron_hetero.serving.prices.engine import Engine

WeightFormat = Literal["16-bit", "fp8", "int4"]
KvFormat = Literal["16-bit", "fp8"]

_WEIGHT_BYTES: dict[WeightFormat, float] = {"16-bit": 2.0, "fp8": 1.0, "int4": 0.5 + 2 / 128}
"""Bytes of an element; int4 has a 16-bit scale for each 128 (AWQ, GPTQ)."""
ACTIVATION_BYTES = 2.0
LEAST_FP8 = 8.9
"""Least compute capability for fp8 in tensor cores, and for attention kernels that read an fp8 KV
cache."""


@dataclass(frozen=True)
class ServedModel:
    """Model to serve, with the formats of weights, keys and values.

    Attributes:
        source: where the model was read, as engines are to be given it.
        weights: format of the matrices of layers; embedding and head stay in 16 bits.
        keys_values: format of the KV cache.
        most_tokens: tokens of a request that the model has positions for; None where that is open.
        stored: format of the checkpoint's matrices; None: its config names none that is priced.
        is_quantized: whether the checkpoint says by itself how engines are to read it.
        window: most tokens that a token attends to in the layers that have a window.
        windowed: 1 for each layer that has one, 0 for each other; empty if none has.
    """

    model: ModelSpec
    source: str
    weights: WeightFormat = "16-bit"
    keys_values: KvFormat = "16-bit"
    most_tokens: int | None = None
    stored: WeightFormat | None = None
    is_quantized: bool = False
    window: int | None = None
    windowed: tuple[int, ...] = ()

    @property
    def weight_bytes(self) -> float:
        """Return the bytes of an element of a layer's matrices."""
        return _WEIGHT_BYTES[self.weights]

    @property
    def kv_element_bytes(self) -> float:
        """Return the bytes of an element of a key or value."""
        return 1.0 if self.keys_values == "fp8" else 2.0

    def hand_over_bytes(self, tokens: float, block_tokens: int) -> float:
        """Return the bytes of keys and values of a prompt that another replica needs to go on: in
        layers with a window the blocks that fill it, and one more (vLLM's NIXL connector)."""
        num_near = sum(self.windowed)
        near = tokens
        if self.window is not None:
            near = min(tokens, (-(-self.window // block_tokens) + 1) * block_tokens)
        num_full = self.model.num_layers - num_near
        return (num_full * tokens + num_near * near) * self.kv_bytes(width=1)

    def under(self, engine: Engine) -> ServedModel:
        """Return the model as an engine serves it.

        Raises:
            UnsupportedError: the engine has pools for this attention that are not priced.
        """
        if engine.keeps_windows:
            return self
        if self.model.learns_softmax_offset:
            raise UnsupportedError(
                f"{self.source}: attention with learned softmax offsets and windows has two pools "
                f"of keys and values in {engine.name}, which are not priced; take --engine vllm"
            )
        return replace(self, window=None, windowed=())

    def kv_bytes(self, width: int) -> float:
        """Return the bytes of keys and values of a token in a layer on each GPU of a group.

        Grouped queries: a group wider than the key-value heads holds copies of them.  Latent
        attention keeps the latent and the rotated key, whole on every GPU.
        """
        model = self.model
        if model.kv_lora_rank:
            elements = model.kv_lora_rank + model.qk_pos_emb_head_dim
        else:
            elements = 2 * -(-model.num_query_groups // width) * model.kv_channels
        return elements * self.kv_element_bytes

    def allows_width(self, width: int) -> bool:
        """Tell if engines divide the model by a width: heads and columns divide, and key-value
        heads divide or are copied."""
        model = self.model
        # Wider groups copy key-value heads, if the width is a multiple of their number.
        groups = model.num_query_groups
        divides = model.num_attention_heads % width == 0 and all(
            columns % width == 0 for columns in model.column_kinds
        )
        return divides and (groups % width == 0 or width % groups == 0)

    def precision_on(self, gpu: GpuType) -> Precision | None:
        """Return the 16-bit format in which a GPU computes; None where the model cannot run."""
        # Engines' commands are for devices that torch calls "cuda".
        if not FACTS[gpu.library].trains:
            return None
        # Of cards without a compute capability (AMD's) nothing is known.
        if self.keys_values == "fp8" and gpu.capability is not None and gpu.capability < LEAST_FP8:
            return None
        # A card without fp8 runs fp8 weights only where engines have kernels for that.
        if self.weights == "fp8" and gpu.peak_flops.get("fp8") is None and not self._emulates(gpu):
            return None
        formats: tuple[Precision, ...] = ("bf16", "fp16")
        return next((f for f in formats if gpu.peak_flops.get(f) is not None), None)

    @staticmethod
    def _emulates(gpu: GpuType) -> bool:
        """Tell if an engine serves fp8 weights in 16-bit products (Marlin, from Ampere on)."""
        return gpu.capability is not None and gpu.capability >= 8.0


def load_served(path: Path | str, weights: str | None, keys_values: str) -> ServedModel:
    """Read a model: a folder with a `config.json`, that file, or a file of Megatron flags.

    Args:
        path: the model.
        weights: format of the layers' matrices; None: the checkpoint's own, 16 bits where its
            config names none.
        keys_values: format of the KV cache.
    Raises:
        FileFormatError, ModelError, UnsupportedError: as `load_workload`.
        UsageError: a format that is not known, or not the checkpoint's.
    """
    if weights not in (None, *_WEIGHT_BYTES) or keys_values not in get_args(KvFormat):
        raise UsageError(
            f"weights {weights} and KV {keys_values}: weights are {', '.join(_WEIGHT_BYTES)}, KV "
            f"is {', '.join(get_args(KvFormat))}"
        )
    folder = Path(path)
    file = folder / "config.json" if folder.is_dir() else folder
    # A batch belongs to training; the loader asks for one, and nothing here reads it.
    job = ["--micro-batch-size", "1", "--global-batch-size", "1"]
    is_config = file.suffix == ".json"
    if is_config:
        # Some models have positions for few tokens.
        job += ["--seq-length", "1"]
    workload = load_workload(file, job)
    model = workload.model
    quantization = _quantization(file) if is_config else None
    own = _own_format(file, quantization, weights) if quantization is not None else None
    # Engines are given the folder.
    source = str(file.parent if file.name == "config.json" else folder)
    # Positions that are stretched by a factor reach further than the config's number.
    is_plain = model.position_embedding in ("learned_absolute", "rope")
    is_plain &= "--rotary-seq-len-interpolation-factor" not in workload.megatron_args
    most = model.max_position_embeddings if is_plain else None
    chosen = weights or own or "16-bit"
    is_quantized = quantization is not None
    return ServedModel(
        model, source, chosen, keys_values, most, own, is_quantized,  # type: ignore[arg-type]
        attention_window(workload.megatron_args),
        windowed_layers(workload.megatron_args, model.num_layers),
    )  # fmt: skip


def _quantization(file: Path) -> dict[str, Any] | None:
    """Return what a checkpoint says of its format: in its config, or in ModelOpt's file beside it,
    where engines look for it too."""
    data = read_json(file).data
    found = data.get("quantization_config") if isinstance(data, dict) else None
    if isinstance(found, dict):
        return found
    beside = file.parent / "hf_quant_config.json"
    return {"quant_method": "modelopt"} if beside.is_file() else None


def _own_format(file: Path, found: dict[str, Any], wanted: str | None) -> WeightFormat | None:
    """Return the format that a checkpoint names; None where it is not priced, and one is wanted.

    Raises:
        UnsupportedError: its format is not priced, and none is wanted.
        UsageError: another format is wanted.
    """
    method, bits = found.get("quant_method"), found.get("bits")
    own: WeightFormat | None = "fp8" if method == "fp8" else None
    if method in ("awq", "gptq") and bits == 4:
        own = "int4"
    if own is None and wanted is None:
        raise UnsupportedError(
            f"{file}: quantization_config has {str(method)[:40]!r}, whose weights are not priced; "
            f"say by --weights ({', '.join(_WEIGHT_BYTES)}) which format is nearest"
        )
    if own is not None and wanted not in (None, own):
        raise UsageError(
            f"--weights {wanted}: the weights of {file} are {own} (quantization_config), and "
            "engines serve them so; leave --weights out, or name another checkpoint"
        )
    return own
