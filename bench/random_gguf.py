"""Writes a GGUF file with the geometry of Qwen3.6-35B-A3B and random weights, for timing llama.cpp.

    python3 bench/random_gguf.py full.gguf               # 40 layers, 19.6 GB
    python3 bench/random_gguf.py small.gguf --layers 4   # to try it

The matrices are Q4_K, 4.5 bits per weight as in MLX's 4-bit format with groups of 64; router and norms are f32
and the two small gate projections of the Gated DeltaNet Q8_0, as in the files that people run. There is no
tokenizer: `llama-bench` feeds token numbers. The sizes are those of `crates/model/src/geometry.rs`.
"""

import argparse
import math
import random
import struct
from pathlib import Path

ARCHITECTURE = "qwen35moe"
HIDDEN, VOCAB, CONTEXT = 2048, 248_320, 262_144
ATTENTION_EVERY = 4
HEADS, KV_HEADS, HEAD_DIM = 16, 2, 256
ROTARY_DIM, ROTARY_SECTIONS, ROPE_BASE = 64, [11, 11, 10, 0], 1e7
KEY_HEADS, VALUE_HEADS, DELTA_DIM, CONV_WIDTH = 16, 32, 128, 4
EXPERTS, TOP_K, EXPERT_WIDTH = 256, 8, 512
RMS_EPS = 1e-6

KEY_WIDTH, VALUE_WIDTH = KEY_HEADS * DELTA_DIM, VALUE_HEADS * DELTA_DIM
CONV_CHANNELS = 2 * KEY_WIDTH + VALUE_WIDTH

# GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
VERSION, ALIGNMENT = 3, 32
U32, I32, F32_VALUE, STRING, ARRAY = 4, 5, 6, 8, 9
QUANTIZATION_VERSION, MOSTLY_Q4_K_S = 2, 14
# Tensor types: (number, weights of a block, bytes of a block).
F32, Q8_0, Q4_K = (0, 1, 4), (8, 32, 34), (12, 256, 144)

# Standard deviation of every weight.
SPREAD = 0.02
# Blocks that are drawn; tensors are stretches of them. Far more than a cache holds.
POOL_BLOCKS = 1 << 18


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def typed(value):
    """A value of the metadata, its type before it."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + text(value)
    if isinstance(value, float):
        return struct.pack("<If", F32_VALUE, value)
    if isinstance(value, list):
        return struct.pack(f"<IIQ{len(value)}i", ARRAY, I32, len(value), *value)
    return struct.pack("<II", U32, value)


def metadata(layers):
    model = {
        "block_count": layers,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "vocab_size": VOCAB,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": RMS_EPS,
        "full_attention_interval": ATTENTION_EVERY,
        "rope.dimension_count": ROTARY_DIM,
        "rope.dimension_sections": ROTARY_SECTIONS,
        "rope.freq_base": ROPE_BASE,
        "ssm.conv_kernel": CONV_WIDTH,
        "ssm.inner_size": VALUE_WIDTH,
        "ssm.state_size": DELTA_DIM,
        "ssm.time_step_rank": VALUE_HEADS,
        "ssm.group_count": KEY_HEADS,
        "expert_count": EXPERTS,
        "expert_used_count": TOP_K,
        "expert_feed_forward_length": EXPERT_WIDTH,
        "expert_shared_feed_forward_length": EXPERT_WIDTH,
    }
    general = {
        "general.architecture": ARCHITECTURE,
        "general.name": "random weights",
        "general.file_type": MOSTLY_Q4_K_S,
        "general.quantization_version": QUANTIZATION_VERSION,
        "tokenizer.ggml.model": "no_vocab",
    }
    return general | {f"{ARCHITECTURE}.{key}": value for key, value in model.items()}


def tensors(layers):
    """Name, shape (the input first, as GGUF has it) and type of every tensor."""
    yield "token_embd.weight", (HIDDEN, VOCAB), Q4_K
    yield "output_norm.weight", (HIDDEN,), F32
    yield "output.weight", (HIDDEN, VOCAB), Q4_K
    delta = [
        ("attn_qkv.weight", (HIDDEN, CONV_CHANNELS), Q4_K),
        ("attn_gate.weight", (HIDDEN, VALUE_WIDTH), Q4_K),
        ("ssm_alpha.weight", (HIDDEN, VALUE_HEADS), Q8_0),
        ("ssm_beta.weight", (HIDDEN, VALUE_HEADS), Q8_0),
        ("ssm_conv1d.weight", (CONV_WIDTH, CONV_CHANNELS), F32),
        ("ssm_dt.bias", (VALUE_HEADS,), F32),
        ("ssm_a", (VALUE_HEADS,), F32),
        ("ssm_norm.weight", (DELTA_DIM,), F32),
        ("ssm_out.weight", (VALUE_WIDTH, HIDDEN), Q4_K),
    ]
    attention = [
        ("attn_q.weight", (HIDDEN, 2 * HEADS * HEAD_DIM), Q4_K),  # queries and gates
        ("attn_k.weight", (HIDDEN, KV_HEADS * HEAD_DIM), Q4_K),
        ("attn_v.weight", (HIDDEN, KV_HEADS * HEAD_DIM), Q4_K),
        ("attn_q_norm.weight", (HEAD_DIM,), F32),
        ("attn_k_norm.weight", (HEAD_DIM,), F32),
        ("attn_output.weight", (HEADS * HEAD_DIM, HIDDEN), Q4_K),
    ]
    experts = [
        ("attn_norm.weight", (HIDDEN,), F32),
        ("post_attention_norm.weight", (HIDDEN,), F32),
        ("ffn_gate_inp.weight", (HIDDEN, EXPERTS), F32),
        ("ffn_gate_exps.weight", (HIDDEN, EXPERT_WIDTH, EXPERTS), Q4_K),
        ("ffn_up_exps.weight", (HIDDEN, EXPERT_WIDTH, EXPERTS), Q4_K),
        ("ffn_down_exps.weight", (EXPERT_WIDTH, HIDDEN, EXPERTS), Q4_K),
        ("ffn_gate_inp_shexp.weight", (HIDDEN,), F32),
        ("ffn_gate_shexp.weight", (HIDDEN, EXPERT_WIDTH), Q4_K),
        ("ffn_up_shexp.weight", (HIDDEN, EXPERT_WIDTH), Q4_K),
        ("ffn_down_shexp.weight", (EXPERT_WIDTH, HIDDEN), Q4_K),
    ]
    for layer in range(layers):
        mixer = attention if (layer + 1) % ATTENTION_EVERY == 0 else delta
        for name, shape, kind in mixer + experts:
            yield f"blk.{layer}.{name}", shape, kind


def size_of(shape, kind):
    _, weights, size = kind
    return math.prod(shape) // weights * size


def padding(size):
    return b"\0" * (-size % ALIGNMENT)


class Weights:
    """Random weights of every type, with mean zero and the deviation SPREAD."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        # w = d * scale * q - m * min with 6-bit scales and mins and 4-bit q, all uniform: the mean is zero at
        # m = 7.5 d, and the deviation is then 257 d.
        d = SPREAD / 257
        head = struct.pack("<ee", d, 7.5 * d)
        # w = d * q with q uniform in a signed byte.
        small_head = struct.pack("<e", SPREAD / 74)
        self.pools = {Q4_K: self.pool(Q4_K, head), Q8_0: self.pool(Q8_0, small_head)}

    def pool(self, kind, head):
        rest = kind[2] - len(head)
        return memoryview(b"".join(head + self.random.randbytes(rest) for _ in range(POOL_BLOCKS)))

    def write(self, file, name, shape, kind):
        left = size_of(shape, kind)
        if kind == F32:
            file.write(self.floats(name, left // 4))
            return
        pool, block = self.pools[kind], kind[2]
        while left:
            start = self.random.randrange(POOL_BLOCKS) * block
            part = pool[start : start + left]
            file.write(part)
            left -= len(part)

    def floats(self, name, count):
        if name.endswith("ssm_a"):  # -exp(A_log)
            values = (-math.exp(self.random.uniform(-3, 2)) for _ in range(count))
        else:
            middle = 1 if "norm" in name else 0
            values = (self.random.gauss(middle, SPREAD) for _ in range(count))
        return struct.pack(f"<{count}f", *values)


def write(path, layers, seed):
    values, entries = metadata(layers), list(tensors(layers))
    with open(path, "wb", buffering=1 << 24) as file:
        file.write(b"GGUF" + struct.pack("<IQQ", VERSION, len(entries), len(values)))
        for key, value in values.items():
            file.write(text(key) + typed(value))
        offset = 0
        for name, shape, kind in entries:
            dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
            file.write(text(name) + dimensions + struct.pack("<IQ", kind[0], offset))
            size = size_of(shape, kind)
            offset += size + len(padding(size))
        file.write(padding(file.tell()))
        weights = Weights(seed)
        for name, shape, kind in entries:
            weights.write(file, name, shape, kind)
            file.write(padding(size_of(shape, kind)))
        return file.tell()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--layers", type=int, default=40, help="a multiple of 4; 40 is the full model")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.layers < ATTENTION_EVERY or args.layers % ATTENTION_EVERY:
        parser.error(f"--layers {args.layers} is not a multiple of {ATTENTION_EVERY}")
    size = write(args.out, args.layers, args.seed)
    print(f"{args.out}: {args.layers} layers, {size} bytes, seed {args.seed}")


if __name__ == "__main__":
    main()
