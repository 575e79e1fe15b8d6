"""What rounding activations to int8 costs: perplexity and top-1 agreement against f32, by scheme.

    python activation_precision.py --demo ../demo

Lily multiplies 4-bit weights by int8 activations: each group of inputs gets the scale max|x| / 127. This
program simulates that in f32 PyTorch (the products themselves are exact in integers, so rounding the inputs
is all there is to simulate) and reports each scheme over held-out text. The figures in
`docs/lab/activations.md` come from it.
"""

import argparse
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import prompts
from checkpoint import load_transformers_model

ANSWER_POSITIONS = 2400
LONGEST = 600

# Which inputs of the forward pass a name stands for.
SITES = ("qkv", "z", "ba", "delta_out", "q", "kv", "o", "up", "down", "router", "shared_gate", "head")


def round_groups(x, group, levels=127):
    """x rounded to `levels` steps per side in groups of `group` along the last axis."""
    width = x.shape[-1]
    group = min(group, width)
    grouped = x.reshape(*x.shape[:-1], width // group, group)
    scale = grouped.abs().amax(-1, keepdim=True) / levels
    rounded = torch.where(scale > 0, torch.round(grouped / scale.clamp_min(1e-30)) * scale, grouped)
    return rounded.reshape(x.shape)


def site_of(name):
    leaf = name.rsplit(".", 1)[-1]
    return {
        "in_proj_qkv": "qkv",
        "in_proj_z": "z",
        "in_proj_b": "ba",
        "in_proj_a": "ba",
        "out_proj": "delta_out",
        "q_proj": "q",
        "k_proj": "kv",
        "v_proj": "kv",
        "o_proj": "o",
        "gate_proj": "up",
        "up_proj": "up",
        "down_proj": "down",
        "gate": "router",
        "shared_expert_gate": "shared_gate",
        "lm_head": "head",
    }.get(leaf)


@contextmanager
def rounded_inputs(model, scheme):
    """`scheme` maps a site to the function that its input goes through."""
    undo = []
    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            original = module.forward

            def forward(hidden, index, weights, module=module):
                out = torch.zeros_like(hidden)
                seen = scheme.get("up", lambda x: x)(hidden)
                for expert in index.unique().tolist():
                    rows, slots = torch.where(index == expert)
                    gate, up = F.linear(seen[rows], module.gate_up_proj[expert]).chunk(2, dim=-1)
                    inner = scheme.get("down", lambda x: x)(F.silu(gate) * up)
                    out.index_add_(0, rows, F.linear(inner, module.down_proj[expert]) * weights[rows, slots, None])
                return out

            module.forward = forward
            undo.append(lambda module=module, original=original: setattr(module, "forward", original))
        elif site_of(name) in scheme:
            rounding = scheme[site_of(name)]
            hook = module.register_forward_pre_hook(lambda _m, args, rounding=rounding: (rounding(args[0]),))
            undo.append(hook.remove)
    try:
        yield
    finally:
        for step in undo:
            step()


def score(model, documents):
    logprobs, best = [], []
    with torch.no_grad():
        for document in documents:
            logits = model(torch.tensor([document.tokens[:-1]])).logits[0]
            table = F.log_softmax(logits.double(), dim=-1)
            targets = torch.tensor(document.tokens[1:])
            logprobs.append(table.gather(1, targets[:, None])[:, 0].numpy())
            best.append(table.argmax(-1).numpy())
    return np.concatenate(logprobs), np.concatenate(best)


def schemes():
    int8 = {group: (lambda x, group=group: round_groups(x, group)) for group in (16, 32, 64, 1 << 30)}
    int16 = lambda x: round_groups(x, 64, 32767)
    weights_4bit = [site for site in SITES if site not in ("router", "shared_gate")]
    yield "bf16 inputs", {site: (lambda x: x.bfloat16().float()) for site in SITES}
    yield "int8 per row", dict.fromkeys(weights_4bit, int8[1 << 30])
    yield "int8 per 64, all sites", dict.fromkeys(SITES, int8[64])
    yield "int8 per 64, router and shared gate f32", dict.fromkeys(weights_4bit, int8[64])
    yield "int8 per 32, router and shared gate f32", dict.fromkeys(weights_4bit, int8[32])
    yield "int8 per 16, router and shared gate f32", dict.fromkeys(weights_4bit, int8[16])
    yield "int16 per 64", dict.fromkeys(weights_4bit, int16)
    for site in SITES:
        yield f"int8 per 64, only {site}", {site: int8[64]}
    for kept in (("head",), ("ba",), ("head", "ba"), ("head", "ba", "down"), ("head", "ba", "delta_out", "o")):
        yield (
            f"int8 per 64 but {'+'.join(kept)} f32",
            {site: int8[64] for site in weights_4bit if site not in kept},
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, required=True)
    parser.add_argument("--answers", type=int, default=ANSWER_POSITIONS)
    args = parser.parse_args()

    model = load_transformers_model(args.demo / "checkpoint")
    documents = prompts.HeldOut(args.demo).documents(args.answers, LONGEST)
    answer = np.concatenate([document.answer_mask[1:] for document in documents]).astype(bool)
    compare(model, documents, answer)


def compare(model, documents, answer):
    exact, exact_best = score(model, documents)
    print(f"{len(exact)} positions ({answer.sum()} of answers), perplexity {np.exp(-exact.mean()):.4f}")
    print("| scheme | perplexity, all | answers | top-1, all | answers | mean abs change of log-probability |")
    print("|---|---|---|---|---|---|")
    for name, scheme in schemes():
        with rounded_inputs(model, scheme):
            logprobs, best = score(model, documents)
        change = logprobs - exact
        cells = [f"{np.expm1(-change.mean()):+.4%}"]
        cells.append(f"{np.expm1(-change[answer].mean()):+.4%}" if answer.any() else "-")
        cells.append(f"{(best == exact_best).mean():.3%}")
        cells.append(f"{(best == exact_best)[answer].mean():.3%}" if answer.any() else "-")
        cells.append(f"{np.abs(change).mean():.4f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
