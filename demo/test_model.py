"""The training model equals `transformers`, and its fake quantization equals MLX's."""

import mlx.core as mx
import numpy as np
import torch
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

import kernels
from model import CONFIG, Model, Weights, fake_quantize


def test_logits_equal_transformers():
    weights = Weights("cpu", seed=3)
    with torch.no_grad():
        for flat in ("w4", "plain"):
            weights.flat[flat] += torch.randn(weights.flat[flat].shape) * 0.05
    hf = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**CONFIG)).float().eval()
    print(hf.load_state_dict(weights.state_dict(torch.float32)))
    ours = Model(kernels.delta_core_cpu, kernels.attn_core_cpu, compiled=False)
    views = {n: weights.view(weights.flat, n) for n in weights.where}
    lengths = [70, 1, 130]
    ids = torch.randint(0, 4096, (sum(lengths),))
    borders = kernels.Borders([0, 70, 71, 201], "cpu")
    position = torch.cat([torch.arange(n) for n in lengths])
    with torch.no_grad():
        got = ours.logits(views, ours.hidden(views, ids, position, borders)[0])
        want = torch.cat([hf(part[None]).logits[0] for part in ids.split(lengths)])
    error = ((got - want).norm() / want.norm()).item()
    print("relative error", error, "logits scale", want.std().item())
    assert error < 1e-5


def test_fake_quantization_equals_mlx():
    w = (torch.randn(64, 256) * torch.rand(64, 1)).bfloat16()
    w[3, :64] = 0
    w[4, :64] = w[4, :64].abs()
    w[5, :64] = 0.25
    for bits in (4, 8):
        q, s, b = mx.quantize(mx.array(w.float().numpy()).astype(mx.bfloat16), group_size=64, bits=bits)
        back = mx.dequantize(q, s.astype(mx.float32), b.astype(mx.float32), group_size=64, bits=bits)
        assert np.array_equal(np.array(back), fake_quantize(w.float(), bits).numpy())


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(name, "ok")
