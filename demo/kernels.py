"""The two stages of `model.py` that know document borders, for the GPU (fast) and for the CPU (plain, the reference).

On the GPU the gated delta rule comes from flash-linear-attention, except for one backward kernel, which Triton 3.4 to 3.7.0
miscompiles on Hopper (its issue 640; the library refuses to run it there): `_chunk_gradients` does the same in PyTorch.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

CHUNK = 64
CONFIGURATIONS = 2


class Borders:
    """Where documents begin and end: `cu` int32 [docs + 1] on the device, `longest` the longest document, `list` on the host."""

    def __init__(self, cu, device):
        self.list = [int(i) for i in cu]
        self.cu = torch.tensor(self.list, dtype=torch.int32).to(device, non_blocking=True)
        self.host = torch.tensor(self.list, dtype=torch.int32)
        self.longest = max(b - a for a, b in zip(self.list, self.list[1:]))
        self.indices = None


def attn_core_gpu(q, k, v, borders):
    """Causal attention within documents."""
    return varlen_attn(q, k, v, borders.cu, borders.cu, borders.longest, borders.longest, window_size=(-1, 0))


def attn_core_cpu(q, k, v, borders):
    """The same, one document at a time."""
    out = []
    for a, b in zip(borders.list, borders.list[1:]):
        one = [x[a:b].transpose(0, 1)[None] for x in (q, k, v)]
        out.append(F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(out)


def delta_core_cpu(q, k, v, g, beta, borders):
    """The gated delta rule token by token, in float32."""
    q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    q, out = q * q.shape[-1] ** -0.5, []
    for a, b in zip(borders.list, borders.list[1:]):
        state = torch.zeros(v.shape[1], k.shape[2], v.shape[2], device=v.device)
        for i in range(a, b):
            state = state * g[i].exp()[:, None, None]
            read = torch.einsum("hkv,hk->hv", state, k[i])
            state = state + torch.einsum("hk,hv->hkv", k[i], (v[i] - read) * beta[i][:, None])
            out.append(torch.einsum("hkv,hk->hv", state, q[i]))
    return torch.stack(out)


def delta_core_gpu(q, k, v, g, beta, borders):
    """The gated delta rule over all documents at once."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.utils.index import prepare_chunk_indices

    if borders.indices is None:
        borders.indices = prepare_chunk_indices(borders.cu, CHUNK, cu_seqlens_cpu=borders.host)
    out, _ = chunk_gated_delta_rule(q[None], k[None], v[None], g[None], beta[None], cu_seqlens=borders.cu, cu_seqlens_cpu=borders.host, chunk_indices=borders.indices)
    return out[0]


def _slots(cu, indices, tokens):
    """For each chunk its token indices and which are real; for each token its slot."""
    start = cu.long()[indices[:, 0].long()] + indices[:, 1].long() * CHUNK
    token = start[:, None] + torch.arange(CHUNK, device=cu.device)
    real = token < cu.long()[indices[:, 0].long() + 1][:, None]
    slot = torch.zeros(tokens + 1, dtype=torch.long, device=cu.device)
    slot[torch.where(real, token, tokens).view(-1)] = torch.arange(token.numel(), device=cu.device)
    return torch.where(real, token, 0), real, slot[:tokens]


def _chunk_math(q, k, v, dv, do, h, dh, g, real, scale):
    """Gradients within chunks. q, k, v, dv, do are [chunk, head, 64, 128], g (base-2 log decay, cumulative) [chunk, head, 64]."""
    mm = lambda a, b: torch.matmul(a.to(torch.bfloat16), b.to(torch.bfloat16)).float()  # noqa: E731
    last = real.sum(1) - 1
    g_last = g.gather(2, last[:, None, None].expand(-1, g.shape[1], 1))
    dq = mm(do, h.transpose(-1, -2)) * torch.exp2(g)[..., None] * scale
    dk = mm(v, dh.transpose(-1, -2)) * torch.where(real[:, None], torch.exp2(g_last - g), 0)[..., None]
    dw = -mm(dv, h.transpose(-1, -2))
    d_last = (h.float() * dh.float()).sum((-1, -2)) * torch.exp2(g_last[..., 0]) + (dk * k.float()).sum((-1, -2))
    seen = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril() & real[:, None, :, None] & real[:, None, None, :]
    decay = torch.exp2(torch.where(seen, g[..., :, None] - g[..., None, :], float("-inf")))
    ds = (mm(do, v.transpose(-1, -2)) * decay * scale).to(torch.bfloat16)
    dq = dq + mm(ds, k)
    dk = dk + mm(ds.transpose(-1, -2), q)
    dg = (dq * q.float()).sum(-1) - (dk * k.float()).sum(-1)
    dg = dg + torch.where((torch.arange(CHUNK, device=q.device) == last[:, None])[:, None], d_last[..., None], 0)
    return dq, dk, dw, dg


_chunk_math_fast = torch.compile(_chunk_math, dynamic=True)


def _chunk_gradients(q, k, v, do, h, dh, w=None, g=None, g_gamma=None, dv=None, scale=None, state_v_first=False, cu_seqlens=None, chunk_size=CHUNK, chunk_indices=None):
    """Stands in for flash-linear-attention's `chunk_bwd_dqkwg` in the one use made of it here."""
    assert chunk_size == CHUNK and not state_v_first and q.shape[2] == v.shape[2]
    tokens, heads = q.shape[1], q.shape[2]
    token, real, slot = _slots(cu_seqlens, chunk_indices, tokens)
    pick = lambda x: torch.where(real[..., None, None], x[0][token], 0).transpose(1, 2)  # noqa: E731
    chunks = token.shape[0]
    g_in = torch.where(real[..., None], g[0][token], 0).transpose(1, 2)
    grads = _chunk_math_fast(pick(q), pick(k), pick(v), pick(dv), pick(do), h.view(chunks, heads, *h.shape[-2:]), dh.view(chunks, heads, *dh.shape[-2:]), g_in, real, scale)
    dq, dk, dw, dg = (x.transpose(1, 2).reshape(chunks * CHUNK, *x.shape[1:2], *x.shape[3:])[slot][None] for x in grads)
    return dq.to(q.dtype), dk.to(k.dtype), dw.to(w.dtype), dg.float()


def prepare_gpu():
    """Puts `_chunk_gradients` in the place of the kernel that must not be used, and keeps Triton's autotuning short.

    Trying all of the library's 6 to 24 configurations of each kernel takes four minutes on a fresh machine.
    """
    from triton.runtime.autotuner import Autotuner

    whole = Autotuner.__init__
    Autotuner.__init__ = lambda self, fn, arg_names, configs, *rest, **named: whole(self, fn, arg_names, configs[:CONFIGURATIONS], *rest, **named)
    import fla.ops.gated_delta_rule.chunk as chunk

    chunk.chunk_bwd_dqkwg = _chunk_gradients


def check_gpu():
    """Forward and backward of both GPU stages against the plain ones in float32, on documents of awkward lengths."""
    torch.manual_seed(0)
    lengths = [1, 63, 64, 65, 200, 500, 3]
    borders = Borders([sum(lengths[:i]) for i in range(len(lengths) + 1)], "cuda")
    n = borders.list[-1]
    unit = lambda *s: F.normalize(torch.randn(*s, device="cuda"), dim=-1)  # noqa: E731
    delta = [unit(n, 4, 128), unit(n, 4, 128), torch.randn(n, 4, 128, device="cuda"), -torch.rand(n, 4, device="cuda") * torch.tensor([0.01, 0.1, 0.5, 2.0], device="cuda"), torch.rand(n, 4, device="cuda")]
    attn = [torch.randn(n, 8, 256, device="cuda"), torch.randn(n, 1, 256, device="cuda"), torch.randn(n, 1, 256, device="cuda")]
    worst = 0.0
    for name, fast, plain, inputs in [("delta", delta_core_gpu, delta_core_cpu, delta), ("attention", attn_core_gpu, attn_core_cpu, attn)]:
        lead = [x.bfloat16().requires_grad_() if i < 3 else x.clone().requires_grad_() for i, x in enumerate(inputs)]
        ref = [x.detach().float().requires_grad_() for x in lead]
        got, want = fast(*lead, borders), plain(*ref, borders)
        seed = torch.randn_like(want)
        got.float().backward(seed), want.backward(seed)
        for what, a, b in [("out", got, want)] + [(f"grad {i}", x.grad, y.grad) for i, (x, y) in enumerate(zip(lead, ref))]:
            error = ((a.float() - b).norm() / b.norm()).item()
            worst = max(worst, error)
            print(f"check {name} {what}: relative error {error:.2e}", flush=True)
    return worst
