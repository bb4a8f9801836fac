"""A decoder-only language model: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

The model is a flax nnx module, `Transformer`. Training code does not touch it: it uses pure functions of a nested dict
of fp32 arrays, which `jax.jit`, `jax.vmap` over a leading worker axis, `jax.lax.scan`, optax and orbax take as it is:

    params = init(config, jax.random.key(0))
    nats = loss(config, params, tokens)             # tokens [B, T+1]
    logits = apply(config, params, tokens[:, :-1])  # [B, T, V]

Layout of the tree (every weight is a matrix, `(in, out)`):

    embed/embedding (V, d)   layers/0/attn/{q,k,v,o}/kernel       layers/0/attn_norm/scale (d,)
    head/kernel (d, V)       layers/0/mlp/{gate,up,down}/kernel   layers/0/mlp_norm/scale (d,)
                                                                  final_norm/scale (d,)

Layer names are padded with zeros (`layers/00` ... `layers/11`), so that sorted order is layer order; with `scan_layers`
there is one `layers/attn/q/kernel` of shape (L, in, out). A tied model has no `head`.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Integer, Key

from jaxlab.core import tree
from jaxlab.nn import layers as L

Params = dict[str, Any]
Tokens = Integer[Array | np.ndarray, "B T"]

REMAT = ("none", "dots", "full")
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes and numerics of a `Transformer`; hashable, so it can be a static argument of `jax.jit`.

    Attributes:
      vocab: number of tokens V.
      dim: width d of the residual stream.
      layers: number of blocks L.
      heads: query heads; the head size is dim / heads, which must be even.
      kv_heads: key/value heads, each shared by heads / kv_heads query heads.
      ffn: hidden width of the SwiGLU.
      tied: use the embedding as the output matrix.
      embedding_std: standard deviation of the initial embedding; None for 1, or dim^-0.5 when tied.
      dtype: matmul dtype, "float32" or "bfloat16"; parameters, norms, softmax, logits and loss are always fp32.
      remat: what the backward pass recomputes: "none", "dots" (all but the matmul results) or "full" (every block).
      scan_layers: stack the layers on a leading axis and scan over them (compile time independent of L).
      rope_base: base of the rotary frequencies.
      norm_eps: added to the mean square in RMSNorm.

    Raises:
      ValueError: for sizes that do not divide, or a name that is not allowed.
    """

    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    tied: bool = False
    embedding_std: float | int | None = None
    dtype: str = "float32"
    remat: str = "none"
    scan_layers: bool = False
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6

    def __post_init__(self):
        for name in ("vocab", "dim", "layers", "heads", "kv_heads", "ffn"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.dim % self.heads:
            raise ValueError(f"dim must be a multiple of heads, got dim={self.dim}, heads={self.heads}")
        if self.head_dim % 2:
            raise ValueError(
                f"dim / heads must be even (rotary pairs), got {self.dim} / {self.heads} = {self.head_dim}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got heads={self.heads}, kv_heads={self.kv_heads}")
        if self.embedding_std is not None and not 0.0 < self.embedding_std < math.inf:
            raise ValueError(f"embedding_std must be finite and > 0, or None, got {self.embedding_std}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {DTYPES}, got {self.dtype!r}")
        if self.remat not in REMAT:
            raise ValueError(f"remat must be one of {REMAT}, got {self.remat!r}")

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.dim // self.heads


PRESETS: dict[str, TransformerConfig] = {
    "tiny": TransformerConfig(vocab=256, dim=64, layers=2, heads=2, kv_heads=2, ffn=256),
    "small": TransformerConfig(vocab=256, dim=256, layers=4, heads=4, kv_heads=2, ffn=704),
    "120m": TransformerConfig(
        vocab=32_000, dim=768, layers=10, heads=12, kv_heads=12, ffn=2048, dtype="bfloat16", scan_layers=True
    ),
    "178m": TransformerConfig(
        vocab=32_000, dim=1024, layers=9, heads=8, kv_heads=8, ffn=2688, dtype="bfloat16", scan_layers=True
    ),
    "512m": TransformerConfig(
        vocab=32_000, dim=1536, layers=12, heads=12, kv_heads=12, ffn=5440, dtype="bfloat16", scan_layers=True
    ),
    "1b": TransformerConfig(
        vocab=32_000, dim=2048, layers=22, heads=32, kv_heads=4, ffn=5632, dtype="bfloat16", scan_layers=True
    ),
}


class Transformer(nnx.Module):
    """The decoder as an nnx module: `Transformer(config, nnx.Rngs(0))(tokens)` gives fp32 logits [B, T, V]."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        self.config = config
        std = config.embedding_std
        if std is None:
            std = config.dim**-0.5 if config.tied else 1.0  # a tied embedding is the output matrix as well
        self.embed = L.Embed(config.vocab, config.dim, std, jnp.dtype(config.dtype), rngs)
        blocks = [L.Block(config, rngs) for _ in range(config.layers)]
        if config.scan_layers:
            graphdefs, states = zip(*(nnx.split(block) for block in blocks), strict=True)
            self.layers = nnx.merge(graphdefs[0], jax.tree.map(lambda *x: jnp.stack(x), *states))
        else:
            self.layers = nnx.List(blocks)
        self.final_norm = L.RMSNorm(config.dim, config.norm_eps)
        if not config.tied:
            self.head = L.Linear(config.dim, config.vocab, config.dim**-0.5, jnp.dtype(config.dtype), rngs)

    def hidden(self, tokens: Tokens, cache: L.Cache | None = None) -> tuple[Float[Array, "B T d"], L.Cache | None]:
        """The normalised residual stream after the last block, and the cache with these tokens appended."""
        rope = L.rope_table(self.config, tokens.shape[1], cache)

        def block(graphdef, state, x, layer, cache):
            return nnx.merge(graphdef, state)(x, rope, layer, cache)

        if self.config.remat != "none":
            dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            policy = dots if self.config.remat == "dots" else None
            # Recomputing inside a scan needs no barrier against common-subexpression elimination; a plain loop does.
            block = jax.checkpoint(block, policy=policy, static_argnums=(0,), prevent_cse=not self.config.scan_layers)

        x = self.embed(tokens)
        if self.config.scan_layers:
            graphdef, stacked = nnx.split(self.layers)

            def body(carry, layer_state):
                return block(graphdef, layer_state[1], carry[0], layer_state[0], carry[1]), None

            (x, cache), _ = jax.lax.scan(body, (x, cache), (jnp.arange(self.config.layers), stacked))
        else:
            for layer, module in enumerate(self.layers):
                x, cache = block(*nnx.split(module), x, layer, cache)
        return self.final_norm(x), None if cache is None else cache._replace(index=cache.index + tokens.shape[1])

    def logits(self, hidden: Float[Array, "B T d"]) -> Float[Array, "B T V"]:
        """fp32 scores over the vocabulary."""
        kernel = self.embed.embedding[...].T if self.config.tied else self.head.kernel[...]
        return L.matmul(hidden, kernel, jnp.dtype(self.config.dtype), jnp.dtype(jnp.float32))

    def __call__(self, tokens: Tokens) -> Float[Array, "B T V"]:
        return self.logits(self.hidden(tokens)[0])


@functools.cache
def _graphdef(config: TransformerConfig) -> nnx.GraphDef:
    # Abstract evaluation makes no arrays, so the cached value holds no tracer, whatever trace asked for it first.
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))), nnx.Param)[0]


def _layer_names(config: TransformerConfig) -> list[str]:
    width = len(str(config.layers - 1))
    return [] if config.scan_layers else [f"{i:0{width}d}" for i in range(config.layers)]


def to_params(model: Transformer) -> Params:
    """The parameters of a module as the pure nested dict that `init` returns."""
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    if names := _layer_names(model.config):
        params["layers"] = {names[i]: block for i, block in params["layers"].items()}
    return params


def to_module(config: TransformerConfig, params: Params) -> Transformer:
    """The module that holds `params`; cheap enough to call inside a traced function.

    Raises:
      ValueError: when `params["layers"]` was made for another `layers` or `scan_layers`.
    """
    found, names = sorted(params["layers"]), _layer_names(config)
    if found != sorted(names or ("attn", "attn_norm", "mlp", "mlp_norm")):
        raise ValueError(
            f"params['layers'] holds {found}; layers={config.layers}, scan_layers={config.scan_layers} needs"
            f" {names or 'one stacked block'}"
        )
    if names:
        params = {**params, "layers": {i: params["layers"][name] for i, name in enumerate(names)}}
    return nnx.merge(_graphdef(config), params)


def init(config: TransformerConfig, key: Key[Array, ""]) -> Params:
    """Random parameters as a nested dict of fp32 arrays.

    >>> params = init(PRESETS["tiny"], jax.random.key(0))
    >>> params["layers"]["0"]["attn"]["q"]["kernel"].shape
    (64, 64)
    """
    return to_params(Transformer(config, nnx.Rngs(key)))


def _check_tokens(tokens: Any, name: str = "tokens") -> None:
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {tokens.dtype}")
    if tokens.ndim != 2:
        raise ValueError(f"{name} must have shape [batch, time], got {tokens.shape}")


def apply(config: TransformerConfig, params: Params, tokens: Tokens) -> Float[Array, "B T V"]:
    """Logits of the next token at every position.

    A token outside `[0, vocab)` makes the logits of its whole sequence NaN (a traced function cannot raise), so that
    the training loop stops instead of learning from wrong data.

    Args:
      config: static.
      params: from `init`.
      tokens: [B, T] integers of any width.

    Returns:
      [B, T, V] fp32 logits; position t depends on the tokens up to t only.

    Raises:
      TypeError: when the tokens are not integers.
      ValueError: when they are not [B, T], or `params` belongs to another config.

    >>> config = PRESETS["tiny"]
    >>> jax.jit(apply, static_argnums=0)(config, init(config, jax.random.key(0)), jnp.zeros((2, 5), jnp.int32)).shape
    (2, 5, 256)
    """
    _check_tokens(tokens)
    return to_module(config, params)(tokens)


def loss(config: TransformerConfig, params: Params, tokens: Integer[Array | np.ndarray, "B S"]) -> Float[Array, ""]:
    """Mean cross entropy of the next token: `mean_{b,t} -log softmax(apply(tokens[:, :-1]))[tokens[:, 1:]]`.

    Args:
      config: static.
      params: from `init`.
      tokens: [B, S] integers, S = T + 1 >= 2.

    Returns:
      Nats a token, fp32; NaN when any token is outside `[0, vocab)`.

    Raises:
      TypeError: when the tokens are not integers.
      ValueError: when they are not [B, S] with S >= 2.

    >>> config = PRESETS["tiny"]
    >>> jax.jit(loss, static_argnums=0)(config, init(config, jax.random.key(0)), jnp.zeros((2, 5), jnp.int32)).shape
    ()
    """
    _check_tokens(tokens)
    if tokens.shape[1] < 2:
        raise ValueError(f"tokens must hold at least 2 positions (input and target), got shape {tokens.shape}")
    return jnp.mean(L.cross_entropy(apply(config, params, tokens[:, :-1]), tokens[:, 1:]))


def init_cache(config: TransformerConfig, batch: int, max_len: int) -> L.Cache:
    """An empty key/value cache for `max_len` positions, in the compute dtype.

    Args:
      config: static.
      batch: number of sequences B.
      max_len: most positions the cache can hold.

    Returns:
      `Cache` with k, v [L, B, max_len, kv_heads, head_dim] and `index` 0.

    Raises:
      ValueError: when `batch` or `max_len` is below 1.

    >>> init_cache(PRESETS["tiny"], batch=1, max_len=8).k.shape
    (2, 1, 8, 2, 32)
    """
    if batch < 1 or max_len < 1:
        raise ValueError(f"batch and max_len must be >= 1, got batch={batch}, max_len={max_len}")
    shape = (config.layers, batch, max_len, config.kv_heads, config.head_dim)
    k, v = (jnp.zeros(shape, config.dtype) for _ in range(2))
    return L.Cache(k, v, jnp.zeros((), jnp.int32))


def prefill(
    config: TransformerConfig, params: Params, cache: L.Cache, tokens: Tokens
) -> tuple[Float[Array, "B V"], L.Cache]:
    """Appends `tokens` to the cache and gives the logits after the last of them.

    The cache may already hold positions: `prefill(a)` then `prefill(b)` equals `prefill(ab)`.

    Args:
      config: static.
      params: from `init`.
      cache: from `init_cache` or an earlier call.
      tokens: [B, T] integers; the B of the cache.

    Returns:
      fp32 logits [B, V] of the token that follows, and the longer cache.

    Raises:
      ValueError: when the positions do not fit into the cache. Inside `jax.jit` the filled length is not known, and
        the logits are NaN instead.
    """
    _check_tokens(tokens)
    length, (_, batch, max_len, _, _) = tokens.shape[1], cache.k.shape
    if tokens.shape[0] != batch:
        raise ValueError(f"tokens must have the cache's batch {batch}, got shape {tokens.shape}")
    filled = 0 if isinstance(cache.index, jax.core.Tracer) else int(cache.index)
    if filled + length > max_len:
        raise ValueError(f"the cache holds max_len={max_len} positions; {filled} are filled and {length} more came")
    model = to_module(config, params)
    hidden, new = model.hidden(tokens, cache)
    logits = model.logits(hidden[:, -1:])[:, 0]
    return jnp.where(cache.index + length <= max_len, logits, jnp.nan), new


def decode_step(
    config: TransformerConfig, params: Params, cache: L.Cache, token: Integer[Array | np.ndarray, " B"]
) -> tuple[Float[Array, "B V"], L.Cache]:
    """`prefill` of one token a sequence: fp32 logits [B, V] of the next token, and the longer cache."""
    return prefill(config, params, cache, token[:, None])


def generate(
    config: TransformerConfig,
    params: Params,
    prompt: Tokens,
    steps: int,
    key: Key[Array, ""],
    temperature: float = 1.0,
) -> Integer[Array, "B steps"]:
    """Samples `steps` tokens after `prompt`, one at a time: `softmax(logits / temperature)`; 0 takes the largest logit.

    Args:
      config: static.
      params: from `init`.
      prompt: [B, T] integers, T >= 1.
      steps: number of tokens to add; static.
      key: typed key; token i uses `fold_in(key, i)`, so a longer run begins with the shorter one.
      temperature: >= 0; static.

    Returns:
      The new tokens [B, steps], int32, without the prompt.

    Raises:
      ValueError: for an empty prompt, `steps` below 1 or a negative temperature.
    """
    _check_tokens(prompt, "prompt")
    if prompt.shape[1] < 1 or steps < 1 or temperature < 0:
        raise ValueError(
            "need a prompt of at least 1 token, steps >= 1 and temperature >= 0; "
            f"got prompt {prompt.shape}, steps={steps}, temperature={temperature}"
        )

    def sample(logits: Array, i: int | Array) -> Array:
        if temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return jax.random.categorical(jax.random.fold_in(key, i), logits / temperature).astype(jnp.int32)

    def body(carry: tuple[L.Cache, Array], i: Array) -> tuple[tuple[L.Cache, Array], Array]:
        logits, cache = decode_step(config, params, *carry)
        token = sample(logits, i)
        return (cache, token), token

    cache = init_cache(config, prompt.shape[0], prompt.shape[1] + steps - 1)
    logits, cache = prefill(config, params, cache, prompt)
    first = sample(logits, 0)
    _, rest = jax.lax.scan(body, (cache, first), jnp.arange(1, steps))
    return jnp.concatenate([first[:, None], rest.T], axis=1)


def param_count(config: TransformerConfig) -> int:
    """Number of parameters, without allocating them.

    >>> param_count(PRESETS["tiny"])
    164160
    """
    return tree.size(jax.eval_shape(lambda: init(config, jax.random.key(0))))


def matrix_specs(config: TransformerConfig) -> dict[str, int | None]:
    """Which leaves are matrices: path regex -> number of leading stack axes, or None for "not a matrix".

    >>> matrix_specs(PRESETS["tiny"])
    {'^.*/(kernel|embedding)$': 0, '^.*/scale$': None}
    """
    stacked = {r"^layers/.*/kernel$": 1} if config.scan_layers else {}
    return {**stacked, r"^.*/(kernel|embedding)$": 0, r"^.*/scale$": None}


def flops_per_token(config: TransformerConfig, seq_len: int) -> float:
    """Matmul FLOPs of a forward and backward pass, a token.

    `6 * (matmul parameters) + 12 * L * T * d`: a multiply-add counts 2, the backward pass twice the forward pass. The
    output matrix counts (tied or not), the embedding look-up does not, and attention counts all T x T scores because
    that is what is computed; recomputation by `remat` does not count.
    """
    c = config
    block = 2 * c.dim * c.dim + 2 * c.dim * c.kv_heads * c.head_dim + 3 * c.dim * c.ffn
    return float(6 * (c.layers * block + c.dim * c.vocab) + 12 * c.layers * seq_len * c.dim)
