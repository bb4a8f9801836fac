"""The fused steps, by the implementation for the device: XLA on CPUs, a Pallas kernel on GPUs and TPUs.

    p, mu, nu = adamw(p, g, mu, nu, hyper, seed=0, leaves=(1, 2), count=count)

updates one leaf and its packed states in one pass. `jaxlab.optim.fused` makes optimizers for whole trees of them.
"""

import importlib
from types import ModuleType
from typing import Any

import jax
from jaxtyping import Array, Float, Shaped

from jaxlab.kernels.bred_update import steps
from jaxlab.kernels.bred_update.codec import QTensor
from jaxlab.kernels.bred_update.reference import Word

# Name -> (module, the backend that runs it; None for every one).
IMPLEMENTATIONS: dict[str, tuple[str, str | None]] = {
    "xla": ("reference", None),
    "pallas_tpu": ("pallas_tpu", "tpu"),
    "pallas_gpu": ("pallas_gpu", "gpu"),
}


def check_implementation(name: str | None, *, interpret: bool = False) -> str:
    """The implementation of a name, None for that of the default backend.

    Args:
      name: None, "xla", "pallas_tpu" or "pallas_gpu".
      interpret: whether a Pallas kernel is to run as XLA operations, on any device.

    Raises:
      ValueError: for another name, for one that cannot run here, and for `interpret` without a Pallas kernel.

    >>> check_implementation("pallas_tpu", interpret=True)
    'pallas_tpu'
    """
    backend = jax.default_backend()
    if name is None:
        name = next((x for x, (_, needed) in IMPLEMENTATIONS.items() if needed == backend), "xla")
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {tuple(IMPLEMENTATIONS)}, got {name!r}")
    needed = IMPLEMENTATIONS[name][1]
    if interpret and needed is None:
        raise ValueError(f"interpret=True is for the Pallas kernels, and implementation={name!r} is none of them")
    if needed not in (None, backend) and not interpret:
        raise ValueError(
            f"implementation={name!r} runs on a {needed.upper()}, but the default backend is {backend!r}; "
            "interpret=True runs the kernel as XLA operations, implementation='xla' is the same step without it"
        )
    return name


def _module(name: str | None, interpret: bool) -> tuple[ModuleType, dict[str, Any]]:
    """The module, imported when it is first needed, and the arguments that only it takes."""
    module, needed = IMPLEMENTATIONS[check_implementation(name, interpret=interpret)]
    found = importlib.import_module(f"jaxlab.kernels.bred_update.{module}")
    return found, {} if needed is None else {"interpret": interpret}


def adamw(
    p: Shaped[Array, "*s"],
    g: Shaped[Array, "*t"],
    mu: QTensor,
    nu: QTensor,
    hyper: steps.Hyper,
    *,
    seed: Word,
    leaves: tuple[Word, Word],
    count: Word,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "*s"], QTensor, QTensor]:
    """One step of AdamW on one leaf: the formula of `steps.adamw` on every block.

    Args:
      p: parameters; with the states donated to `jax.jit`, they are updated in place.
      g: gradient, of the same shape.
      mu, nu: the averages, encoded at `count`, with one block size.
      hyper: scalars of the step.
      seed: of the dithers.
      leaves: the 32-bit words of mu and nu.
      count: steps done before this one.
      implementation: None for that of the default backend, "xla", "pallas_tpu" or "pallas_gpu".
      interpret: whether to run a Pallas kernel as XLA operations, on any device.

    Returns:
      `(p, mu, nu)`, the averages encoded at `count + 1`.

    Raises:
      TypeError: for dtypes that the implementation does not take.
      ValueError: for states of other shapes, or of two block sizes; for an implementation that cannot run here.
    """
    module, extra = _module(implementation, interpret)
    return module.adamw(p, g, mu, nu, hyper, seed=seed, leaves=leaves, count=count, **extra)


def lion(
    p: Shaped[Array, "*s"],
    g: Shaped[Array, "*t"],
    mu: QTensor,
    hyper: steps.Hyper,
    *,
    seed: Word,
    leaf: Word,
    count: Word,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "*s"], QTensor]:
    """One step of Lion on one leaf, by the formula of `steps.lion`; otherwise as `adamw`."""
    module, extra = _module(implementation, interpret)
    return module.lion(p, g, mu, hyper, seed=seed, leaf=leaf, count=count, **extra)


def sgdm(
    p: Shaped[Array, "*s"],
    g: Shaped[Array, "*t"],
    trace: QTensor,
    hyper: steps.Hyper,
    *,
    seed: Word,
    leaf: Word,
    count: Word,
    nesterov: bool = False,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "*s"], QTensor]:
    """One step of SGD with momentum on one leaf, by the formula of `steps.sgdm`; otherwise as `adamw`."""
    module, extra = _module(implementation, interpret)
    return module.sgdm(p, g, trace, hyper, seed=seed, leaf=leaf, count=count, nesterov=nesterov, **extra)
