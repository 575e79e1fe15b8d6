"""Writes the unquantized checkpoint that a 4-bit one means, f32, in Hugging Face's layout and names.

    python dequantize.py ../demo/checkpoint /tmp/demo-unquantized
"""

import argparse
import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from checkpoint import load_mlx, read_config, to_hugging_face

COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()

    args.target.mkdir(parents=True, exist_ok=True)
    state = to_hugging_face(load_mlx(args.source))
    config = read_config(args.source)
    if "text_config" in config:
        # The multimodal checkpoint keeps its decoder one level down.
        state = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in state.items()}
    save_file(state, args.target / "model.safetensors", metadata={"format": "pt"})
    for field in ("quantization", "quantization_config"):
        config.pop(field, None)
    (args.target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in COPIED:
        if (args.source / name).exists():
            shutil.copy(args.source / name, args.target / name)


if __name__ == "__main__":
    main()
