"""Turns trained weights in the Hugging Face layout into the demo checkpoint: `mlx_lm.convert` to 4 bits, our files beside it.

    python export.py WEIGHTS_DIR [OUT_DIR]

WEIGHTS_DIR holds `part*.safetensors` as `train.py` writes them. OUT_DIR is `checkpoint/` unless named, and already has the
tokenizer and the template. The unquantized model is left in WEIGHTS_DIR/hf, for comparisons with `transformers`.
"""

import json
import shutil
import sys
from pathlib import Path

from mlx_lm import convert
from safetensors.torch import load_file, save_file

from model import CONFIG

MLX_MODEL_TYPE = "qwen3_5_moe"
GENERATION = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 20}
TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]


def ids(folder):
    """The end-of-sequence and padding ids of the tokenizer in `folder`."""
    added = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    by_text = {v["content"]: int(k) for k, v in added.items()}
    return [by_text["<|im_end|>"], by_text["<|endoftext|>"]], by_text["<|endoftext|>"]


def write_hf(state, folder, tokenizer_from):
    """Writes `state` as a checkpoint that `transformers` loads."""
    folder.mkdir(parents=True, exist_ok=True)
    eos, pad = ids(tokenizer_from)
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    dtype = str(state["model.embed_tokens.weight"].dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "dtype": dtype, "eos_token_id": eos, "pad_token_id": pad}, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "pad_token_id": pad, **GENERATION}, indent=2) + "\n")
    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer_from / name, folder / name)


def quantize(hf, out):
    """4-bit affine, groups of 64; `mlx-lm` itself keeps the router and the shared expert's gate at 8 bits.

    `mlx-lm` knows the architecture as `qwen3_5_moe` only (nested or flat), so it is shown that name during the conversion.
    """
    source, work = out.parent / (out.name + ".source"), out.parent / (out.name + ".converting")
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(hf, source, dirs_exist_ok=True)
    config = json.loads((hf / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": MLX_MODEL_TYPE}))
    convert(str(source), str(work), quantize=True, q_group_size=64, q_bits=4, dtype="bfloat16")
    written = json.loads((work / "config.json").read_text())
    shutil.move(work / "model.safetensors", out / "model.safetensors")
    (out / "config.json").write_text(json.dumps({**written, "model_type": config["model_type"], "dtype": "bfloat16"}, indent=2) + "\n")
    shutil.rmtree(work)
    shutil.rmtree(source)
    for name in ["generation_config.json"] + TOKENIZER_FILES:
        if (hf / name).resolve() != (out / name).resolve():
            shutil.copy(hf / name, out / name)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent / "checkpoint"
    tokenizer = Path(__file__).parent / "checkpoint"
    out.mkdir(parents=True, exist_ok=True)
    state = {}
    for part in sorted(source.glob("part*.safetensors")):
        state.update(load_file(part))
    write_hf(state, source / "hf", tokenizer)
    quantize(source / "hf", out)
