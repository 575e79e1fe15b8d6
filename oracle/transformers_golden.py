"""Golden numbers from `transformers`, f32, CPU, on the weights that the 4-bit demo checkpoint means.

    python transformers_golden.py --demo ../demo --out golden

Writes three files (README.md lists their contents):
  transformers_logits.safetensors  logits at chosen positions of prompts of 1 to 2,000 tokens
  transformers_stages.safetensors  every stage of one DeltaNet and one attention layer, and embed and head
  transformers_greedy.json         greedy continuations and the margin of every token
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import DynamicCache
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

import prompts
from checkpoint import load_transformers_model

# Around the chunk lengths that implementations choose, and long enough for positions to matter.
LENGTHS = (1, 2, 3, 63, 64, 65, 128, 257, 600, 2000)
STREAM_TOKENS = 12_000
STAGE_TOKENS = 12
CONTINUATIONS = 12
CONTINUATION_TOKENS = 48
LONGEST_QUESTION = 600
# Where the last expert chosen and the first one passed over are closer than this, rounding decides between two
# experts, and two correct f32 implementations write visibly different logits.
LEAST_ROUTER_GAP = 5e-6
# How far a prompt moves on in the text, from the one before it or from a choice of experts that is too close.
STRIDE = 97
# A continuation with a smaller gap between its two best logits would test rounding, not the model.
LEAST_MARGIN = 1e-2


def chosen_positions(length):
    return sorted({0, length // 4, length // 2, max(length - 2, 0), length - 1})


def logits_and_router_gap(model, tokens):
    """Logits of every position, and the smallest gap between router logits that decides on an expert."""
    gaps = []

    def record(_module, _args, out):
        best = out[0].double().topk(model.config.num_experts_per_tok + 1).values
        gaps.append((best[:, -2] - best[:, -1]).min().item())

    hooks = [layer.mlp.gate.register_forward_hook(record) for layer in model.model.layers]
    logits = model(torch.tensor([tokens])).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, min(gaps)


def golden_logits(model, stream):
    """Every prompt begins elsewhere in the text, so that none is the beginning of another."""
    tensors = {}
    start = 0
    for length in LENGTHS:
        gap = 0.0
        while gap < LEAST_ROUTER_GAP:
            tokens = stream[start : start + length]
            if len(tokens) < length:
                raise SystemExit(f"no prompt of {length} tokens chooses its experts clearly")
            start += STRIDE
            logits, gap = logits_and_router_gap(model, tokens)
        positions = chosen_positions(length)
        tensors[f"{length}.tokens"] = torch.tensor(tokens, dtype=torch.int32)
        tensors[f"{length}.positions"] = torch.tensor(positions, dtype=torch.int32)
        tensors[f"{length}.logits"] = logits[positions].contiguous()
        print(f"logits: {length} tokens, {len(positions)} positions, least router gap {gap:.1e}", flush=True)
    return tensors


class Recorder:
    """Collects named tensors from module hooks and wrapped functions during one forward pass."""

    def __init__(self):
        self.tensors = {}
        self.undo = []

    def put(self, name, tensor):
        self.tensors[name] = tensor.detach().clone().contiguous()

    def output(self, module, name, pick=lambda out: out[0]):
        hook = module.register_forward_hook(lambda _m, _i, out: self.put(name, pick(out)))
        self.undo.append(hook.remove)

    def input(self, module, name, pick=lambda x: x[0]):
        hook = module.register_forward_pre_hook(
            lambda _m, args, kwargs: self.put(name, pick(args[0] if args else kwargs["hidden_states"])),
            with_kwargs=True,
        )
        self.undo.append(hook.remove)

    def function(self, owner, name, record, active):
        original = getattr(owner, name)

        def wrapped(*args, **kwargs):
            result = original(*args, **kwargs)
            if active["on"]:
                record(args, kwargs, result)
            return result

        setattr(owner, name, wrapped)
        self.undo.append(lambda: setattr(owner, name, original))

    def close(self):
        for undo in self.undo:
            undo()


def while_running(recorder, module):
    """A flag that is set only while `module` runs, so that shared functions are recorded for it alone."""
    active = {"on": False}
    before = module.register_forward_pre_hook(lambda *_: active.update(on=True))
    after = module.register_forward_hook(lambda *_: active.update(on=False))
    recorder.undo += [before.remove, after.remove]
    return active


def routed_inner(experts, hidden, index):
    gate_up = torch.einsum("th,tkwh->tkw", hidden, experts.gate_up_proj[index])
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def record_moe(recorder, layer, prefix):
    recorder.output(layer.post_attention_layernorm, f"{prefix}.post_norm")
    recorder.input(layer.post_attention_layernorm, f"{prefix}.after_mixer")
    mlp = layer.mlp
    recorder.output(mlp.gate, f"{prefix}.router_logits", lambda out: out[0])
    recorder.output(mlp.gate, f"{prefix}.top_weights", lambda out: out[1])
    recorder.output(mlp.gate, f"{prefix}.top_experts", lambda out: out[2].to(torch.int32))
    recorder.output(mlp.experts, f"{prefix}.routed", lambda out: out)
    # What each token's experts hold between their projections, `[tokens, top_k, width]`.
    inner = mlp.experts.register_forward_pre_hook(
        lambda experts, args: recorder.put(f"{prefix}.routed_inner", routed_inner(experts, args[0], args[1]))
    )
    recorder.undo.append(inner.remove)
    recorder.output(mlp.shared_expert, f"{prefix}.shared", lambda out: out)
    recorder.input(mlp.shared_expert.down_proj, f"{prefix}.shared_inner", lambda x: x)
    recorder.output(mlp.shared_expert_gate, f"{prefix}.shared_gate", lambda out: out)
    recorder.output(mlp, f"{prefix}.moe")


def record_delta(recorder, layer, prefix):
    mixer = layer.linear_attn
    active = while_running(recorder, layer)
    recorder.output(layer.input_layernorm, f"{prefix}.input_norm")
    for name in ("qkv", "z", "b", "a"):
        recorder.output(getattr(mixer, f"in_proj_{name}"), f"{prefix}.{name}")

    def conv(_args, _kwargs, result):
        recorder.put(f"{prefix}.conv", result[0].transpose(0, 1))

    def recurrence(_args, kwargs, result):
        recorder.put(f"{prefix}.beta", kwargs["beta"][0])
        recorder.put(f"{prefix}.log_decay", kwargs["g"][0])
        core, state = result
        recorder.put(f"{prefix}.core", core[0].flatten(1))
        # [heads, key, value] in transformers; Lily keeps [heads, value, key].
        recorder.put(f"{prefix}.state", state[0].transpose(1, 2))

    recorder.function(modeling, "causal_conv1d_fn", conv, active)
    recorder.function(modeling, "torch_chunk_gated_delta_rule", recurrence, active)
    recorder.input(mixer.out_proj, f"{prefix}.gated_norm")
    recorder.output(mixer.out_proj, f"{prefix}.out_proj")


def record_attention(recorder, layer, prefix):
    mixer = layer.self_attn
    active = while_running(recorder, layer)
    recorder.output(layer.input_layernorm, f"{prefix}.input_norm")
    for name in ("q", "k", "v"):
        recorder.output(getattr(mixer, f"{name}_proj"), f"{prefix}.{name}_proj")

    def rotary(_args, _kwargs, result):
        for name, heads in zip(("query", "key"), result):
            recorder.put(f"{prefix}.{name}", heads[0].transpose(0, 1).flatten(1))

    def attention(_args, _kwargs, result):
        recorder.put(f"{prefix}.core", result[0][0].flatten(1))

    recorder.function(modeling, "apply_rotary_pos_emb", rotary, active)
    recorder.function(modeling, "eager_attention_forward", attention, active)
    recorder.input(mixer.o_proj, f"{prefix}.gated")
    recorder.output(mixer.o_proj, f"{prefix}.o_proj")


def golden_stages(model, stream):
    tokens = stream[:STAGE_TOKENS]
    kinds = model.config.layer_types
    attention = kinds.index("full_attention")
    # The DeltaNet layer just before: its output is the attention layer's input.
    delta = attention - 1
    assert kinds[delta] == "linear_attention"
    recorder = Recorder()
    layers = model.model.layers
    recorder.output(model.model.embed_tokens, "embed")
    for index, prefix, record in ((delta, "delta", record_delta), (attention, "attn", record_attention)):
        recorder.input(layers[index], f"{prefix}.input")
        record(recorder, layers[index], prefix)
        record_moe(recorder, layers[index], prefix)
        recorder.output(layers[index], f"{prefix}.output", lambda out: (out[0] if isinstance(out, tuple) else out)[0])
    recorder.input(model.model.norm, "head.input")
    recorder.output(model.model.norm, "head.norm")
    recorder.output(model.lm_head, "head.logits")
    model(torch.tensor([tokens]), use_cache=True)
    recorder.close()
    tensors = recorder.tensors
    # One row of logits is enough for the head, and 4 bytes a token for each of the others add up.
    tensors["head.logits"] = tensors["head.logits"][-1:].contiguous()
    tensors["tokens"] = torch.tensor(tokens, dtype=torch.int32)
    tensors["layers"] = torch.tensor([delta, attention], dtype=torch.int32)
    print(f"stages: {len(tensors)} tensors of layers {delta} and {attention}", flush=True)
    return tensors


def continue_greedily(model, prompt, count):
    cache = DynamicCache(config=model.config)
    step = torch.tensor([prompt])
    tokens, margins = [], []
    for _ in range(count):
        logits = model(step, past_key_values=cache, use_cache=True).logits[0, -1]
        best = logits.topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(round(float(best.values[0] - best.values[1]), 4))
        step = best.indices[:1].view(1, 1)
    return tokens, margins


def golden_greedy(model, candidates):
    """The end-of-sequence token does not end a continuation: what follows it is as good a test."""
    kept = []
    for family, prompt in candidates:
        tokens, margins = continue_greedily(model, prompt, CONTINUATION_TOKENS)
        if min(margins) < LEAST_MARGIN:
            print(f"greedy: {family} left out, margin {min(margins)}", flush=True)
            continue
        kept.append({"family": family, "prompt": prompt, "tokens": tokens, "margins": margins})
        print(f"greedy: {family}, {len(prompt)} prompt tokens, least margin {min(margins)}", flush=True)
        if len(kept) == CONTINUATIONS:
            return kept
    raise SystemExit(f"only {len(kept)} of {CONTINUATIONS} continuations have wide enough margins")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = load_transformers_model(args.demo / "checkpoint")
    text = prompts.HeldOut(args.demo)
    args.out.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        stream = text.stream(STREAM_TOKENS)
        save_file(golden_logits(model, stream), args.out / "transformers_logits.safetensors")
        save_file(golden_stages(model, stream), args.out / "transformers_stages.safetensors")
        greedy = golden_greedy(model, text.questions(LONGEST_QUESTION))
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in greedy)
    (args.out / "transformers_greedy.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
