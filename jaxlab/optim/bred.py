"""Block Replay Dithering (BReD): optimizer states in 4 and 3 bits.

Paper: "BReD" (workshop abstract, openreview ATXhZIy5PM; a longer abstract followed). An optimizer's average
m <- b m + (1 - b) g is decoded, updated and encoded again at every step, and so are its rounding errors e averaged:
delta <- b (delta + e). A bias c of e becomes c / (1 - b), a variance s^2 becomes s^2 / (1 - b^2): at b = 0.999 a
thousand and five hundred times as much. Nearest rounding has a bias, stochastic rounding twice the variance that is
possible.

Subtractive dithering has neither. With L = 2^bits - 1 steps on [-s, s], s = max|x| of a block of B elements, and one
number u, uniform in [-1/2, 1/2), a block:

    k = floor(x L / (2 s) + L/2 + u + 1/2)                    what is stored, in `bits` bits
    xhat = (clip(k - u, 0, L) - L/2) 2 s / L                  the same u again: the replay

the error is uniform over a step, Delta = 2 s / L, independent of x: no bias, variance Delta^2 / 12. The number u of a
block is a hash of (seed, name of the leaf, count of updates, index of the block): it is computed again, never stored.
Second moments are quantised as r = sqrt(v) on [0, s]; E rhat^2 = r^2 + Delta^2 / 12 exactly, so the decoder subtracts
that, and floors at (Delta / 2)^2, because a second moment of zero divides by epsilon.

What is reconstructed, and why: the paper's abstract gives the dither a block, the replay and the O(d / B) random
numbers. The saturating `clip` in the decoder is ours: without it a decoded maximum can exceed s, the next scale grows
with it, and for b > L / (L + 1) the state can grow without bound (it does, at b = 0.999). Square roots with debiasing
and floor, blocks along the last axis (they follow the sharding of the parameter, and embedding rows share no scale),
and the selection rule (`jaxlab.optim.selection`) are ours too.

When not to use it: where the gradients' mean dominates their noise, an average hardly moves, and nearest rounding has
the smaller error (`QuantSpec(rounding="nearest")`): dither moves the lattice under a state that stands still.

    tx = bred.quantize_state(optax.adamw(3e-4))        # any optax transformation
    tx = bred.adamw(3e-4)                              # the same
    opt = bred.fused.adamw(3e-4)                       # params, state = opt.step(params, grads, state)

Sources: Wannamaker, Lipshitz, Vanderkooy, Wright, "A theory of non-subtractive dither" (IEEE Trans. Signal Proc. 2000)
for the error statistics; Schuchman (1964) for the condition under which the error is independent of the signal.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import optax
from optax import contrib

from jaxlab.kernels.bred_update import codec
from jaxlab.kernels.bred_update.codec import QTensor, QuantSpec, decode, dither, encode, is_quantized, leaf_id
from jaxlab.kernels.bred_update.numerics import pack, unpack
from jaxlab.optim import fused
from jaxlab.optim.quantize import (
    QuantizedState,
    StateBytes,
    Summary,
    check_metadata,
    dequantize,
    metadata,
    quantize_state,
    state_bytes,
    state_sharding,
    summary,
)
from jaxlab.optim.selection import StateLeaf, default_select

__all__ = [
    "QTensor",
    "QuantSpec",
    "QuantizedState",
    "StateBytes",
    "StateLeaf",
    "Summary",
    "adafactor",
    "adamw",
    "check_metadata",
    "codec",
    "decode",
    "default_select",
    "dequantize",
    "dither",
    "encode",
    "fused",
    "is_quantized",
    "leaf_id",
    "lion",
    "metadata",
    "muon",
    "pack",
    "quantize_state",
    "sgd",
    "state_bytes",
    "state_sharding",
    "summary",
    "unpack",
]


def _alias(make: Callable[..., optax.GradientTransformation], name: str, note: str) -> Callable[..., Any]:
    """An optax optimizer whose state is quantised: its own signature, plus `spec`, `seed` and `select`."""
    signature = inspect.signature(make)
    keyword = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY, default=None)
    extra = [keyword("spec"), keyword("seed"), keyword("select")]
    own = list(signature.parameters.values())
    if own and own[-1].kind is inspect.Parameter.VAR_KEYWORD:
        own, extra = own[:-1], [*extra, own[-1]]

    def build(
        *args: Any, spec: QuantSpec | None = None, seed: int | None = None, select: Any = None, **kwargs: Any
    ) -> optax.GradientTransformationExtraArgs:
        # A seed that is None by default is no number that `inject_hyperparams` would turn into an array.
        return quantize_state(make(*args, **kwargs), spec, seed=0 if seed is None else seed, select=select)

    build.__name__ = build.__qualname__ = name
    build.__signature__ = signature.replace(parameters=[*own, *extra])  # type: ignore[attr-defined]
    build.__doc__ = (
        f"`quantize_state(optax's {make.__name__}(...), spec, seed=seed, select=select)`.\n\n{note}\n\n"
        "Args:\n  Those of optax, and spec, seed, select: as in `quantize_state`.\n\n"
        "Returns:\n  A gradient transformation.\n"
    )
    return build


adamw = _alias(optax.adamw, "adamw", "Both moments are quantised, the second as a square root.")
lion = _alias(optax.lion, "lion", "The one average is quantised; its sign is all that an update takes of it.")
sgd = _alias(optax.sgd, "sgd", "With `momentum`; without there is no state.")
muon = _alias(contrib.muon, "muon", "The momentum of matrices, and both moments of the parameters that AdamW trains.")
adafactor = _alias(
    optax.adafactor, "adafactor", "Factored moments are small and mostly exempt; those of vectors and `momentum` count."
)
