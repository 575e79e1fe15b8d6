"""Golden numbers from `mlx-lm` on the 4-bit demo checkpoint, CPU, teacher-forced over held-out curriculum text.

    python mlx_golden.py --demo ../demo --out golden

Activations are f32: the file's 4-bit weights, scales and biases are used as they are, and what is left is
the model's meaning without bf16 rounding of every intermediate. `--report-bf16` also runs the bf16 that
`mlx_lm.generate` would use and prints how far it is from f32: the yardstick for Lily's int8 activations.

Writes mlx_teacher_forced.safetensors (README.md lists its contents).
"""

import argparse
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model
from safetensors.numpy import save_file

import prompts

# Tokens of answers, where the model was trained to predict; the prompts before them come on top.
ANSWER_POSITIONS = 2400
LONGEST = 600
# bf16 is slow on a CPU; these hold a few thousand positions.
BF16_DOCUMENTS = 28


def score(model, tokens):
    """Log-probability of every next token, best next token, and the gap between the two best logits."""
    logits = model(mx.array([tokens[:-1]]))[0].astype(mx.float32)
    logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    targets = np.array(tokens[1:])
    best_two = np.sort(np.partition(logprobs, -2, axis=-1)[:, -2:], axis=-1)
    return (
        logprobs[np.arange(len(targets)), targets],
        logprobs.argmax(-1).astype(np.int32),
        best_two[:, 1] - best_two[:, 0],
    )


def load(checkpoint):
    """The model with the element types of the file."""
    # mlx-lm has the decoder under this name only; for a text-only checkpoint it takes the flat config as it is.
    model, _ = load_model(checkpoint, model_config={"model_type": "qwen3_5_moe"})
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--report-bf16", action="store_true")
    args = parser.parse_args()

    mx.set_default_device(mx.cpu)
    checkpoint = args.demo / "checkpoint"
    documents = prompts.HeldOut(args.demo).documents(ANSWER_POSITIONS, LONGEST)
    model = load(checkpoint)
    model.set_dtype(mx.float32)
    scored = []
    for number, document in enumerate(documents):
        scored.append(score(model, document.tokens))
        print(f"mlx: {number + 1} of {len(documents)}, {document.family}", flush=True)
    logprobs, best, margins = (np.concatenate(part) for part in zip(*scored))
    answers = np.concatenate([document.answer_mask[1:] for document in documents]).astype(bool)
    lengths = np.array([len(document.tokens) for document in documents], dtype=np.int32)

    args.out.mkdir(parents=True, exist_ok=True)
    save_file(
        {
            "lengths": lengths,
            "tokens": np.concatenate([np.array(document.tokens, dtype=np.int32) for document in documents]),
            "target_logprobs": logprobs.astype(np.float32),
            "best": best,
            "margins": margins.astype(np.float32),
            "answer": answers.astype(np.uint8),
        },
        args.out / "mlx_teacher_forced.safetensors",
    )
    report("all positions", logprobs, np.ones_like(answers, dtype=bool))
    report("answers only", logprobs, answers)

    if args.report_bf16:
        model = load(checkpoint)
        low = [score(model, document.tokens) for document in documents[:BF16_DOCUMENTS]]
        low_logprobs, low_best = (np.concatenate([part[i] for part in low]) for i in (0, 1))
        count = len(low_best)
        logprobs, best, answers = logprobs[:count], best[:count], answers[:count]
        for name, mask in (("all positions", np.ones_like(answers, dtype=bool)), ("answers only", answers)):
            change = np.expm1(logprobs[mask].mean() - low_logprobs[mask].mean())
            agreement = (low_best[mask] == best[mask]).mean()
            print(f"bf16 against f32, {name}: {mask.sum()} positions, perplexity {change:+.4%}, top-1 agreement {agreement:.3%}")


def report(name, logprobs, mask):
    print(f"{name}: {mask.sum()} positions, perplexity {np.exp(-logprobs[mask].mean()):.5f}")


if __name__ == "__main__":
    main()
