"""The decoder: against NumPy, against itself (cache, scan, remat, dtypes), and its errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.core import tree
from jaxlab.nn import layers as parts
from jaxlab.nn import transformer as tf
from tests.reference import transformer_np

BASE = tf.TransformerConfig(vocab=17, dim=16, layers=2, heads=4, kv_heads=2, ffn=24)
LENGTH = 9


def make(**changes):
    """A config, its parameters with non-trivial norm scales and a sharper attention, and tokens [2, T]."""
    config = dataclasses.replace(BASE, **changes)

    def sharpen(path, x):
        if path.endswith("scale"):
            return x * jnp.linspace(0.5, 1.5, x.shape[-1])
        return x * (3.0 if "attn" in path else 30.0 if "embed" in path and not config.tied else 1.0)

    params = tree.map_with_path(sharpen, tf.init(config, jax.random.key(1)))
    return config, params, jax.random.randint(jax.random.key(2), (2, LENGTH), 0, config.vocab)


@functools.cache
def forward(config):
    return jax.jit(functools.partial(tf.apply, config))


@functools.cache
def loss_and_grad(config):
    return jax.jit(jax.value_and_grad(functools.partial(tf.loss, config)))


def by_path(params):
    return dict(zip(tree.leaf_paths(params), jax.tree.leaves(params), strict=True))


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied": True}, {"kv_heads": 4}, {"kv_heads": 1, "heads": 8}, {"rope_base": 50.0, "norm_eps": 0.1}],
    ids=str,
)
def test_equals_numpy(changes):
    config, params, tokens = make(**changes)
    names = {"layers": params["layers"], "heads": config.heads, "kv_heads": config.kv_heads}
    want = np.stack(
        [
            transformer_np.forward(by_path(params), row, **names, eps=config.norm_eps, base=config.rope_base)
            for row in np.asarray(tokens)
        ]
    )
    got = forward(config)(params, tokens)
    assert got.dtype == jnp.float32
    assert np.abs(want).max() > (0.1 if config.tied else 0.5)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())

    nats = loss_and_grad(config)(params, tokens)[0]
    want_nats = [transformer_np.cross_entropy(x[:-1], row[1:]) for x, row in zip(want, np.asarray(tokens), strict=True)]
    np.testing.assert_allclose(nats, np.mean(want_nats), rtol=1e-5)


def test_large_vocabulary_gathers_and_gives_the_same(monkeypatch):
    config, params, tokens = make()
    one_hot = loss_and_grad(config)(params, tokens)
    monkeypatch.setattr(parts, "ONE_HOT_MAX_VOCAB", 1)
    gather = jax.jit(jax.value_and_grad(functools.partial(tf.loss, config)))(params, tokens)
    assert "gather" in str(jax.make_jaxpr(functools.partial(tf.loss, config))(params, tokens))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), one_hot, gather)


def test_causal():
    config, params, tokens = make()
    changed = tokens.at[:, 5].set((tokens[:, 5] + 1) % config.vocab)
    a, b = forward(config)(params, tokens), forward(config)(params, changed)
    np.testing.assert_array_equal(a[:, :5], b[:, :5])
    # Every position from the changed one on sees it.
    assert np.abs(a - b)[:, 5:].max(axis=(0, 2)).min() > 1e-3


def test_rope_depends_on_relative_position_only():
    rope = parts.rope_table(BASE, 12)
    q, k = jax.random.normal(jax.random.key(0), (2, BASE.head_dim))
    rows = [parts.rotate(jnp.broadcast_to(x, (1, 12, 1, BASE.head_dim)), rope)[0, :, 0] for x in (q, k)]
    scores = np.asarray(rows[0] @ rows[1].T)
    for lag in range(-11, 12):
        np.testing.assert_allclose(np.diag(scores, lag), np.diag(scores, lag)[0], atol=1e-5)
    assert np.ptp(scores) > 0.1
    np.testing.assert_allclose(np.linalg.norm(rows[0], axis=-1), np.linalg.norm(q), rtol=1e-5)


def test_gradient_equals_finite_differences():
    config, params, tokens = make()
    f = jax.jit(functools.partial(tf.loss, config))
    grads = loss_and_grad(config)(params, tokens)[1]
    paths, leaves = tree.leaf_paths(params), jax.tree.leaves(params)
    for i, path in enumerate(paths):
        # Along the gradient itself, so that the difference is far above fp32 rounding.
        g = jax.tree.leaves(grads)[i]
        norm = float(jnp.linalg.norm(g))
        assert norm > 1e-4, path
        step = 0.02 * g / norm

        def at(sign, i=i, step=step):
            moved = [*leaves[:i], leaves[i] + sign * step, *leaves[i + 1 :]]
            return float(f(jax.tree.unflatten(jax.tree.structure(params), moved), tokens))

        slope = (8 * (at(0.5) - at(-0.5)) - (at(1) - at(-1))) / 6 / 0.02
        np.testing.assert_allclose(slope, norm, rtol=2e-2, atol=2e-4, err_msg=path)


def unstack(config, params):
    names = [str(i) for i in range(config.layers)]
    return {**params, "layers": {n: jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i, n in enumerate(names)}}


@pytest.mark.parametrize(
    "changes",
    [
        {"scan_layers": True},
        {"remat": "full"},
        {"remat": "dots"},
        {"scan_layers": True, "remat": "full"},
        {"scan_layers": True, "remat": "dots"},
    ],
    ids=str,
)
def test_scan_and_remat_change_nothing(changes):
    config, params, tokens = make()
    other, other_params, _ = make(**changes)
    want = loss_and_grad(config)(params, tokens)
    value, grads = loss_and_grad(other)(other_params, tokens)
    if other.scan_layers:
        assert other_params["layers"]["attn"]["q"]["kernel"].shape == (2, 16, 16)
        other_params, grads = unstack(config, other_params), unstack(config, grads)
    # The same key gives the same initial values in both layouts.
    jax.tree.map(np.testing.assert_array_equal, params, other_params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), want, (value, grads))


def test_remat_recomputes():
    def flops(remat):
        config, params, tokens = make(remat=remat)
        return loss_and_grad(config).lower(params, tokens).compile().cost_analysis()["flops"]

    none, dots, full = (flops(remat) for remat in ("none", "dots", "full"))
    # "full" repeats the forward pass (a third on top); "dots" only what is not a weight matmul.
    assert 1.2 * none < full < 1.4 * none
    assert 1.01 * none < dots < 0.95 * full


def test_bfloat16_is_close_and_keeps_fp32_where_it_matters():
    config, params, tokens = make(dtype="bfloat16")
    got = forward(config)(params, tokens)
    want = forward(dataclasses.replace(config, dtype="float32"))(params, tokens)
    assert got.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert 1e-4 < error < 0.03
    assert {x.dtype for x in jax.tree.leaves(loss_and_grad(config)(params, tokens)[1])} == {jnp.dtype("float32")}
    text = str(jax.make_jaxpr(functools.partial(tf.apply, config))(params, tokens))
    assert "bf16" in text
    assert not [line for line in text.splitlines() if ("rsqrt" in line or " exp " in line) and "bf16" in line]


@pytest.mark.parametrize(
    ("preset", "count"), [("tiny", 164_160), ("small", 3_082_496), ("178m", 177_622_016), ("512m", 512_398_848)]
)
def test_preset_sizes(preset, count):
    assert tf.param_count(tf.PRESETS[preset]) == count


@pytest.mark.parametrize(
    ("options", "embedding"),
    [({}, 1.0), ({"tied": True}, 64**-0.5), ({"embedding_std": 0.3}, 0.3), ({"embedding_std": 0.3, "tied": True}, 0.3)],
    ids=str,
)
def test_initial_scales(options, embedding):
    """Standard deviations, within five of their own standard errors."""
    config = dataclasses.replace(tf.PRESETS["tiny"], **options)
    residual = (2 * config.layers) ** -0.5  # what each block adds starts small
    wanted = {"embedding": embedding, "o/kernel": residual * 64**-0.5, "down/kernel": residual * 256**-0.5}
    for path, leaf in by_path(tf.init(config, jax.random.key(0))).items():
        if path.endswith("scale"):
            assert np.all(leaf == 1)
            continue
        std = next((std for end, std in wanted.items() if path.endswith(end)), 64**-0.5)
        assert np.std(leaf) == pytest.approx(std, rel=5 * (2 * leaf.size) ** -0.5), path


@pytest.mark.parametrize("std", [0.0, -1.0, float("inf"), float("nan")])
def test_a_bad_embedding_std_is_refused(std):
    with pytest.raises(ValueError, match="embedding_std must be finite and > 0, or None, got"):
        dataclasses.replace(BASE, embedding_std=std)


def test_layer_names_sort_in_layer_order():
    shapes = jax.eval_shape(lambda: tf.init(dataclasses.replace(BASE, layers=12), jax.random.key(0)))
    assert sorted(shapes["layers"]) == [f"{i:02d}" for i in range(12)]
    assert list(tf.init(BASE, jax.random.key(0))["layers"]) == ["0", "1"]


@pytest.mark.parametrize("scan", [False, True])
def test_matrix_specs_name_every_leaf(scan):
    import re

    config = dataclasses.replace(BASE, scan_layers=scan)
    for path, leaf in by_path(tf.init(config, jax.random.key(0))).items():
        spec = next(v for pattern, v in tf.matrix_specs(config).items() if re.search(pattern, path))
        matches = {v for pattern, v in tf.matrix_specs(config).items() if re.fullmatch(pattern, path)}
        assert spec in matches
        if path.endswith("scale"):
            assert spec is None
        else:
            assert leaf.ndim - spec == 2, path


@pytest.mark.parametrize("scan", [False, True])
def test_cached_decoding_equals_the_full_pass(scan):
    config, params, tokens = make(scan_layers=scan)
    want = forward(config)(params, tokens)
    cache = tf.init_cache(config, batch=2, max_len=LENGTH)
    assert cache.k.shape == (2, 2, LENGTH, 2, 4)
    got = {}
    # A chunk, a chunk on top of it, then token by token.
    logits, cache = tf.prefill(config, params, cache, tokens[:, :3])
    got[2] = logits
    logits, cache = tf.prefill(config, params, cache, tokens[:, 3:5])
    got[4] = logits
    step = jax.jit(functools.partial(tf.decode_step, config))
    for t in range(5, LENGTH):
        got[t], cache = step(params, cache, tokens[:, t])
    assert int(cache.index) == LENGTH
    for t, logits in got.items():
        np.testing.assert_allclose(logits, want[:, t], atol=1e-5 * float(jnp.abs(want).max()), err_msg=str(t))

    with pytest.raises(ValueError, match=f"max_len={LENGTH} positions; {LENGTH} are filled and 1 more"):
        tf.decode_step(config, params, cache, tokens[:, 0])
    # Under jit the length is not known: loud values rather than an overwritten last position.
    assert np.isnan(step(params, cache, tokens[:, 0])[0]).all()


def test_generate_greedy_and_sampled():
    config, params, tokens = make()
    prompt, steps = tokens[:, :4], 5
    run = jax.jit(functools.partial(tf.generate, config), static_argnames=("steps", "temperature"))
    got = run(params, prompt, steps=steps, key=jax.random.key(0), temperature=0.0)
    # The full pass over a padded text: what follows a position does not reach it.
    text = jnp.pad(prompt, ((0, 0), (0, steps)))
    for t in range(4, 4 + steps):
        text = text.at[:, t].set(jnp.argmax(forward(config)(params, text)[:, t - 1], axis=-1))
    np.testing.assert_array_equal(got, text[:, 4:])

    many = jnp.tile(prompt[:1], (4000, 1))
    sampled = run(params, many, steps=1, key=jax.random.key(3), temperature=2.0)[:, 0]
    want = jax.nn.softmax(forward(config)(params, tokens)[0, 3] / 2.0)
    np.testing.assert_allclose(np.bincount(sampled, minlength=config.vocab) / 4000, want, atol=0.03)
    short, long = (run(params, prompt, steps=n, key=jax.random.key(5), temperature=1.0) for n in (2, 5))
    np.testing.assert_array_equal(short, long[:, :2])


def test_workers_on_a_leading_axis():
    """vmap over stacked parameters, first traced inside scan and jit: nothing leaks into the cached graph."""
    config, _, tokens = make(rope_base=123.0)
    stacked = jax.vmap(lambda key: tf.init(config, key))(jax.random.split(jax.random.key(0), 3))
    batch = jnp.stack([tokens, tokens[::-1], (tokens + 1) % config.vocab])
    value_and_grad = jax.value_and_grad(functools.partial(tf.loss, config))

    @jax.jit
    def train(params):
        def step(params, _):
            values, grads = jax.vmap(value_and_grad)(params, batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), values

        return jax.lax.scan(step, params, length=2)

    with jax.checking_leaks():
        final, values = train(stacked)
    for k in range(3):
        p = jax.tree.map(lambda x, k=k: x[k], stacked)
        for t in range(2):
            value, grads = loss_and_grad(config)(p, batch[k])
            np.testing.assert_allclose(values[t, k], value, rtol=1e-5)
            p = jax.tree.map(lambda p, g: p - 0.1 * g, p, grads)
        jax.tree.map(lambda a, b, k=k: np.testing.assert_allclose(a[k], b, atol=1e-5), final, p)


def test_module_round_trip():
    config, params, tokens = make()
    model = tf.to_module(config, params)
    np.testing.assert_allclose(jax.jit(lambda: model(tokens))(), forward(config)(params, tokens), atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, tf.to_params(model), params)


def test_learns_a_fixed_sequence():
    config = BASE
    params = tf.init(config, jax.random.key(0))
    tokens = jnp.arange(2 * LENGTH).reshape(2, LENGTH) * 5 % config.vocab
    start = float(loss_and_grad(config)(params, tokens)[0])
    assert abs(start - np.log(config.vocab)) < 1.0
    for _ in range(60):
        value, grads = loss_and_grad(config)(params, tokens)
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
    assert float(value) < 0.3 * start


@pytest.mark.parametrize("scan", [False, True])
def test_flops_agree_with_xla(scan):
    # Wide enough that matmuls dominate; XLA counts the body of a scan once, so one layer is used there.
    layers = 1 if scan else 2
    config = tf.TransformerConfig(vocab=2048, dim=128, layers=layers, heads=4, kv_heads=2, ffn=384, scan_layers=scan)
    batch, length = 2, 64
    params = jax.eval_shape(lambda: tf.init(config, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    cost = jax.jit(functools.partial(tf.apply, config)).lower(params, tokens).compile().cost_analysis()
    want = tf.flops_per_token(config, length) / 3 * batch * length
    assert want <= cost["flops"] <= 1.08 * want


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dim": 18}, "dim must be a multiple of heads, got dim=18, heads=4"),
        ({"dim": 12}, "dim / heads must be even"),
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads, got heads=4, kv_heads=3"),
        ({"layers": 0}, "layers must be >= 1, got 0"),
        ({"dtype": "float16"}, "dtype must be one of .*'float16'"),
        ({"remat": "some"}, "remat must be one of .*'some'"),
    ],
)
def test_bad_configs(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(BASE, **changes)


def test_bad_calls():
    config, params, tokens = make()
    with pytest.raises(TypeError, match="tokens"):
        tf.apply(config, params, tokens.astype(jnp.float32))
    with pytest.raises((ValueError, TypeError), match="tokens"):
        tf.apply(config, params, tokens[0])
    with pytest.raises(ValueError, match="at least 2 positions"):
        tf.loss(config, params, tokens[:, :1])
    with pytest.raises(ValueError, match=r"holds \['0', '1'\]; layers=3"):
        tf.apply(dataclasses.replace(config, layers=3), params, tokens)
    with pytest.raises(ValueError, match="needs one stacked block"):
        tf.apply(dataclasses.replace(config, scan_layers=True), params, tokens)
    cache = tf.init_cache(config, 2, 4)
    with pytest.raises(ValueError, match=r"max_len=4 positions; 0 are filled and 5 more"):
        tf.prefill(config, params, cache, tokens[:, :5])
    with pytest.raises(ValueError, match="cache's batch 2"):
        tf.prefill(config, params, cache, tokens[:1, :2])
    with pytest.raises(ValueError, match="max_len=0"):
        tf.init_cache(config, 2, 0)
    with pytest.raises(ValueError, match="steps=0"):
        tf.generate(config, params, tokens, 0, jax.random.key(0))


@pytest.mark.parametrize("bad", [-1, BASE.vocab])
@pytest.mark.parametrize("one_hot", [True, False])
def test_a_token_outside_the_vocabulary_is_loud(bad, one_hot, monkeypatch):
    monkeypatch.setattr(parts, "ONE_HOT_MAX_VOCAB", 1024 if one_hot else 1)
    config, params, tokens = make()
    # Compiled afresh: the cached functions know the other look-up.
    logits = jax.jit(lambda tokens: tf.apply(config, params, tokens))(tokens.at[0, 4].set(bad))
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()
    assert np.isnan(jax.jit(lambda tokens: tf.loss(config, params, tokens))(tokens.at[0, -1].set(bad)))


def test_byte_and_numpy_tokens():
    config, params, tokens = make()
    want = tf.loss(config, params, tokens)
    for dtype in (np.uint8, np.int64, np.int16):
        np.testing.assert_allclose(tf.loss(config, params, np.asarray(tokens).astype(dtype)), want, rtol=1e-6)
