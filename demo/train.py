"""Trains the demo model on one GPU. README.md has the commands that made the committed checkpoint.

The schedule runs by the clock, because the machine is lent by the minute: warm-up, constant rate, then a linear decay from
`--decay-at` on, and quantization-aware from `--qat-at` on (both as fractions of `--seconds`). Matrices are trained with Muon
(orthogonalised momentum, per expert), everything else with Adam.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import data
import kernels
from model import Model, Weights

HERE = Path(__file__).parent
PARTS = 4  # files of about 11 MB


def arguments():
    p = argparse.ArgumentParser()
    p.add_argument("--seconds", type=float, required=True, help="in all, compilation included")
    p.add_argument("--tokens", type=int, default=49152, help="per step")
    p.add_argument("--rate", type=float, default=4e-3)
    p.add_argument("--decay-at", type=float, default=0.7)
    p.add_argument("--qat-at", type=float, default=0.75)
    p.add_argument("--level", type=float, default=0.0, help="where the curriculum starts")
    p.add_argument("--level-tokens", type=float, default=200e6, help="tokens from level 0 to 1")
    p.add_argument("--boost", default="{}", help='JSON: factors on the shares, {"sum": 2}')
    p.add_argument("--resume", nargs="*", default=[], help="weight files, or one state.pt with the optimizer's state")
    p.add_argument("--out", required=True)
    p.add_argument("--state", help="where to leave weights and optimizer for a later call")
    p.add_argument("--eval-every", type=float, default=90)
    p.add_argument("--workers", type=int, default=13)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--device", default="cuda")
    p.add_argument("--check", action="store_true", help="compare the GPU stages with the plain ones first")
    return p.parse_args()


def orthogonalize(g):
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrix, batched (Muon, Jordan et al. 2024)."""
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.mT if tall else x


class Optimizer:
    """Muon on matrices, Adam on the rest, over the flat vectors. Non-finite gradients skip the step."""

    def __init__(self, weights):
        self.w = weights
        self.m = {k: torch.zeros_like(v) for k, v in weights.flat.items()}
        self.v = {k: torch.zeros_like(v) for k, v in weights.flat.items()}
        self.step_number = 0
        self.muon_from = min(offset for _, offset, _, kind in weights.where.values() if kind == "muon4")
        self.groups = {}
        for name, (_, _, shape, kind) in weights.where.items():
            if kind == "muon4":
                self.groups.setdefault(shape[-2:], []).append(name)

    def state(self):
        return {"m": self.m, "v": self.v, "step": self.step_number}

    def load(self, state):
        for k in self.m:
            self.m[k].copy_(state["m"][k]), self.v[k].copy_(state["v"][k])
        self.step_number = state["step"]

    @torch.no_grad()
    def step(self, rate):
        self.step_number += 1
        n, flat = self.step_number, self.w.flat
        grads = {k: v.grad for k, v in flat.items()}
        finite = torch.stack([g.isfinite().all() for g in grads.values()]).all()
        for k in grads:
            grads[k] = torch.where(finite, grads[k], 0.0)
            flat[k].grad = None
        for k, upto in (("w4", self.muon_from), ("w8", None), ("plain", None)):
            g, m, v = grads[k][:upto], self.m[k][:upto], self.v[k][:upto]
            m.lerp_(g, 1 - 0.9)
            v.lerp_(g * g, 1 - 0.98)
            flat[k][:upto].sub_(m / (1 - 0.9**n) / ((v / (1 - 0.98**n)).sqrt() + 1e-9), alpha=0.5 * rate)
        g, m = grads["w4"][self.muon_from:], self.m["w4"][self.muon_from:]
        m.lerp_(g, 1 - 0.95)
        ahead = {"w4": torch.cat([grads["w4"][:self.muon_from], g.lerp(m, 0.95)])}
        flat["w4"][self.muon_from:].mul_(1 - 0.1 * rate)
        for shape, names in self.groups.items():
            views = [self.w.view(ahead, x).reshape(-1, *shape) for x in names]
            o = orthogonalize(torch.cat(views)).float() * (-rate * 0.2 * max(shape) ** 0.5)
            torch._foreach_add_([self.w.view(flat, x).view(-1, *shape) for x in names], list(o.split([len(x) for x in views])))


class Run:
    """The model, its data on the device, loss and evaluation."""

    def __init__(self, args):
        self.device = args.device
        self.weights = Weights(args.device, seed=args.seed)
        gpu = args.device == "cuda"
        self.model = Model(kernels.delta_core_gpu if gpu else kernels.delta_core_cpu, kernels.attn_core_gpu if gpu else kernels.attn_core_cpu, compiled=gpu)

    def _inputs(self, row):
        ids, position, borders, at, weight, family, item = row
        put = lambda x: torch.from_numpy(x).to(self.device, non_blocking=True).long()  # noqa: E731
        at = put(at)
        ids = put(ids)
        return ids, put(position), kernels.Borders(borders, self.device), at, torch.from_numpy(weight).to(self.device), put(family), put(item)

    def forward(self, row, quantized):
        """Cross entropy and hit of every learnt position, their weights, families and items, and the balance term."""
        ids, position, borders, at, weight, family, item = self._inputs(row)
        w = self.weights.forward_views(quantized)
        x, balance = self.model.hidden(w, ids, position, borders)
        logits = self.model.logits(w, x[at - 1])
        target = ids[at]
        return torch.nn.functional.cross_entropy(logits, target, reduction="none"), logits.argmax(-1) == target, weight, family, item, balance

    def evaluate(self, rows, names, quantized):
        """Share of held-out answers with every token right under teacher forcing, by family: the same as greedy decoding."""
        wrong = torch.zeros(len(names), dtype=torch.bool, device=self.device)
        for row in rows:
            _, hit, _, _, item, _ = self.forward(row, quantized)
            wrong[item[~hit]] = True
        wrong, out = wrong.cpu().tolist(), {}
        for name, bad in zip(names, wrong):
            out.setdefault(name, []).append(not bad)
        return {k: round(100 * sum(v) / len(v), 1) for k, v in out.items()}

    def save(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        state = self.weights.state_dict()
        parts, sizes = [{} for _ in range(PARTS)], [0] * PARTS
        for name, t in sorted(state.items(), key=lambda x: -x[1].nbytes):
            i = sizes.index(min(sizes))
            parts[i][name] = t.contiguous()
            sizes[i] += t.nbytes
        for i, part in enumerate(parts):
            save_file(part, folder / f"part{i}.safetensors")


def main():
    args = arguments()
    torch.manual_seed(args.seed)
    boost = json.loads(args.boost)
    shares = {k: v * boost.get(k, 1) for k, v in data.SHARES.items()}
    folder = str(HERE / "checkpoint")
    stream = data.Stream(folder, args.tokens, args.workers, args.seed, shares)  # forks, so before CUDA starts
    stream.level.value = args.level
    out = Path(args.out)
    if args.device == "cuda":
        torch._dynamo.config.suppress_errors = True
        torch._dynamo.config.cache_size_limit = 64
        kernels.prepare_gpu()
        if args.check:
            worst = kernels.check_gpu()
            assert worst < 5e-2, worst
    run = Run(args)
    optimizer = Optimizer(run.weights)
    seen = 0
    if len(args.resume) == 1 and args.resume[0].endswith(".pt"):
        state = torch.load(args.resume[0], map_location=args.device)
        with torch.no_grad():
            for k, v in run.weights.flat.items():
                v.copy_(state["flat"][k])
        optimizer.load(state["optimizer"])
    elif args.resume:
        merged = {}
        for part in args.resume:
            merged.update(load_file(part))
        run.weights.load(merged)
    rows, names = data.heldout_rows(folder, args.tokens)

    begin, start, step, last_eval, window = time.time(), None, 0, time.time(), []
    while True:
        now = time.time()
        progress = (now - start) / (args.seconds - (start - begin)) if start else 0.0
        if progress >= 1:
            break
        quantized = progress >= args.qat_at
        rate = args.rate * min(1, (step + 1) / 100)
        if progress > args.decay_at:
            rate *= max(0.01, (1 - progress) / (1 - args.decay_at))
        loss, hit, weight, family, _, balance = run.forward(next(stream), quantized)
        total = (loss * weight).sum() / weight.sum()
        (total + 0.01 * balance).backward()
        optimizer.step(rate)
        step += 1
        seen += args.tokens
        stream.level.value = min(1.0, args.level + seen / args.level_tokens)
        window.append((total.detach(), hit.float().mean(), balance.detach() if torch.is_tensor(balance) else balance))
        if step == 3:  # compilation is over
            if args.device == "cuda":
                torch.cuda.synchronize()
            start = time.time()
            print(f"compiled after {start - begin:.0f} s", flush=True)
        if step % 100 == 0 or args.device == "cpu":
            mean = [float(sum(x) / len(x)) for x in zip(*window)]
            window = []
            each = torch.zeros(len(data.FAMILIES), device=run.device).scatter_reduce_(0, family, hit.float(), "mean", include_self=False).tolist()
            speed = step * args.tokens / (time.time() - (start or begin))
            print(f"step {step} tokens {seen / 1e6:.0f}M loss {mean[0]:.4f} hits {100 * mean[1]:.1f} balance {mean[2]:.2f} rate {rate:.1e} level {stream.level.value:.2f} "
                  f"queue {stream.queue.qsize()} {speed / 1e3:.0f}K/s {time.time() - begin:.0f}s | " + " ".join(f"{n[:4] + n[-2:]}:{100 * a:.0f}" for n, a in zip(data.FAMILIES, each)), flush=True)
        if start and now - last_eval > args.eval_every:
            print(f"eval step {step} bf16 {run.evaluate(rows, names, False)}", flush=True)
            run.save(out)
            last_eval = time.time()
    for quantized in (False, True):
        print(f"final {'4-bit' if quantized else 'bf16'} {run.evaluate(rows, names, quantized)}", flush=True)
    run.save(out)
    if args.state:
        torch.save({"flat": run.weights.flat, "optimizer": optimizer.state()}, args.state)
    print(f"done: {step} steps, {seen / 1e6:.0f}M tokens, {time.time() - begin:.0f} s", flush=True)
    stream.close()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
