"""IsoLoCo: "Can Model Merging Improve Aggregation in DiLoCo?" (arXiv 2607.03011).

Workers' pseudo-gradients are task vectors, and averaging them is task arithmetic. Merging them with Iso-C instead gives
every matrix the same singular value in all directions, so that directions only few workers agree on are not drowned:

    A   = mean_k (theta_t - theta_k)                       mean pseudo-gradient of a matrix, one all-reduce as in DiLoCo
    G   = Iso(A) = mean(sigma) U V^T,  A = U diag(sigma) V^T;   G = A for vectors and scalars
    m   <- mu m + G                                        momentum after isotropisation
    theta_{t+1} = theta_t - eta (G + mu m)                 Nesterov; mu = 0 is "DiLoCo-SGD + Iso-C"

No outer weight decay, schedule, clipping or bias correction; every 2-D leaf is isotropised, embedding and output matrix
included; worker AdamW states persist. Published settings: eta 1.8, mu 0.8; without momentum eta 2.1.

What is known and what is not: the abstract is public and so are the authors' program and sweep settings, from which
the rule above is taken; the tables are not. Differences here: Iso-C needs only the mean, so one all-reduce is enough
(not an all-gather); singular values at rounding level are set to zero rather than to the mean (`rtol`), which keeps
untouched embedding rows where they are and makes the result independent of the LAPACK build; leaves of rank >= 3 are
never averaged silently.
"""

from collections.abc import Callable
from typing import Any

import optax
from jaxtyping import PyTree

from jaxlab.lowcomm.diloco import ScalarOrSchedule, check_outer, momentum_trace
from jaxlab.lowcomm.isotropize import Method, Rtol, Specs, Steps, isotropize

ORDERS = ("gradient", "update")


def isoloco(
    learning_rate: ScalarOrSchedule = 1.8,
    momentum: Any = 0.8,
    *,
    nesterov: bool = True,
    order: str = "gradient",
    method: Method = "svd",
    rtol: Rtol = "auto",
    ns_steps: Steps = 12,
    specs: Specs = None,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
) -> optax.GradientTransformation:
    """IsoLoCo's outer optimizer, fed with the mean pseudo-gradient.

    Args:
      learning_rate: eta > 0, a number or a schedule of outer steps.
      momentum: mu in [0, 1). 0 needs `nesterov=False` and is DiLoCo-SGD + Iso-C.
      nesterov: Nesterov momentum, otherwise heavy ball.
      order: "gradient" isotropises the pseudo-gradient and then applies momentum (the paper's choice); "update" applies
        momentum first and isotropises the result (an outer Muon whose scale is the mean singular value).
      method, rtol, ns_steps, specs, mask: as in `isotropize`. With `LowComm(fragments=...)` the outer optimizer sees a
        flat dict path -> leaf a fragment, so `specs` and `mask` cannot be pytrees shaped like the parameters, and a
        pattern that matches in some fragments only is an error in the others: resolve patterns on the whole tree,
        `resolved = resolve_specs(params, patterns)`, and pass `specs=lambda path, leaf: resolved[path]`.

    Returns:
      An `optax.GradientTransformation` for `LowComm(outer=...)`, equal to
      `optax.chain(isotropize(), optax.sgd(eta, mu, nesterov=True))` for order "gradient".

    Raises:
      ValueError: for eta <= 0, mu outside [0, 1), Nesterov without momentum, or an unknown order.

    Example:
      >>> import jax.numpy as jnp
      >>> outer = isoloco(1.8, 0.8)
      >>> delta = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> update, _ = outer.update(delta, outer.init(delta))
      >>> [round(float(x), 2) for x in update.ravel()]
      [4.86, -8.1, -8.1, -4.86]
    """
    check_outer(learning_rate, momentum, nesterov)
    if order not in ORDERS:
        raise ValueError(f"order must be one of {ORDERS}, got {order!r}")
    merge = isotropize(method, rtol=rtol, ns_steps=ns_steps, specs=specs, mask=mask)
    parts = [merge, momentum_trace(momentum, nesterov)]
    if order == "update":
        parts.reverse()
    return optax.chain(*parts, optax.scale_by_learning_rate(learning_rate))
