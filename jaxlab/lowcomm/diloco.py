"""DiLoCo and local SGD: the outer optimizers that average pseudo-gradients, as plain optax transformations.

Fed with the mean pseudo-gradient d_t = mean_k (theta_t - theta_k) as if it were a gradient,

    local SGD / FedAvg:  theta_{t+1} = theta_t - eta d_t                       (eta = 1: the average of the workers)
    DiLoCo:              m_{t+1} = mu m_t + d_t
                         theta_{t+1} = theta_t - eta (d_t + mu m_{t+1})        (Nesterov)

"DiLoCo-SGD" is DiLoCo without momentum, `local_sgd(eta)`. Its update, theta + (eta/K) sum of task vectors, is task
arithmetic with scale eta/K, repeated every H steps.

Sources: DiLoCo (arXiv 2311.08105), algorithm 1 and table 5 (eta 0.7, mu 0.9); FedAvg (arXiv 1602.05629).
"""

import math
import numbers
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxlab.lowcomm import checks

ScalarOrSchedule = int | float | np.number | Float[Array | np.ndarray, ""] | optax.Schedule


def diloco(
    learning_rate: ScalarOrSchedule = 0.7, momentum: Any = 0.9, *, nesterov: bool = True
) -> optax.GradientTransformation:
    """DiLoCo's outer optimizer: `optax.sgd` with Nesterov momentum on the mean pseudo-gradient.

    Args:
      learning_rate: eta > 0, a number or a schedule of outer steps.
      momentum: mu in [0, 1). 0 needs `nesterov=False` and is DiLoCo-SGD.
      nesterov: Nesterov momentum, otherwise heavy ball.

    Returns:
      An `optax.GradientTransformation` for `LowComm(outer=...)`.

    Raises:
      ValueError: for eta <= 0, mu outside [0, 1), or Nesterov without momentum.
      TypeError: for what is neither a real scalar nor a schedule.

    Example:
      >>> import jax.numpy as jnp
      >>> outer = diloco(0.7, 0.9)
      >>> state = outer.init(jnp.zeros(1))
      >>> [round(float(outer.update(jnp.ones(1), state)[0][0]), 4)]
      [-1.33]
    """
    check_outer(learning_rate, momentum, nesterov)
    return optax.chain(momentum_trace(momentum, nesterov), optax.scale_by_learning_rate(learning_rate))


def local_sgd(learning_rate: ScalarOrSchedule = 1.0) -> optax.GradientTransformation:
    """Parameter averaging (eta = 1, FedAvg) or DiLoCo-SGD (another eta): no outer momentum.

    Args:
      learning_rate: eta > 0, a number or a schedule of outer steps.

    Raises:
      ValueError: for eta <= 0.

    Example:
      >>> import jax.numpy as jnp
      >>> outer = local_sgd(0.5)
      >>> outer.update(jnp.ones(2), outer.init(jnp.ones(2)))[0].tolist()
      [-0.5, -0.5]
    """
    check_outer(learning_rate, 0.0, False)
    return optax.scale_by_learning_rate(learning_rate)


def momentum_trace(momentum: Any, nesterov: bool) -> optax.GradientTransformation:
    """`optax.trace`, or nothing (and no state) for a momentum of exactly 0."""
    if isinstance(momentum, numbers.Real) and momentum == 0:
        return optax.identity()
    return optax.trace(decay=momentum, nesterov=nesterov)


def check_outer(learning_rate: Any, momentum: Any, nesterov: bool) -> None:
    """Checks outer hyper-parameters whose values are known; schedules and traced values pass.

    A jax array may be 0: `optax.inject_hyperparams` passes the current value of a schedule, and a warm-up starts there.
    """
    allowed = "a real number, a scalar array or a schedule"
    eta = None if callable(learning_rate) else checks.scalar("learning_rate", learning_rate, allowed)
    mu = None if callable(momentum) else checks.scalar("momentum", momentum, allowed)
    warm_up = eta == 0 and isinstance(learning_rate, jax.Array)
    if eta is not None and not (math.isfinite(eta) and (eta > 0 or warm_up)):
        raise ValueError(f"learning_rate must be finite and > 0, got {learning_rate}")
    if mu is not None and not 0 <= mu < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")
    if mu == 0 and nesterov and not isinstance(momentum, jax.Array):
        raise ValueError("nesterov=True needs momentum > 0, got 0; pass nesterov=False")
