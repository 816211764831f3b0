"""Hugging Face `config.json` to Megatron flags, read as plain data (no remote code, no library).

Only what the file says of the model is taken: the batch, the sequence length and how to train come
from the user's flags.  No key is passed over: one is read, or known to change nothing, or named as
a difference, or refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo

from megatron_hetero.errors import ModelError, UnsupportedError
from megatron_hetero.files import Document, near_names, validate_document
from megatron_hetero.model.huggingface.config import (
    HARMLESS_KEYS,
    NEUTRAL_VALUES,
    DecoderConfig,
    Gpt2Config,
    HuggingFaceConfig,
    LatentConfig,
    NeoxConfig,
    OptConfig,
)
from megatron_hetero.model.huggingface.decoder import write_decoder
from megatron_hetero.model.huggingface.families import FAMILIES
from megatron_hetero.model.huggingface.latent import LATENT_FAMILIES, write_latent
from megatron_hetero.model.huggingface.older import write_gpt2, write_neox, write_opt
from megatron_hetero.model.huggingface.writer import FlagWriter
from megatron_hetero.model.shell.values import Word

SUPPORTED_MODEL_TYPES = (*FAMILIES, *LATENT_FAMILIES, "gpt_neox", "opt", "gpt2", "gpt_bigcode")

_PRECISION_FLAGS = {"bfloat16": ("--bf16",), "float16": ("--fp16",)}
_SHOWN = 5


def megatron_words_from_huggingface(document: Document) -> tuple[str, tuple[Word, ...]]:
    """Translate a `config.json` to a source (with the differences of Megatron's model) and to
    Megatron flags, each with the line of the key.

    Raises:
        ModelError: keys are missing or malformed, or the model type is not supported.
        UnsupportedError: the model has a part for which Megatron has no flag, or a key that nobody
            here knows.
    """
    model_type = document.data.get("model_type") if isinstance(document.data, dict) else None
    writer = FlagWriter(document)
    config: HuggingFaceConfig
    # Keys of the family's own.
    # Each branch checks keys first, so that no key that changes the model is passed over.
    if isinstance(model_type, str) and model_type in FAMILIES:
        family = FAMILIES[model_type]
        _check_keys(writer, document.data, model_type, family.keys)
        merged = replace(document, data=with_class_defaults(document.data))
        for key, allowed in family.fixed.items():
            if key in merged.data:
                writer.require(key, merged.data[key], *allowed)
        config = decoder = validate_document(merged, DecoderConfig, ModelError)
        write_decoder(writer, decoder, family)
    elif isinstance(model_type, str) and model_type in LATENT_FAMILIES:
        _check_keys(writer, document.data, model_type, _keys_of(LatentConfig))
        merged = replace(document, data=with_class_defaults(document.data))
        config = latent = validate_document(merged, LatentConfig, ModelError)
        write_latent(writer, latent)
    elif model_type == "gpt_neox":
        _check_keys(writer, document.data, model_type, _keys_of(NeoxConfig))
        config = neox = validate_document(document, NeoxConfig, ModelError)
        write_neox(writer, neox)
    elif model_type == "opt":
        _check_keys(writer, document.data, model_type, _keys_of(OptConfig))
        config = opt = validate_document(document, OptConfig, ModelError)
        write_opt(writer, opt)
    elif model_type in ("gpt2", "gpt_bigcode"):
        _check_keys(writer, document.data, model_type, _keys_of(Gpt2Config))
        config = gpt2 = validate_document(document, Gpt2Config, ModelError)
        write_gpt2(writer, gpt2)
    else:
        _refuse_type(document, model_type)
    # Keys of all families.
    writer.add("vocab_size", "--vocab-size", config.vocab_size)
    # Megatron's own default needs no flag.
    if config.initializer_range != 0.02:
        writer.add("initializer_range", "--init-method-std", repr(config.initializer_range))
    # `transformers` 5 writes `dtype`, versions before it `torch_dtype`.
    precision_key = "torch_dtype" if "torch_dtype" in document.data else "dtype"
    writer.add(precision_key, *_PRECISION_FLAGS.get(config.torch_dtype or "", ()))
    # Training starts from full weights, whatever the file's were packed in.
    if config.quantization_config:
        writer.differ("weights are not quantized, as quantization_config has them")
    note = f" (Megatron differs: {'; '.join(writer.differences)})" if writer.differences else ""
    return f"{document.path}{note}", tuple(writer.words)


def with_class_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a `config.json` over those that its family's class takes where the file
    gives them under no name."""
    model_type = str(data.get("model_type"))
    defaults: Mapping[str, Any]
    config_class: type[BaseModel]
    if model_type in FAMILIES:
        family = FAMILIES[model_type]
        defaults, config_class = family.defaults, DecoderConfig
        # What the family's class does not read is no other name of what it reads.
        data = {k: v for k, v in data.items() if k in family.keys or k not in NEUTRAL_VALUES}
    else:
        defaults, config_class = LATENT_FAMILIES.get(model_type, {}), LatentConfig
    other_names = {
        name: names
        for names in map(_names_of, config_class.model_fields.items())
        for name in names
    }
    # The newer form of rotary positions says all of them, their scaling too.
    is_newer = data.get("rope_parameters") is not None
    kept = {
        key: value
        for key, value in defaults.items()
        if not other_names[key] & data.keys() and not (is_newer and key == "rope_scaling")
    }
    return {**kept, **data}


def _refuse_type(document: Document, model_type: object) -> NoReturn:
    """Refuse a family that is not known; of a model of text and images name the part that is."""
    hint = near_names(str(model_type)[:64], SUPPORTED_MODEL_TYPES)
    part = document.data.get("text_config") if isinstance(document.data, dict) else None
    inner = part.get("model_type") if isinstance(part, dict) else None
    if isinstance(inner, str) and inner in SUPPORTED_MODEL_TYPES:
        hint = (
            f'; its text_config is a "{inner}", which is: write that part alone into a file of its '
            "own to plan for it without the others"
        )
    if model_type is None and inner is None:
        raise ModelError(
            f"{document.locate([])}: this JSON names no model_type, so it is no config.json of "
            "Hugging Face; --model takes one, or a bash script, or a file of Megatron flags"
        )
    raise ModelError(
        f'{document.locate(["model_type"])}: model_type "{str(model_type)[:64]}" is not '
        f"supported{hint}; supported are {', '.join(SUPPORTED_MODEL_TYPES)}. Any other GPT can be "
        "given by its Megatron flags"
    )


def _check_keys(
    writer: FlagWriter, data: Mapping[str, Any], model_type: str, known: Collection[str]
) -> None:
    """Refuse keys that may change the model in an unknown way.

    Raises:
        UnsupportedError: there are such keys; the first ones are named, with the line of each.
    """
    # null stands for a key that is not there.
    unknown = [
        key
        for key, value in data.items()
        if value is not None
        and key not in known
        and key not in HARMLESS_KEYS
        and not _is_neutral(key, value, data)
    ]
    if not unknown:
        return
    # A file of a new family may have dozens of such keys; the first few show what they are.
    lines = [
        f"{writer.locate(key)}: {key[:64]} is {repr(data[key])[:40]}" for key in unknown[:_SHOWN]
    ]
    rest = len(unknown) - len(lines)
    keys = "this key" if len(unknown) == 1 else "these keys"
    raise UnsupportedError(
        "\n".join(lines)
        + (f"\nand {rest} more keys" if rest else "")
        + f"\n{keys} of a {model_type} may change the model in a way that is not known here. Leave "
        f"{keys} out of a copy of the file where nothing hangs on it, or describe the model by "
        "Megatron flags"
    )


def _is_neutral(key: str, value: object, data: Mapping[str, Any]) -> bool:
    """Return whether a key unknown to the family changes nothing with the given value."""
    # Windows that are switched off have no size that counts.
    if key in ("sliding_window", "max_window_layers") and data.get("use_sliding_window") is False:
        return True
    return any(value is v or value == v for v in NEUTRAL_VALUES.get(key, ()))


def _keys_of(config_class: type[BaseModel]) -> frozenset[str]:
    """Return all names of the keys that a class reads."""
    return frozenset().union(*map(_names_of, config_class.model_fields.items()))


def _names_of(item: tuple[str, FieldInfo]) -> frozenset[str]:
    """Return the names under which a file may give one field of a class."""
    name, field = item
    alias = field.validation_alias
    # Pydantic keeps other names of a key as an alias, or as choices of several.
    choices = alias.choices if isinstance(alias, AliasChoices) else [alias or name]
    return frozenset(choice for choice in choices if isinstance(choice, str))
