"""A tiny model, and every method with its number of trained numbers: what the tests of `peft` share."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab import peft

KEY = jax.random.key(0)
N, M = 8, 16  # sizes of the model's kernels: N x M, then M x N
X = jax.random.normal(jax.random.key(1), (6, N))
PARAMS = {
    "in": {"kernel": jax.random.normal(jax.random.key(2), (N, M)) / N**0.5, "bias": jnp.linspace(-1, 1, M)},
    "out": {"kernel": jax.random.normal(jax.random.key(3), (M, N)) / M**0.5, "bias": jnp.linspace(1, -1, N)},
}
# What is trained for a kernel of n inputs and m outputs, from the papers' formulas, written out for these settings.
METHODS: dict[str, tuple[peft.Method, Any]] = {
    "lora": (peft.LoRA(2, alpha=4), lambda n, m: 2 * (n + m)),
    "rslora": (peft.LoRA(4, alpha=4, rs=True), lambda n, m: 4 * (n + m)),
    "lora_fa": (peft.LoRAFA(3), lambda n, m: 3 * m),
    "vera": (peft.VeRA(5), lambda n, m: 5 + m),
    "dora": (peft.DoRA(2, alpha=3), lambda n, m: 2 * (n + m) + m),
    "pissa": (peft.PiSSA(3, alpha=6), lambda n, m: 3 * (n + m)),
    "pissa_fast": (peft.PiSSA(2, power=2), lambda n, m: 2 * (n + m)),
    "milora": (peft.MiLoRA(3), lambda n, m: 3 * (n + m)),
    "adalora": (peft.AdaLoRA(3, alpha=6), lambda n, m: 3 * (n + m + 1)),
    "oft": (peft.OFT(4), lambda n, m: n // 4 * 6),
    "oft_expm": (peft.OFT(2, orth="expm"), lambda n, m: n // 2),
    "boft": (peft.BOFT(4, butterflies=2), lambda n, m: 2 * (n // 4) * 6 + m),
    "cora": (peft.CORA(4), lambda n, m: m * 3 // 2 + 4),
    "cora_expm": (peft.CORA(4, orth="expm"), lambda n, m: m * 3 // 2 + 4),
    "cora_slice": (peft.CORA(4, basis="slice"), lambda n, m: m * 3 // 2 + 4),
    "cora_ragged": (peft.CORA(3), lambda n, m: -(-m // 3) * 3 + 3),
    "diablo": (peft.DiaBlo(4), lambda n, m: n * m // 4),
    "diablo_ragged": (peft.DiaBlo(3), lambda n, m: 3 * -(-n // 3) * -(-m // 3)),
    "swift": (peft.SWIFT(4), lambda n, m: n * m // 4),
    "swift_local": (peft.SWIFT(4, perm="butterfly", mode="local+routed"), lambda n, m: n * m // 4),
    "swift_input": (peft.SWIFT(2, placement="input", perm="random", seed=1), lambda n, m: n * m // 2),
    "swift_ragged": (peft.SWIFT(3), lambda n, m: 3 * -(-n // 3) * -(-m // 3)),
    "shira": (peft.SHiRA(1), lambda n, m: n + m),
    "full": (peft.Full(), lambda n, m: n * m),
}


def f(params: Any, x: Any) -> Any:
    """A network of two layers with a residual."""
    h = jnp.tanh(x @ params["in"]["kernel"] + params["in"]["bias"])
    return x + h @ params["out"]["kernel"] + params["out"]["bias"]


# Other settings of methods that are in the table already: the slow tests' part of it.
VARIANTS = {
    *("rslora", "pissa_fast", "oft_expm", "cora_expm", "cora_ragged"),
    *("diablo_ragged", "swift_local", "swift_input", "swift_ragged"),
}


def start(method: peft.Method, params: Any = PARAMS, **axes: Any) -> peft.Adapters:
    """Adapters of all kernels, as they are before the first step."""
    spec = peft.match(params, [peft.Rule("kernel", method, **axes)])
    if params is PARAMS:
        return _started(spec)
    return jax.jit(peft.init, static_argnums=2)(KEY, params, spec)


@functools.cache
def _started(spec: peft.Spec) -> peft.Adapters:
    return jax.jit(peft.init, static_argnums=2)(KEY, PARAMS, spec)


def trained(state: peft.Adapters, size: float = 0.2, seed: int = 7) -> peft.Adapters:
    """The adapters with noise on everything that is trained, as if after some steps."""
    leaves, structure = jax.tree.flatten(state.trainable)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [x + size * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    return state.replace(trainable=jax.tree.unflatten(structure, moved))


def close(a: Any, b: Any, atol: float = 1e-5) -> None:
    """Asserts that two trees are equal up to `atol`."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-5, atol=atol)


def distance(a: Any, b: Any) -> float:
    """The largest difference of two trees of arrays."""
    return max(float(jnp.abs(x - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
