"""Reads a 4-bit checkpoint in the MLX layout and hands it to `transformers` with the weights that it means.

The affine format says `w = scale * q + bias` per group of input elements, with q packed lowest bits first
into u32 words. Scale has 8 significant bits and q at most 8, so the product is exact in f32 and the sum is
rounded once: every correct implementation gets the same bits.

Two conventions differ between the layouts (see `sanitize` in mlx-lm's `models/qwen3_5.py`):
  * MLX stores RMS norm weights as they are multiplied, Hugging Face stores them minus one
    (`linear_attn.norm` is the exception: both store it as it is multiplied);
  * conv1d is `[channels, taps, 1]` in MLX and `[channels, 1, taps]` in Hugging Face.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

ZERO_CENTRED = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
    "model.norm.weight",
)


def read_config(directory):
    return json.loads((Path(directory) / "config.json").read_text())


def text_config(config):
    """The decoder's fields, whether the file nests them or not."""
    return config.get("text_config", config)


def dequantize(packed, scales, biases):
    """f32 weights of an affine tensor; bits and group size follow from the shapes."""
    columns_per_scale = packed.shape[-1] / scales.shape[-1]
    # 64 elements of 4 bits fill 8 words, of 8 bits 16 words.
    bits = {8: 4, 16: 8}[columns_per_scale]
    per_word = 32 // bits
    words = packed.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    shifts = torch.arange(per_word, dtype=torch.int64) * bits
    q = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    q = q.reshape(*scales.shape, -1).float()
    weights = q * scales.float().unsqueeze(-1) + biases.float().unsqueeze(-1)
    return weights.reshape(*packed.shape[:-1], -1)


def load_mlx(directory):
    """All tensors of an MLX-layout checkpoint in f32, by module path without prefix, affine ones dequantized."""
    raw = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        raw.update(load_file(file))
    raw = {name.removeprefix("language_model."): tensor for name, tensor in raw.items()}
    tensors = {}
    for name, tensor in raw.items():
        base, _, leaf = name.rpartition(".")
        if leaf in ("scales", "biases"):
            continue
        if f"{base}.scales" in raw:
            tensors[name] = dequantize(tensor, raw[f"{base}.scales"], raw[f"{base}.biases"])
        else:
            tensors[name] = tensor.float()
    return tensors


def to_hugging_face(tensors):
    """Renames and reshapes what `load_mlx` returns into the state dict of `Qwen3_5MoeForCausalLM`."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith("conv1d.weight"):
            tensor = tensor.transpose(1, 2)
        elif name.endswith(ZERO_CENTRED):
            tensor = tensor - 1.0
        if ".switch_mlp." in name:
            experts, _, projection = name.removesuffix(".weight").partition(".switch_mlp.")
            if projection == "gate_proj":
                up = tensors[f"{experts}.switch_mlp.up_proj.weight"]
                out[f"{experts}.experts.gate_up_proj"] = torch.cat([tensor, up], dim=1).contiguous()
            elif projection == "down_proj":
                out[f"{experts}.experts.down_proj"] = tensor.contiguous()
        else:
            out[name] = tensor.contiguous()
    return out


def load_transformers_model(directory):
    """`Qwen3_5MoeForCausalLM` in f32 on the CPU, with plain PyTorch attention, convolution and recurrence."""
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    fields = dict(text_config(read_config(directory)))
    # Neither belongs to the decoder's own configuration.
    for field in ("quantization", "quantization_config"):
        fields.pop(field, None)
    fields["dtype"] = "float32"
    config = Qwen3_5MoeTextConfig(**fields)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    with torch.device("meta"):
        model = Qwen3_5MoeForCausalLM(config)
    model.to_empty(device="cpu")
    state = to_hugging_face(load_mlx(directory))
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    # Rotary frequencies are buffers outside the state dict: `to_empty` left them undefined.
    rotary = model.model.rotary_emb
    rotary.__init__(config)
    return model.float().eval()
