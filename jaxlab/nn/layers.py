"""The parts of the transformer as flax nnx modules, and the functions they share."""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Integer

if TYPE_CHECKING:
    from jaxlab.nn.transformer import TransformerConfig

ONE_HOT_MAX_VOCAB = 1024
"""Up to this vocabulary, look-ups are products with a one-hot matrix: the backward pass of a gather is a scatter, which
XLA runs element by element on a CPU. Larger vocabularies gather."""


class Cache(NamedTuple):
    """Keys and values of the positions seen so far, for all layers.

    Attributes:
      k: rotated keys [L, B, max_len, kv_heads, head_dim].
      v: values, same shape.
      index: number of positions filled.
    """

    k: Float[Array, "L B S h c"]
    v: Float[Array, "L B S h c"]
    index: Integer[Array, ""]


def matmul(x: Float[Array, "*n i"], w: Float[Array, "i o"], dtype: jnp.dtype, out: jnp.dtype) -> Float[Array, "*n o"]:
    """`x @ w` with operands in `dtype`, accumulated in fp32, returned as `out`."""
    flat = x.reshape(-1, x.shape[-1]).astype(dtype)
    y = jnp.matmul(flat, w.astype(dtype), preferred_element_type=jnp.float32)
    return y.astype(out).reshape(*x.shape[:-1], w.shape[-1])


class Linear(nnx.Module):
    """`x @ kernel`, no bias; the kernel is `(in, out)` and starts normal with the given standard deviation."""

    def __init__(self, n_in: int, n_out: int, std: float, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), (n_in, n_out), jnp.float32))
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*n i"]) -> Float[Array, "*n o"]:
        return matmul(x, self.kernel[...], self.dtype, self.dtype)


class Embed(nnx.Module):
    """Token embedding (V, d), starts normal with the given standard deviation; NaN for a token outside `[0, V)`."""

    def __init__(self, vocab: int, dim: int, std: float, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.embedding = nnx.Param(std * jax.random.normal(rngs.params(), (vocab, dim), jnp.float32))
        self.dtype = dtype

    def __call__(self, tokens: Integer[Array | np.ndarray, "B T"]) -> Float[Array, "B T d"]:
        table = self.embedding[...]
        tokens = jnp.asarray(tokens, jnp.int32)
        if table.shape[0] <= ONE_HOT_MAX_VOCAB:
            x = matmul(jax.nn.one_hot(tokens, table.shape[0], dtype=self.dtype), table, self.dtype, self.dtype)
        else:
            x = table.at[tokens].get(mode="clip").astype(self.dtype)
        return jnp.where(_in_range(tokens, table.shape[0])[..., None], x, jnp.nan)


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x^2) + eps) * scale`, computed in fp32."""

    def __init__(self, dim: int, eps: float):
        self.scale = nnx.Param(jnp.ones((dim,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        return (y * self.scale[...]).astype(x.dtype)


class Rope(NamedTuple):
    """Cosines and sines of the rotary angles, a row for each position."""

    cos: Float[Array | np.ndarray, "T half"]
    sin: Float[Array | np.ndarray, "T half"]


def rope_table(config: "TransformerConfig", length: int, cache: Cache | None = None) -> Rope:
    """Angles `t * base^(-2i/head_dim)` for `length` positions t, from 0 or from where the cache ends."""
    span = length if cache is None else cache.k.shape[2]
    half = config.head_dim // 2
    angles = np.outer(np.arange(span), config.rope_base ** (-np.arange(half) / half))
    table = Rope(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
    if cache is None:
        return table
    return Rope(*(jax.lax.dynamic_slice_in_dim(jnp.asarray(x), cache.index, length) for x in table))


def rotate(x: Float[Array, "B T h c"], rope: Rope) -> Float[Array, "B T h c"]:
    """Rotates the pairs (x_i, x_{i + c/2}) of every head by the angles of their position, in fp32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = rope.cos[:, None, :], rope.sin[:, None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attend(
    q: Float[Array, "B T h c"], k: Float[Array, "B S g c"], v: Float[Array, "B S g c"], offset: Integer[Array, ""] | int
) -> Float[Array, "B T h c"]:
    """Causal softmax attention; query t sees the keys s <= t + offset. Head h reads key/value head `h // (h/g)`."""
    (batch, length, heads, size), groups = q.shape, k.shape[2]
    share = heads // groups
    # The query heads that share keys become extra query rows, so that the products stay plain batched matmuls.
    q = q.reshape(batch, length, groups, share, size).swapaxes(2, 3).reshape(batch, length * share, groups, size)
    scores = jnp.einsum("bxgc,bsgc->bgxs", q, k, preferred_element_type=jnp.float32) * size**-0.5
    row, key = (jax.lax.broadcasted_iota(jnp.int32, scores.shape[-2:], axis) for axis in (0, 1))
    weights = jax.nn.softmax(jnp.where(key <= row // share + offset, scores, -jnp.inf), axis=-1).astype(v.dtype)
    out = jnp.einsum("bgxs,bsgc->bxgc", weights, v, preferred_element_type=jnp.float32).astype(v.dtype)
    return out.reshape(batch, length, share, groups, size).swapaxes(2, 3).reshape(batch, length, heads, size)


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions."""

    def __init__(self, config: "TransformerConfig", rngs: nnx.Rngs):
        dim, kv, dtype = config.dim, config.kv_heads * config.head_dim, jnp.dtype(config.dtype)
        self.q = Linear(dim, dim, dim**-0.5, dtype, rngs)
        self.k = Linear(dim, kv, dim**-0.5, dtype, rngs)
        self.v = Linear(dim, kv, dim**-0.5, dtype, rngs)
        self.o = Linear(dim, dim, (2 * config.layers * dim) ** -0.5, dtype, rngs)
        self.head_dim = config.head_dim

    def __call__(
        self, x: Float[Array, "B T d"], rope: Rope, layer: int | Integer[Array, ""], cache: Cache | None
    ) -> tuple[Float[Array, "B T d"], Cache | None]:
        def heads(y: Array) -> Array:
            return y.reshape(*y.shape[:2], -1, self.head_dim)

        q, k, v = rotate(heads(self.q(x)), rope), rotate(heads(self.k(x)), rope), heads(self.v(x))
        offset = 0
        if cache is not None:
            offset = cache.index
            start = (layer, 0, offset, 0, 0)
            cache = cache._replace(
                k=jax.lax.dynamic_update_slice(cache.k, k[None], start),
                v=jax.lax.dynamic_update_slice(cache.v, v[None], start),
            )
            k, v = (jax.lax.dynamic_index_in_dim(c, layer, keepdims=False) for c in (cache.k, cache.v))
        return self.o(attend(q, k, v, offset).reshape(x.shape)), cache


class MLP(nnx.Module):
    """SwiGLU: `(silu(x W_gate) * (x W_up)) W_down`."""

    def __init__(self, config: "TransformerConfig", rngs: nnx.Rngs):
        dim, ffn, dtype = config.dim, config.ffn, jnp.dtype(config.dtype)
        self.gate = Linear(dim, ffn, dim**-0.5, dtype, rngs)
        self.up = Linear(dim, ffn, dim**-0.5, dtype, rngs)
        self.down = Linear(ffn, dim, (2 * config.layers * ffn) ** -0.5, dtype, rngs)

    def __call__(self, x: Float[Array, "B T d"]) -> Float[Array, "B T d"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: "TransformerConfig", rngs: nnx.Rngs):
        self.attn_norm = RMSNorm(config.dim, config.norm_eps)
        self.attn = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = MLP(config, rngs)

    def __call__(
        self, x: Float[Array, "B T d"], rope: Rope, layer: int | Integer[Array, ""], cache: Cache | None
    ) -> tuple[Float[Array, "B T d"], Cache | None]:
        y, cache = self.attn(self.attn_norm(x), rope, layer, cache)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), cache


def cross_entropy(logits: Float[Array, "B T V"], targets: Integer[Array | np.ndarray, "B T"]) -> Float[Array, "B T"]:
    """`logsumexp(logits) - logits[target]` in nats; NaN where the target is outside `[0, V)`."""
    vocab = logits.shape[-1]
    targets = jnp.asarray(targets, jnp.int32)
    if vocab <= ONE_HOT_MAX_VOCAB:
        picked = jnp.sum(logits * jax.nn.one_hot(targets, vocab, dtype=logits.dtype), axis=-1)
    else:
        picked = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]
    return jnp.where(_in_range(targets, vocab), jax.nn.logsumexp(logits, axis=-1) - picked, jnp.nan)


def _in_range(tokens: Integer[Array, "B T"], vocab: int) -> Bool[Array, "B T"]:
    return (tokens >= 0) & (tokens < vocab)
