"""Small scenes that the tests share."""

import jax.numpy as jnp
import numpy as np

from jaxlab.splat.gaussians import Camera, Gaussians, camera, look_at


def random_scene(n: int = 60, degree: int = 2, seed: int = 0, dtype=jnp.float32, spread: float = 1.0) -> Gaussians:
    """Overlapping Gaussians around the origin, some of them nearly opaque."""
    rng = np.random.default_rng(seed)
    coefficients = (degree + 1) ** 2
    parts = (
        rng.normal(size=(n, 3)) * spread,
        rng.normal(size=(n, 4)),
        rng.normal(size=(n, 3)) * 0.4 - 1.3,
        rng.normal(size=n) * 2 + 1,
        rng.normal(size=(n, 1, 3)),
        rng.normal(size=(n, coefficients - 1, 3)) * 0.3,
    )
    return Gaussians(*(jnp.asarray(x, dtype) for x in parts))


def ring(count: int, width: int = 50, height: int = 37, radius: float = 5.0, dtype=jnp.float32) -> list[Camera]:
    """Cameras around the origin, with pixels that are not square and a centre that is off."""
    found = []
    for i in range(count):
        angle = 2 * np.pi * i / count + 0.3
        view = look_at([radius * np.cos(angle), radius * np.sin(angle), 1.0 + 0.3 * i], [0.1, 0.0, 0.0])
        k = [[0.9 * width, 0, 0.45 * width], [0, 0.95 * width, 0.55 * height], [0, 0, 1]]
        found.append(camera(view, k, width, height, dtype=dtype))
    return found
