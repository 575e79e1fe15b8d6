"""A small unquantized checkpoint, and what `mlx_lm.convert` makes of it: what `lily convert` is held to.

    python convert_golden.py golden --demo ../demo --out golden
    python convert_golden.py source --demo ../demo --out /tmp/bf16 --layers 4
    python convert_golden.py demo --demo ../demo --out /tmp/bf16
    python convert_golden.py compare UNQUANTIZED CONVERTED

`golden` writes convert_source.safetensors, convert_mlx.safetensors and convert_config.json (README.md lists their
contents). `source` writes random weights of the full model's geometry, bf16, to measure a conversion with, `demo` what the
4-bit demo means, in bf16. `compare` runs `mlx_lm.convert` over a checkpoint and compares every tensor with those that `lily convert` wrote.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm import convert

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
# Bytes of a weight file of `source`, near those of the real checkpoint.
SHARD = 4 << 30

TINY = {
    "hidden_size": 64,
    "vocab_size": 256,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}

FULL = {
    "hidden_size": 2048,
    "vocab_size": 248_320,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


def full(layers):
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    return {**FULL, "num_hidden_layers": layers, "layer_types": kinds}


def config(sizes):
    """`config.json` as the multimodal checkpoint has it."""
    common = {
        "model_type": "qwen3_5_moe_text",
        "attention_bias": False,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": False,
    }
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": {**common, **sizes},
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "qwen3_5_moe", "depth": 1},
    }


def tensors(c):
    """Names and shapes in Hugging Face's layout."""
    hidden, experts, width = c["hidden_size"], c["num_experts"], c["moe_intermediate_size"]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    queries, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    shared = c["shared_expert_intermediate_size"]
    yield "model.language_model.embed_tokens.weight", (c["vocab_size"], hidden)
    for i, kind in enumerate(c["layer_types"]):
        layer = f"model.language_model.layers.{i}"
        mixers = {
            "linear_attention": {
                "linear_attn.in_proj_qkv.weight": (2 * keys + values, hidden),
                "linear_attn.in_proj_z.weight": (values, hidden),
                "linear_attn.in_proj_b.weight": (c["linear_num_value_heads"], hidden),
                "linear_attn.in_proj_a.weight": (c["linear_num_value_heads"], hidden),
                "linear_attn.conv1d.weight": (2 * keys + values, 1, 4),
                "linear_attn.A_log": (c["linear_num_value_heads"],),
                "linear_attn.dt_bias": (c["linear_num_value_heads"],),
                "linear_attn.norm.weight": (c["linear_value_head_dim"],),
                "linear_attn.out_proj.weight": (hidden, values),
            },
            "full_attention": {
                "self_attn.q_proj.weight": (2 * queries, hidden),
                "self_attn.k_proj.weight": (kv, hidden),
                "self_attn.v_proj.weight": (kv, hidden),
                "self_attn.o_proj.weight": (hidden, queries),
                "self_attn.q_norm.weight": (c["head_dim"],),
                "self_attn.k_norm.weight": (c["head_dim"],),
            },
        }
        common = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate.weight": (experts, hidden),
            "mlp.experts.gate_up_proj": (experts, 2 * width, hidden),
            "mlp.experts.down_proj": (experts, hidden, width),
            "mlp.shared_expert.gate_proj.weight": (shared, hidden),
            "mlp.shared_expert.up_proj.weight": (shared, hidden),
            "mlp.shared_expert.down_proj.weight": (hidden, shared),
            "mlp.shared_expert_gate.weight": (1, hidden),
        }
        for name, shape in {**mixers[kind], **common}.items():
            yield f"{layer}.{name}", shape
    yield "model.language_model.norm.weight", (hidden,)
    yield "lm_head.weight", (c["vocab_size"], hidden)
    yield "model.visual.patch_embed.proj.weight", (8, 8)
    yield "mtp.fc.weight", (8, 16)


def hard_values(rng, shape):
    """Groups of every kind that the rounding tells apart: ordinary, of one sign, all equal, zero, tiny, huge, halves."""
    count = int(np.prod(shape))
    groups = -(-count // 64)
    ordinary = rng.standard_normal((groups, 64)).astype(np.float32)
    kinds = rng.integers(0, 10, groups)[:, None]
    halves = np.round(ordinary * 4) / 2
    cases = [
        (0, np.abs(ordinary)),
        (1, -np.abs(ordinary)),
        (2, np.broadcast_to(ordinary[:, :1], ordinary.shape)),
        (3, np.zeros_like(ordinary)),
        (4, ordinary * 1e-8),
        (5, ordinary * 1e30),
        (6, halves),
        (7, ordinary + 3),
    ]
    for kind, values in cases:
        ordinary = np.where(kinds == kind, values, ordinary)
    return ordinary.reshape(-1)[:count].reshape(shape)


def write_text_side(demo, out):
    for name in TEXT_FILES:
        shutil.copy(demo / "checkpoint" / name, out / name)


def convert_with_mlx(source, out):
    """`mlx_lm.convert`; it knows the architecture under one name only."""
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        for file in source.iterdir():
            (work / file.name).symlink_to(file.resolve())
        fields = json.loads((source / "config.json").read_text())
        (work / "config.json").unlink()
        (work / "config.json").write_text(json.dumps({**fields, "model_type": "qwen3_5_moe"}))
        convert(str(work), str(out), quantize=True, q_group_size=64, q_bits=4, dtype="bfloat16")


def golden(args):
    rng = np.random.default_rng(10)
    source = {}
    for name, shape in tensors(TINY):
        values = mx.array(hard_values(rng, shape))
        # The types that the real checkpoint mixes, and f16 and f32 besides, which are rounded twice.
        dtype = mx.bfloat16
        if name.endswith(("A_log", "linear_attn.norm.weight", "k_proj.weight", "0.input_layernorm.weight")):
            dtype = mx.float32
        if name.endswith(("v_proj.weight", "1.input_layernorm.weight")):
            values, dtype = mx.clip(values, -60000, 60000), mx.float16
        source[name] = values.astype(dtype)
    with tempfile.TemporaryDirectory() as work:
        unquantized, converted = Path(work) / "hf", Path(work) / "mlx"
        unquantized.mkdir()
        write_text_side(args.demo, unquantized)
        (unquantized / "config.json").write_text(json.dumps(config(TINY)))
        mx.save_safetensors(str(unquantized / "model.safetensors"), source, metadata={"format": "pt"})
        convert_with_mlx(unquantized, converted)
        shutil.copy(unquantized / "model.safetensors", args.out / "convert_source.safetensors")
        shutil.copy(converted / "model.safetensors", args.out / "convert_mlx.safetensors")
        (args.out / "convert_config.json").write_text(json.dumps(config(TINY), indent=1) + "\n")


def source(args):
    args.out.mkdir(parents=True)
    rng = np.random.default_rng(10)
    sizes = full(args.layers)
    write_text_side(args.demo, args.out)
    (args.out / "config.json").write_text(json.dumps(config(sizes), indent=1) + "\n")
    # Random numbers are slow to draw: every tensor is a piece of one supply, begun elsewhere.
    supply = (rng.standard_normal(1 << 22).astype(np.float32) * 0.02).view(np.uint32) >> 16
    supply = supply.astype(np.uint16)
    weight_map, shard, size, number = {}, {}, 0, 1

    def flush():
        name = f"model-{number:05}.safetensors"
        mx.save_safetensors(str(args.out / name), shard, metadata={"format": "pt"})
        weight_map.update({tensor: name for tensor in shard})

    for name, shape in tensors(sizes):
        count = int(np.prod(shape))
        values = np.resize(np.roll(supply, int(rng.integers(1 << 22))), count).reshape(shape)
        if size + 2 * count > SHARD and shard:
            flush()
            shard, size, number = {}, 0, number + 1
        shard[name] = mx.array(values).view(mx.bfloat16)
        size += 2 * count
    flush()
    index = {"metadata": {}, "weight_map": weight_map}
    (args.out / "model.safetensors.index.json").write_text(json.dumps(index))


def demo(args):
    """What `dequantize.py` does, in bf16 and without PyTorch."""
    rng = np.random.default_rng(10)
    args.out.mkdir(parents=True)
    write_text_side(args.demo, args.out)
    fields = json.loads((args.demo / "checkpoint" / "config.json").read_text())
    fields = {name: value for name, value in fields.items() if not name.startswith("quantization")}
    (args.out / "config.json").write_text(json.dumps(fields, indent=1) + "\n")
    raw = {name.removeprefix("language_model."): t for name, t in load_all(args.demo / "checkpoint").items()}
    out = {}
    for name, tensor in raw.items():
        module, _, leaf = name.rpartition(".")
        if leaf in ("scales", "biases"):
            continue
        if f"{module}.scales" in raw:
            scales = raw[f"{module}.scales"]
            bits = tensor.shape[-1] * 32 // (scales.shape[-1] * 64)
            tensor = mx.dequantize(tensor, scales, raw[f"{module}.biases"], group_size=64, bits=bits)
            if args.noise:
                steps = mx.repeat(mx.abs(scales), 64, axis=-1).astype(mx.float32)
                noise = mx.array(rng.uniform(-args.noise, args.noise, tensor.shape).astype(np.float32))
                tensor = (tensor.astype(mx.float32) + noise * steps).astype(mx.bfloat16)
        elif name.endswith("conv1d.weight"):
            tensor = mx.moveaxis(tensor, 1, 2)
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            tensor = tensor - 1.0
        out[name.replace("switch_mlp.down_proj.weight", "experts.down_proj")] = tensor
    for name in [name for name in out if name.endswith("switch_mlp.gate_proj.weight")]:
        gate, up = out.pop(name), out.pop(name.replace("gate_proj", "up_proj"))
        out[name.replace("switch_mlp.gate_proj.weight", "experts.gate_up_proj")] = mx.concatenate([gate, up], axis=1)
    mx.save_safetensors(str(args.out / "model.safetensors"), out, metadata={"format": "pt"})


def load_all(directory):
    stored = {}
    for file in sorted(directory.glob("model*.safetensors")):
        stored.update(mx.load(str(file)))
    return stored


def compare(args):
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        expected_dir = Path(work) / "mlx"
        convert_with_mlx(args.unquantized, expected_dir)
        expected, found = load_all(expected_dir), load_all(args.converted)
        assert expected.keys() == found.keys(), expected.keys() ^ found.keys()
        wrong = [
            name
            for name, tensor in expected.items()
            if tensor.dtype != found[name].dtype
            or tensor.shape != found[name].shape
            or not mx.array_equal(tensor.reshape(-1).view(mx.uint8), found[name].reshape(-1).view(mx.uint8)).item()
        ]
        print(f"{len(expected)} tensors, {sum(t.nbytes for t in expected.values())} bytes, {len(wrong)} differ", *wrong)
        return 1 if wrong else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("golden")
    command.add_argument("--demo", type=Path, required=True)
    command.add_argument("--out", type=Path, required=True)
    command.set_defaults(run=golden)
    command = commands.add_parser("source")
    command.add_argument("--demo", type=Path, required=True)
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--layers", type=int, default=40)
    command.set_defaults(run=source)
    command = commands.add_parser("demo")
    command.add_argument("--demo", type=Path, required=True)
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--noise", type=float, default=0.0, help="move weights by up to this part of their group's step")
    command.set_defaults(run=demo)
    command = commands.add_parser("compare")
    command.add_argument("unquantized", type=Path)
    command.add_argument("converted", type=Path)
    command.add_argument("--work", type=Path)
    command.set_defaults(run=compare)
    args = parser.parse_args()
    raise SystemExit(args.run(args))


if __name__ == "__main__":
    main()
