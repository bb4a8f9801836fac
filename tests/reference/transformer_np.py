"""The decoder of `jaxlab.nn.transformer` from its formulas, in float64 loops over positions and heads."""

import numpy as np


def rms_norm(x, scale, eps):
    """x_i * scale_i / sqrt(eps + (1/d) sum_j x_j^2)."""
    return scale * x / np.sqrt(eps + (x @ x) / x.size)


def rope(x, position, base):
    """The complex number x_i + i x_{i+c/2} turned by the angle position * base^(-2i/c)."""
    half = x.size // 2
    theta = base ** (-2.0 * np.arange(half) / x.size)
    turned = (x[:half] + 1j * x[half:]) * np.exp(1j * position * theta)
    return np.concatenate([turned.real, turned.imag])


def forward(params, tokens, *, layers, heads, kv_heads, eps=1e-6, base=10_000.0):
    """Logits [T, V] of one sequence of token ids.

    `params` maps paths ("layers/0/attn/q/kernel") to arrays; without "head/kernel" the embedding is the output matrix.
    """
    w = {path: np.asarray(value, np.float64) for path, value in params.items()}
    stream = [w["embed/embedding"][t] for t in tokens]
    size = stream[0].size // heads
    for layer in layers:
        keys, values, after = [], [], []
        for t, x in enumerate(stream):
            h = rms_norm(x, w[f"layers/{layer}/attn_norm/scale"], eps)
            q, k, v = (h @ w[f"layers/{layer}/attn/{n}/kernel"] for n in "qkv")
            keys.append([rope(part, t, base) for part in np.split(k, kv_heads)])
            values.append(np.split(v, kv_heads))
            outputs = []
            for head, part in enumerate(np.split(q, heads)):
                group = head * kv_heads // heads
                query = rope(part, t, base)
                energy = np.array([query @ keys[s][group] / np.sqrt(size) for s in range(t + 1)])
                weight = np.exp(energy - energy.max())
                weight /= weight.sum()
                outputs.append(sum(p * values[s][group] for s, p in enumerate(weight)))
            x = x + np.concatenate(outputs) @ w[f"layers/{layer}/attn/o/kernel"]
            h = rms_norm(x, w[f"layers/{layer}/mlp_norm/scale"], eps)
            gate = h @ w[f"layers/{layer}/mlp/gate/kernel"]
            swish = gate / (1 + np.exp(-gate))
            after.append(x + (swish * (h @ w[f"layers/{layer}/mlp/up/kernel"])) @ w[f"layers/{layer}/mlp/down/kernel"])
        stream = after
    out = w["head/kernel"] if "head/kernel" in w else w["embed/embedding"].T
    return np.stack([rms_norm(x, w["final_norm/scale"], eps) @ out for x in stream])


def cross_entropy(logits, targets):
    """Mean of -log softmax(logits)[target], in nats."""
    top = logits.max(axis=-1, keepdims=True)
    log_p = logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
    return -np.mean([row[t] for row, t in zip(log_p, targets, strict=True)])
