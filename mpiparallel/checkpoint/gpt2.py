"""Hugging Face's names for GPT-2: one safetensors file and its config.json, in and out.

    token_embedding.weight              transformer.wte.weight
    position_embedding.weight           transformer.wpe.weight
    blocks.3.attention_norm.weight      transformer.h.3.ln_1.weight
    blocks.3.attention.qkv.weight       transformer.h.3.attn.c_attn.weight
    blocks.3.attention.projection.bias  transformer.h.3.attn.c_proj.bias
    blocks.3.mlp_norm.weight            transformer.h.3.ln_2.weight
    blocks.3.mlp.up.weight              transformer.h.3.mlp.c_fc.weight
    blocks.3.mlp.down.weight            transformer.h.3.mlp.c_proj.weight
    final_norm.bias                     transformer.ln_f.bias

Matrices are (in, out) and q|k|v are fused on both sides, so arrays go over as they are. Files
without the prefix, as the published GPT-2's, are read as well; their causal masks are left out.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from mpiparallel.checkpoint.boxes import Box, Piece
from mpiparallel.checkpoint.load import load
from mpiparallel.checkpoint.manifest import Manifest
from mpiparallel.data import IdTokenizer, Tokenizer, tokenizer_from
from mpiparallel.errors import RunError, UserError
from mpiparallel.model_config import ModelConfig

_PARTS = {
    "token_embedding": "wte",
    "position_embedding": "wpe",
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.projection": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
    "final_norm": "ln_f",
}
_LEFT_OUT = re.compile(r"(h\.\d+\.attn\.(bias|masked_bias)|lm_head\.weight)")
_EPSILON = 1e-5
_METADATA = "mpiparallel.tokenizer"  # so that a text model survives the way out and in


def hugging_face_name(name: str) -> str:
    """Our global name of a parameter -> theirs, with the prefix."""
    part, kind = name.rsplit(".", 1)
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", part)
    if match:
        return f"transformer.h.{match[1]}.{_PARTS[match[2]]}.{kind}"
    return f"transformer.{_PARTS[part]}.{kind}"


def export(folder: Path, manifest: Manifest, file: Path) -> None:
    """Write the weights of a checkpoint to `file`, and config.json beside it. One rank calls.

    Raises UserError for a checkpoint that cannot be used, RunError where nothing can be written.
    """
    from safetensors.numpy import save_file

    config = manifest.config
    arrays = {}
    for name, shape in config.shapes().items():
        dtype = manifest.arrays[name].dtype if name in manifest.arrays else "float32"
        whole = np.empty(shape, dtype)
        box = Box((0,) * len(shape), shape)
        load(folder, manifest, [Piece(name, shape, box, whole, owned=False)])
        arrays[hugging_face_name(name)] = whole
    description = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": _EPSILON,
        "vocab_size": config.vocabulary,
        "n_positions": config.sequence,
        "n_embd": config.hidden,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.feed_forward,
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": str(arrays["transformer.wte.weight"].dtype),
    }
    metadata = {"format": "pt", _METADATA: json.dumps(manifest.tokenizer.describe())}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(arrays, file, metadata)
        (file.parent / "config.json").write_text(json.dumps(description, indent=2) + "\n")
    except OSError as error:
        raise RunError(f"{file}: cannot be written ({error.strerror})") from None


def read(file: Path) -> tuple[ModelConfig, Tokenizer, dict[str, np.ndarray]]:
    """Sizes, tokenizer and weights by our names of a GPT-2 in `file`, with config.json beside it.

    Where the file does not carry the tokenizer of one of our own exports, tokens stay numbers.
    Raises UserError for what is missing, misshapen, or not GPT-2's architecture.
    """
    from safetensors import SafetensorError, safe_open

    heads = _read_heads(file.parent / "config.json")
    arrays: dict[str, np.ndarray] = {}
    try:
        with safe_open(file, framework="numpy") as opened:
            metadata = opened.metadata() or {}
            for key in list(opened.keys()):
                name = key.removeprefix("transformer.")
                if not _LEFT_OUT.fullmatch(name):
                    arrays[name] = opened.get_tensor(key)
    except (OSError, SafetensorError, TypeError) as error:
        raise UserError(f"{file}: not a readable safetensors file ({error})") from None
    config = _sizes(file, arrays, heads)
    ours = {}
    for name, shape in config.shapes().items():
        theirs = hugging_face_name(name).removeprefix("transformer.")
        array = arrays.pop(theirs, None)
        if array is None or array.shape != shape:
            found = "missing" if array is None else f"of shape {array.shape}"
            raise UserError(f"{file}: {theirs} is {found}, wanted {shape}")
        if array.dtype.kind != "f" or not np.isfinite(array).all():
            raise UserError(f"{file}: {theirs} has values that are not finite numbers")
        ours[name] = np.ascontiguousarray(array, max(array.dtype, np.dtype("float32")))
    if arrays:
        raise UserError(f"{file}: {sorted(arrays)[0]} is no part of GPT-2")
    return config, _tokenizer(file, metadata, config), ours


def _read_heads(path: Path) -> int:
    """The number of heads, which no shape tells, from a config.json that is GPT-2's."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a readable config.json ({error})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a JSON object")
    wanted: dict[str, tuple[Any, ...]] = {
        "model_type": ("gpt2",),
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (_EPSILON,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "tie_word_embeddings": (True,),
    }
    for name, legal in wanted.items():
        if values.get(name, legal[0]) not in legal:
            raise UserError(f"{path}: {name} is {values[name]!r}; legal: {legal[0]!r}")
    heads = values.get("n_head")
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1:
        raise UserError(f"{path}: n_head is {heads!r}; legal: a whole number from 1")
    return heads


def _sizes(file: Path, arrays: dict[str, np.ndarray], heads: int) -> ModelConfig:
    """The sizes of the model, from the shapes of its arrays."""
    try:
        vocabulary, hidden = arrays["wte.weight"].shape
        sequence, _ = arrays["wpe.weight"].shape
        _, feed_forward = arrays["h.0.mlp.c_fc.weight"].shape
    except (KeyError, ValueError) as error:
        raise UserError(f"{file}: not a GPT-2 (missing or misshapen: {error})") from None
    layers = 0
    while f"h.{layers}.ln_1.weight" in arrays:
        layers += 1
    if hidden % heads:
        raise UserError(f"{file}: n_head {heads} does not divide the width {hidden}")
    return ModelConfig(layers, hidden, heads, feed_forward, vocabulary, sequence)


def _tokenizer(file: Path, metadata: dict[str, str], config: ModelConfig) -> Tokenizer:
    if _METADATA not in metadata:
        return IdTokenizer(config.vocabulary)
    try:
        tokenizer = tokenizer_from(json.loads(metadata[_METADATA]))
        if 1 <= tokenizer.vocabulary <= config.vocabulary:
            return tokenizer
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{file}: the tokenizer in its metadata is damaged")
