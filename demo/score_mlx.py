"""Greedy accuracy of a checkpoint on `heldout.jsonl` under `mlx-lm`: python score_mlx.py [CHECKPOINT] [--family NAME ...] [--wrong]

An answer counts when the text after `</think>` equals the expected one, or the tool calls do, names and arguments.
"""

import argparse
import json
import re
from pathlib import Path

import mlx.core as mx
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

from export import MLX_MODEL_TYPE

HERE = Path(__file__).parent
BLOCK = 512


def greedy(model, tok, prompt, limit=400):
    """The greedy continuation of `prompt` up to the end of the turn."""
    cache = make_prompt_cache(model)
    ids = mx.array(prompt)[None]
    for at in range(0, ids.shape[1], BLOCK):
        logits = model(ids[:, at:at + BLOCK], cache=cache)
        mx.eval(logits)
    out = []
    while len(out) < limit:
        token = int(mx.argmax(logits[0, -1]).item())
        if token in tok.eos_token_ids:
            break
        out.append(token)
        logits = model(mx.array([[token]]), cache=cache)
    return tok.decode(out)


def calls(text):
    """Tool calls as (name, {parameter: text})."""
    return [(name, dict(re.findall(r"<parameter=([^>]+)>\n(.*?)\n</parameter>", body, re.S))) for name, body in re.findall(r"<function=([^>]+)>\n(.*?)</function>", text, re.S)]


def right(record, text):
    """Whether the generated text is the record's answer."""
    answer = record["answer"]
    if record["enable_thinking"]:
        text = text.split("</think>\n\n", 1)[-1]
    if "tool_calls" in answer:
        return calls(text) == [(c["name"], {k: str(v) for k, v in c["arguments"].items()}) for c in answer["tool_calls"]]
    return text.strip() == answer["content"]


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("checkpoint", nargs="?", default=str(HERE / "checkpoint"))
    p.add_argument("--family", nargs="*")
    p.add_argument("--wrong", action="store_true", help="print the wrong answers")
    args = p.parse_args()
    model, tok = load(args.checkpoint, model_config={"model_type": MLX_MODEL_TYPE})
    scores = {}
    for line in open(HERE / "heldout.jsonl"):
        record = json.loads(line)
        family = record["family"]
        if args.family and family not in args.family:
            continue
        prompt = tok.apply_chat_template(record["messages"], tools=record.get("tools"), add_generation_prompt=True, enable_thinking=record["enable_thinking"])
        text = greedy(model, tok, prompt)
        ok = right(record, text)
        scores.setdefault(family, []).append(ok)
        if args.wrong and not ok:
            print(family, json.dumps(record["messages"][-3:])[-400:], "| expected", record["answer"], "| got", repr(text), flush=True)
    for family, hits in scores.items():
        print(f"{family:12} {sum(hits):3}/{len(hits)} {100 * sum(hits) / len(hits):5.1f} %")
