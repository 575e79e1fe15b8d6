"""The demo model as one fast training program, equal to `transformers`' `Qwen3_5MoeForCausalLM`.

Documents of any length lie end to end in one row of tokens (`cu_seqlens` marks the borders); neither attention, nor the
convolution, nor the recurrent state crosses a border. All 32 experts are computed densely and weighted by the router, zero
for those not chosen: the same result as sparse experts, in three large matrix products. `test_model.py` compares logits.

Weights live in three flat float32 vectors by how they will be quantized (4-bit, 8-bit, never), so that quantization-aware
training is one elementwise pass over each. `Weights.state_dict` gives them the Hugging Face names.
"""

import math

import torch
import torch.nn.functional as F

VOCAB, WIDTH, LAYERS = 4096, 256, 8
HEADS, KV_HEADS, HEAD_DIM, ROTARY = 8, 1, 256, 64
K_HEADS, V_HEADS, DELTA_DIM, CONV = 2, 4, 128, 4
EXPERTS, TOP_K, INNER = 32, 8, 64
EPS, THETA = 1e-6, 1e7
GROUP = 64
CONTEXT = 32768

CONFIG = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "full_attention_interval": 4,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "hidden_act": "silu",
    "rms_norm_eps": EPS,
    "max_position_embeddings": CONTEXT,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10], "mrope_interleaved": True},
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": K_HEADS,
    "linear_num_value_heads": V_HEADS,
    "linear_key_head_dim": DELTA_DIM,
    "linear_value_head_dim": DELTA_DIM,
    "linear_conv_kernel_dim": CONV,
    "mamba_ssm_dtype": "float32",
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": INNER,
    "shared_expert_intermediate_size": INNER,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": None,
}

KEY, VALUE = K_HEADS * DELTA_DIM, V_HEADS * DELTA_DIM
CHANNELS = 2 * KEY + VALUE


def is_full(layer):
    """Whether this layer has full attention."""
    return layer % 4 == 3


def _shapes():
    """Every tensor as (name, shape, kind); kind is "adam4", "muon4", "q8" or "plain"."""
    out = [("model.embed_tokens.weight", (VOCAB, WIDTH), "adam4"), ("lm_head.weight", (VOCAB, WIDTH), "adam4")]
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        if is_full(i):
            a = p + "self_attn."
            out += [(a + "q_proj.weight", (2 * HEADS * HEAD_DIM, WIDTH), "muon4"), (a + "k_proj.weight", (KV_HEADS * HEAD_DIM, WIDTH), "muon4"),
                    (a + "v_proj.weight", (KV_HEADS * HEAD_DIM, WIDTH), "muon4"), (a + "o_proj.weight", (WIDTH, HEADS * HEAD_DIM), "muon4"),
                    (a + "q_norm.weight", (HEAD_DIM,), "plain"), (a + "k_norm.weight", (HEAD_DIM,), "plain")]
        else:
            a = p + "linear_attn."
            out += [(a + "in_proj_qkv.weight", (CHANNELS, WIDTH), "muon4"), (a + "in_proj_z.weight", (VALUE, WIDTH), "muon4"),
                    (a + "in_proj_b.weight", (V_HEADS, WIDTH), "adam4"), (a + "in_proj_a.weight", (V_HEADS, WIDTH), "adam4"),
                    (a + "out_proj.weight", (WIDTH, VALUE), "muon4"), (a + "conv1d.weight", (CHANNELS, 1, CONV), "plain"),
                    (a + "A_log", (V_HEADS,), "plain"), (a + "dt_bias", (V_HEADS,), "plain"), (a + "norm.weight", (DELTA_DIM,), "plain")]
        m = p + "mlp."
        out += [(m + "experts.gate", (EXPERTS, INNER, WIDTH), "muon4"), (m + "experts.up", (EXPERTS, INNER, WIDTH), "muon4"),
                (m + "experts.down_proj", (EXPERTS, WIDTH, INNER), "muon4"),
                (m + "shared_expert.gate_proj.weight", (INNER, WIDTH), "muon4"), (m + "shared_expert.up_proj.weight", (INNER, WIDTH), "muon4"),
                (m + "shared_expert.down_proj.weight", (WIDTH, INNER), "muon4"),
                (m + "gate.weight", (EXPERTS, WIDTH), "q8"), (m + "shared_expert_gate.weight", (1, WIDTH), "q8"),
                (p + "input_layernorm.weight", (WIDTH,), "plain"), (p + "post_attention_layernorm.weight", (WIDTH,), "plain")]
    out.append(("model.norm.weight", (WIDTH,), "plain"))
    return out


FLAT = {"w4": ("adam4", "muon4"), "w8": ("q8",), "plain": ("plain",)}


def fake_quantize(w, bits):
    """What `mlx` reads back after quantizing `w` (any shape, a multiple of 64 long) to `bits` in groups of 64.

    MLX's affine rule: the edge of larger magnitude is made exactly representable and zero falls on a step; scale and bias are
    stored in bf16. `test_model.py` compares with `mlx.core.quantize`.
    """
    x = w.bfloat16().float().reshape(-1, GROUP)
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    steps = 2**bits - 1
    from_low = low.abs() > high.abs()
    scale = ((high - low) / steps).clamp_min(1e-7)
    scale = torch.where(from_low, scale, -scale)
    edge = torch.where(from_low, low, high)
    zero = torch.round(edge / scale)
    scale = torch.where(zero != 0, edge / torch.where(zero != 0, zero, 1), scale)
    bias = torch.where(zero != 0, edge, 0)
    q = torch.round((x - bias) / scale).clamp(0, steps)
    return (q * scale.bfloat16().float() + bias.bfloat16().float()).reshape(w.shape)


class _Through(torch.autograd.Function):
    """Rounds the forward value (to bf16, after the quantizer if `bits`), passes the gradient on unchanged."""

    @staticmethod
    def forward(ctx, w, bits):
        return (fake_quantize(w, bits) if bits else w).bfloat16()

    @staticmethod
    def backward(ctx, grad):
        return grad.float(), None


class Weights:
    """The flat parameter vectors and their named views."""

    def __init__(self, device, seed=0):
        self.where = {}
        self.flat = {}
        for flat, kinds in FLAT.items():
            offset = 0
            for kind in kinds:
                for name, shape, k in _shapes():
                    if k == kind:
                        self.where[name] = (flat, offset, shape, kind)
                        offset += math.prod(shape)
            self.flat[flat] = torch.zeros(offset, device=device)
        self._init(seed)
        for flat in self.flat.values():
            flat.requires_grad_(True)

    def view(self, vectors, name):
        flat, offset, shape, _ = self.where[name]
        return vectors[flat][offset:offset + math.prod(shape)].view(shape)

    @torch.no_grad()
    def _init(self, seed):
        r = torch.Generator().manual_seed(seed)
        for name, (_, _, shape, _) in self.where.items():
            t = self.view(self.flat, name)
            if name.endswith("embed_tokens.weight"):
                value = torch.randn(shape, generator=r) * 0.1
            elif name.endswith("lm_head.weight"):
                value = torch.randn(shape, generator=r) * 0.02
            elif name.endswith("A_log"):
                value = torch.log(torch.rand(shape, generator=r) * 7.5 + 0.5)
            elif name.endswith("dt_bias"):
                dt = torch.exp(torch.rand(shape, generator=r) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
                value = dt + torch.log(-torch.expm1(-dt))
            elif name.endswith("linear_attn.norm.weight"):
                value = torch.ones(shape)
            elif name.endswith("norm.weight"):
                value = torch.zeros(shape)
            elif name.endswith("conv1d.weight"):
                value = (torch.rand(shape, generator=r) * 2 - 1) / math.sqrt(CONV)
            elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")):
                value = torch.randn(shape, generator=r) * (0.3 / math.sqrt(shape[-1] * 2 * LAYERS))
            else:
                value = torch.randn(shape, generator=r) * (0.6 / math.sqrt(shape[-1]))
            t.copy_(value.to(t.device))

    def forward_views(self, quantized):
        """The named tensors that a forward pass reads: bf16 matrices, float32 for the rest."""
        used = {"w4": _Through.apply(self.flat["w4"], 4 if quantized else 0), "w8": _Through.apply(self.flat["w8"], 8 if quantized else 0), "plain": self.flat["plain"]}
        out = {}
        for flat, vector in used.items():
            names = sorted((n for n, x in self.where.items() if x[0] == flat), key=lambda n: self.where[n][1])
            for name, part in zip(names, vector.split([math.prod(self.where[n][2]) for n in names])):
                out[name] = part.view(self.where[name][2])
        return out

    @torch.no_grad()
    def state_dict(self, dtype=torch.bfloat16):
        """The weights under the names and shapes of `transformers`; `A_log` stays float32."""
        out = {}
        for name in self.where:
            t = self.view(self.flat, name).detach().cpu()
            if name.endswith("experts.gate"):
                up = self.view(self.flat, name[:-4] + "up").detach().cpu()
                out[name[:-4] + "gate_up_proj"] = torch.cat([t, up], 1).to(dtype)
            elif not name.endswith("experts.up"):
                out[name] = t.clone() if name.endswith("A_log") else t.to(dtype, copy=True)
        return out

    @torch.no_grad()
    def load(self, state):
        """Reads what `state_dict` wrote."""
        for name in self.where:
            if name.endswith("experts.gate"):
                value = state[name[:-4] + "gate_up_proj"][:, :INNER]
            elif name.endswith("experts.up"):
                value = state[name[:-2] + "gate_up_proj"][:, INNER:]
            else:
                value = state[name]
            t = self.view(self.flat, name)
            t.copy_(value.to(t.device))


def rms(x, weight):
    """RMS norm in float32 with a zero-centred weight."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (1 + weight)


def unit(x):
    """L2 norm to one over the last axis."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS)


def delta_in(x, norm, w_qkv, w_z, w_b, w_a, w_conv, a_log, dt_bias, position):
    """Projections, convolution and gates: q, k, v, g, beta, z for `delta_core`."""
    h = rms(x, norm).to(w_qkv.dtype)
    qkv = F.linear(h, w_qkv)
    taps = w_conv[:, 0].to(qkv.dtype)
    mixed = qkv * taps[:, CONV - 1]
    for back in range(1, CONV):
        earlier = F.pad(qkv[:-back], (0, 0, back, 0)) * (position >= back)[:, None]
        mixed = mixed + earlier * taps[:, CONV - 1 - back]
    q, k, v = F.silu(mixed).split([KEY, KEY, VALUE], -1)
    share = V_HEADS // K_HEADS
    q = unit(q.float().view(-1, K_HEADS, DELTA_DIM)).repeat_interleave(share, 1).to(h.dtype)
    k = unit(k.float().view(-1, K_HEADS, DELTA_DIM)).repeat_interleave(share, 1).to(h.dtype)
    beta = F.linear(h, w_b).float().sigmoid()
    g = -a_log.exp() * F.softplus(F.linear(h, w_a).float() + dt_bias)
    return q, k, v.reshape(-1, V_HEADS, DELTA_DIM), g, beta, F.linear(h, w_z)


def delta_out(x, o, z, norm, w_out):
    """Gated norm per head and the output projection, added to the residual."""
    o = o.float()
    o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + EPS) * norm
    o = o * F.silu(z.float().view(-1, V_HEADS, DELTA_DIM))
    return x + F.linear(o.reshape(-1, VALUE).to(w_out.dtype), w_out)


def _rotate(x, cos, sin):
    a, b, rest = x.split([ROTARY // 2, ROTARY // 2, HEAD_DIM - ROTARY], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def attn_in(x, norm, w_q, w_k, w_v, q_norm, k_norm, cos, sin):
    """Projections, head norms, rotary: q, k, v and the output gate."""
    h = rms(x, norm).to(w_q.dtype)
    q, gate = F.linear(h, w_q).view(-1, HEADS, 2 * HEAD_DIM).chunk(2, -1)
    k = F.linear(h, w_k).view(-1, KV_HEADS, HEAD_DIM)
    v = F.linear(h, w_v).view(-1, KV_HEADS, HEAD_DIM)
    q = _rotate(rms(q.float(), q_norm), cos[:, None], sin[:, None]).to(h.dtype)
    k = _rotate(rms(k.float(), k_norm), cos[:, None], sin[:, None]).to(h.dtype)
    return q, k, v, gate


def attn_out(x, o, gate, w_o):
    """Output gate and projection, added to the residual."""
    o = o * gate.sigmoid()
    return x + F.linear(o.reshape(-1, HEADS * HEAD_DIM), w_o)


def moe(x, norm, router, shared_gate, gate, up, down, s_gate, s_up, s_down):
    """The experts, all computed, weighted by the router; also the load-balancing term (1 when even)."""
    h = rms(x, norm)
    b = h.to(gate.dtype)
    probs = F.linear(b.float(), router.float()).softmax(-1)
    index = torch.arange(EXPERTS, device=x.device)
    ahead = (probs[:, None, :] > probs[:, :, None]) | ((probs[:, None, :] == probs[:, :, None]) & (index[None, :] < index[:, None]))
    chosen = (ahead.sum(-1) < TOP_K).float()
    weight = probs * chosen
    weight = weight / weight.sum(-1, keepdim=True)
    factor = torch.cat([weight, F.linear(b.float(), shared_gate.float()).sigmoid()], -1)
    w_gate = torch.cat([gate.reshape(-1, WIDTH), s_gate])
    w_up = torch.cat([up.reshape(-1, WIDTH), s_up])
    w_down = torch.cat([down.permute(1, 0, 2).reshape(WIDTH, -1), s_down], 1)
    inner = F.silu(F.linear(b, w_gate).float()) * F.linear(b, w_up).float()
    inner = (inner.view(-1, EXPERTS + 1, INNER) * factor[:, :, None]).view(-1, (EXPERTS + 1) * INNER).to(b.dtype)
    balance = EXPERTS * (probs.mean(0) * (chosen.mean(0) / TOP_K).detach()).sum()
    return x + F.linear(inner, w_down), balance


def rotary(position):
    """Cosine and sine, [tokens, 32] each."""
    freq = THETA ** (-torch.arange(0, ROTARY, 2, device=position.device, dtype=torch.float32) / ROTARY)
    angle = position.float()[:, None] * freq
    return angle.cos(), angle.sin()


class Model:
    """The forward pass over a row of documents. `delta_core` and `attn_core` are given by the device (see `kernels.py`)."""

    def __init__(self, delta_core, attn_core, compiled=True):
        wrap = torch.compile if compiled else (lambda f, **_: f)
        self.delta_in, self.delta_out, self.attn_in, self.attn_out, self.moe = (wrap(f, dynamic=False) for f in (delta_in, delta_out, attn_in, attn_out, moe))
        self.delta_core, self.attn_core = delta_core, attn_core

    def hidden(self, w, ids, position, borders):
        """The last layer's residual, [tokens, 256] float32, and the mean load-balancing term. `borders` goes to the cores."""
        x = w["model.embed_tokens.weight"][ids].float()
        cos, sin = rotary(position)
        balance = 0.0
        for i in range(LAYERS):
            p = f"model.layers.{i}."
            g = lambda name: w[p + name]  # noqa: E731
            if is_full(i):
                q, k, v, gate = self.attn_in(x, g("input_layernorm.weight"), g("self_attn.q_proj.weight"), g("self_attn.k_proj.weight"), g("self_attn.v_proj.weight"),
                                             g("self_attn.q_norm.weight"), g("self_attn.k_norm.weight"), cos, sin)
                x = self.attn_out(x, self.attn_core(q, k, v, borders), gate, g("self_attn.o_proj.weight"))
            else:
                a = "linear_attn."
                q, k, v, decay, beta, z = self.delta_in(x, g("input_layernorm.weight"), g(a + "in_proj_qkv.weight"), g(a + "in_proj_z.weight"), g(a + "in_proj_b.weight"),
                                                        g(a + "in_proj_a.weight"), g(a + "conv1d.weight"), g(a + "A_log"), g(a + "dt_bias"), position)
                x = self.delta_out(x, self.delta_core(q, k, v, decay, beta, borders), z, g(a + "norm.weight"), g(a + "out_proj.weight"))
            m = "mlp."
            x, even = self.moe(x, g("post_attention_layernorm.weight"), g(m + "gate.weight"), g(m + "shared_expert_gate.weight"), g(m + "experts.gate"), g(m + "experts.up"),
                               g(m + "experts.down_proj"), g(m + "shared_expert.gate_proj.weight"), g(m + "shared_expert.up_proj.weight"), g(m + "shared_expert.down_proj.weight"))
            balance = balance + even / LAYERS
        return x, balance

    def logits(self, w, x):
        """Float32 logits of the given residual rows."""
        head = w["lm_head.weight"]
        return F.linear(rms(x, w["model.norm.weight"]).to(head.dtype), head).float()
