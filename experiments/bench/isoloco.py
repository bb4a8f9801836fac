"""How fast a round of IsoLoCo is: against the same mathematics written by hand, against DrJAX, and against the machine.

Random tokens of the configured sizes, one process, all programs in turn (`core.timing`), on one device; on a shared
machine only ratios mean anything. Set `OPENBLAS_NUM_THREADS=1`: LAPACK's own threads slow down small singular value
decompositions. A CPU is one device to JAX, and a round leaves part of its cores idle; with
`JAX_NUM_CPU_DEVICES=<cores>` the table gains a row for the workers spread over as many devices.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jaxtyping import Array, PyTree
from ml_collections import ConfigDict

from jaxlab import lowcomm
from jaxlab.core import config as configs
from jaxlab.core import errors, mesh, prng, timing, tree
from jaxlab.core.report import Table
from jaxlab.data import per_worker_batch
from jaxlab.experiments import isoloco, lm
from jaxlab.lowcomm.isotropize import METHODS
from jaxlab.nn import transformer

REPEATS = 7  # timed rounds of each program
OUTER_REPEATS = 15  # timed outer steps
ROUNDS = 2  # before the parameters of two programs are compared
TOLERANCE = 1e-5  # of their largest difference
MAP_TOLERANCE = 1e-4  # products of other shapes round differently, and AdamW divides by small numbers
H_TARGET = 30  # inner steps for which the share of the outer step is stated
OURS, MESH, DP = "LowComm.round", "LowComm.round on a mesh", "DataParallel.round"
HAND, DRJAX, MAP = "hand-written optax loop", "DrJAX", "lax.map over K"
BOUNDS = {HAND: 1.05, DRJAX: 1.10}  # of our time over theirs
OUTER_BOUND = 0.10  # of the outer step's share


class Problem:
    """Sizes, algorithms, data and initial state of one benchmark, from the config of the experiment."""

    def __init__(self, config: Any):
        config = ConfigDict(configs.to_dict(config))
        config.methods, config.seeds, config.grid = ("dp", "isoloco"), (0,), ()
        config.sweep.workers = config.sweep.inner_steps = ()
        dp, iso = isoloco.cells(config)
        self.model = lm.model_config(config)
        self.method = config.lowcomm.isotropize
        self.k, self.h, self.seq = config.lowcomm.workers, config.lowcomm.inner_steps, config.data.seq_len
        self.params = transformer.init(self.model, prng.key(0))
        self.eta, self.mu = iso.settings["outer_lr"], iso.settings["outer_momentum"]
        self.algo = isoloco.algorithm(config, iso, self.params)
        self.dp = isoloco.algorithm(config, dp, self.params)
        rows = per_worker_batch(config.train.global_batch, self.k)
        shape = (self.k, self.h, rows, self.seq + 1)
        tokens = np.random.default_rng(0).integers(0, self.model.vocab, shape, np.int32)
        self.batch, self.key = {"tokens": jnp.asarray(tokens)}, prng.key(1)
        self.tokens = self.k * self.h * rows * self.seq

    def loss(self, params: PyTree, batch: PyTree, key: Array) -> Array:
        """Nats a token."""
        return transformer.loss(self.model, params, batch["tokens"])

    @functools.cached_property
    def specs(self) -> dict[str, int | None]:
        """Which leaves are matrices."""
        return transformer.matrix_specs(self.model)

    def state(self) -> tuple[PyTree, PyTree, PyTree, PyTree]:
        """`(theta, momentum, theta_k, inner state)` of the hand-written programs, before the first round."""
        copy = functools.partial(jax.tree.map, jnp.array)
        workers = tree.broadcast_leading(self.params, self.k)
        inner = jax.vmap(self.algo.inner.init)(workers)
        return copy((self.params, optax.tree.zeros_like(self.params), workers, inner))


def iso_by_hand(path: str, a: Array) -> Array:
    """Mean singular value times polar factor, from the definition; other leaves unchanged."""
    if not path.endswith(("kernel", "embedding")):
        return a
    if a.ndim > 2:  # stacked layers, one after the other: see core.linalg
        return jnp.stack([iso_by_hand(path, x) for x in a])
    u, s, vt = jnp.linalg.svd(a, full_matrices=False)
    keep = s > max(a.shape) * jnp.finfo(a.dtype).eps * s[0]
    return jnp.mean(s) * (u * keep) @ vt


def outer_by_hand(p: Problem, theta: PyTree, momentum: PyTree, mean: PyTree) -> tuple[PyTree, PyTree]:
    """Isotropisation, Nesterov momentum and the step."""
    g = tree.map_with_path(iso_by_hand, mean)
    momentum = jax.tree.map(lambda m, x: p.mu * m + x, momentum, g)
    return jax.tree.map(lambda t, x, m: t - p.eta * (x + p.mu * m), theta, g, momentum), momentum


def hand_round(p: Problem) -> Callable[..., Any]:
    """The round as one would write it with optax alone: vmap the step over workers, scan over steps, merge."""

    def step(params, inner_state, tokens):
        loss, grads = jax.value_and_grad(p.loss)(params, {"tokens": tokens}, p.key)
        updates, inner_state = p.algo.inner.update(grads, inner_state, params)
        return (optax.apply_updates(params, updates), inner_state), loss

    def run(state, batch):
        theta, momentum, workers, inner = state
        by_step = jnp.moveaxis(batch["tokens"], 1, 0)
        (workers, inner), losses = jax.lax.scan(lambda c, x: jax.vmap(step)(*c, x), (workers, inner), by_step)
        mean = jax.tree.map(lambda t, w: jnp.mean(t - w, axis=0), theta, workers)
        theta, momentum = outer_by_hand(p, theta, momentum, mean)
        workers = jax.tree.map(lambda t, w: jnp.broadcast_to(t, w.shape), theta, workers)
        return (theta, momentum, workers, inner), losses

    return run


def _local(p: Problem) -> Callable[..., Any]:
    """One worker's round, `(theta, inner state, tokens [H, b, T+1]) -> (theta_k, inner state, losses [H])`."""

    def step(carry, tokens):
        params, inner_state = carry
        loss, grads = jax.value_and_grad(p.loss)(params, {"tokens": tokens}, p.key)
        updates, inner_state = p.algo.inner.update(grads, inner_state, params)
        return (optax.apply_updates(params, updates), inner_state), loss

    def run(theta, inner_state, tokens):
        (params, inner_state), losses = jax.lax.scan(step, (theta, inner_state), tokens)
        return params, inner_state, losses

    return run


def map_round(p: Problem) -> Callable[..., Any]:
    """One worker after the other: the smallest working set, the smallest products."""

    def run(state, batch):
        theta, momentum, workers, inner = state
        local = _local(p)
        workers, inner, losses = jax.lax.map(lambda x: local(theta, *x), (inner, batch["tokens"]))
        mean = jax.tree.map(lambda t, w: jnp.mean(t - w, axis=0), theta, workers)
        theta, momentum = outer_by_hand(p, theta, momentum, mean)
        return (theta, momentum, workers, inner), losses

    return run


def drjax_round(p: Problem) -> Callable[..., Any]:
    """The round in DrJAX's three words: broadcast, map, reduce.

    Raises:
      MissingExtraError: when DrJAX is not installed.
    """
    drjax = errors.require("drjax", extra="test")

    @drjax.program(placements={"workers": p.k})
    def run(state, batch):
        theta, momentum, workers, inner = state
        workers, inner, losses = drjax.map_fn(_local(p), (drjax.broadcast(theta), inner, batch["tokens"]))
        delta = drjax.map_fn(lambda t, w: jax.tree.map(jnp.subtract, t, w), (drjax.broadcast(theta), workers))
        theta, momentum = outer_by_hand(p, theta, momentum, drjax.reduce_mean(delta))
        return (theta, momentum, workers, inner), losses

    return run


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """DrJAX warns, while it is compiled, that there is no mesh; here there should be none."""
    level = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(level)


def check_equal(name: str, ours: PyTree, theirs: PyTree, tolerance: float = TOLERANCE) -> float:
    """The largest absolute difference of a parameter.

    Raises:
      ValueError: when it is above `tolerance`: then the two programs are not the same method.
    """
    pairs = zip(tree.leaf_paths(ours), jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    found = {path: float(jnp.max(jnp.abs(a - b))) for path, a, b in pairs}
    path = max(found, key=lambda key: found[key] if np.isfinite(found[key]) else np.inf)
    if not found[path] <= tolerance:
        raise ValueError(f"{name} differs from {OURS} by {found[path]:.2e} in {path!r} after {ROUNDS} rounds")
    return found[path]


def rounds(p: Problem) -> tuple[Table, dict[str, Any]]:
    """Times whole rounds; returns the table and the facts that were found on the way."""
    jit = functools.partial(jax.jit, donate_argnums=0)
    others, missing = {HAND: hand_round(p), MAP: map_round(p)}, []
    try:
        others[DRJAX] = drjax_round(p)
    except errors.MissingExtraError as error:
        missing = [[DRJAX, *[None] * 6, f"not measured: {error}"]]

    first = p.algo.init(p.params, p.k)
    calls = {OURS: timing.stepper(jit(p.algo.round(p.loss)), first, p.batch, p.key)}
    with timing.count_compilations() as compiled:
        results = [calls[OURS]() for _ in range(ROUNDS)]
    params = jax.tree.map(jnp.array, results[-1][0].params)  # a copy: the next call donates the state
    given = jax.tree.leaves(first)
    facts = {"compilations": len(compiled), "kept": sum(not x.is_deleted() for x in given), "arrays": len(given)}

    notes = {DP: "the same data, one model, no outer step"}
    for name, run in others.items():
        calls[name] = timing.stepper(jit(run), p.state(), p.batch)
        with without_warnings():
            for _ in range(ROUNDS):
                (theta, *_), _ = calls[name]()
        largest = check_equal(name, params, theta, MAP_TOLERANCE if name == MAP else TOLERANCE)
        notes[name] = f"equal to {largest:.0e}"
    calls[DP] = timing.stepper(jit(p.dp.round(p.loss)), p.dp.init(p.params), p.batch, p.key)
    devices = max(d for d in range(1, jax.device_count() + 1) if p.k % d == 0)
    if devices > 1:
        workers = mesh.make_mesh({"worker": devices})
        batch = mesh.put(p.batch, mesh.named(workers, "worker"))
        run = jit(p.algo.round(p.loss, mesh=workers))
        calls[MESH] = timing.stepper(run, p.algo.init(p.params, p.k, mesh=workers), batch, p.key)
        notes[MESH] = f"{devices} devices"
    for name in {DP, MESH} & set(calls):
        jax.block_until_ready(calls[name]())
    found = timing.measure(calls, repeats=REPEATS, warmup=0)

    rows = [[OURS, found[OURS].best * 1e3, found[OURS].median * 1e3, 1.0, "", 1.0, None, ""]]
    facts["seconds"], facts["ratios"] = found[OURS].best, {}
    for name in [name for name in calls if name != OURS]:
        facts["ratios"][name] = r = timing.ratio(found[OURS], found[name])
        quartiles = f"{r.low:.2f} to {r.high:.2f}"
        times = [found[name].best * 1e3, found[name].median * 1e3]
        rows.append([name, *times, r.best, quartiles, r.cpu, BOUNDS.get(name), notes[name]])
    columns = ["program", "best ms", "median ms", "ours / it, best", "quartiles", "CPU time", "bound", "note"]
    title = f"A round: K={p.k} workers, H={p.h} steps, {tree.size(p.params)} parameters, {p.tokens} tokens"
    return Table(title, columns, rows + missing), facts


def outer_steps(p: Problem, round_seconds: float) -> tuple[Table, dict[str, float]]:
    """Times one outer step (differences, mean, outer optimizer, broadcast) of real pseudo-gradients."""
    theta, _, workers, inner = p.state()
    workers, _, _ = jax.jit(jax.vmap(_local(p), in_axes=(None, 0, 0)))(theta, inner, p.batch["tokens"])
    nesterov = p.mu > 0

    def build(outer: optax.GradientTransformation) -> Callable[[], Any]:
        def run(theta, outer_state, workers):
            delta = jax.tree.map(lambda t, w: t - w, theta, workers)
            mean = p.algo.aggregate.fn(delta, None, p.key)
            updates, outer_state = outer.update(mean, outer_state, theta)
            theta = optax.apply_updates(theta, updates)
            return theta, outer_state, tree.broadcast_leading(theta, p.k)

        return functools.partial(jax.jit(run), theta, outer.init(theta), workers)

    calls = {"mean (DiLoCo)": build(lowcomm.diloco(p.eta, p.mu, nesterov=nesterov))}
    for method in METHODS:
        calls[method] = build(lowcomm.isoloco(p.eta, p.mu, method=method, specs=p.specs, nesterov=nesterov))
    found = timing.measure(calls, repeats=OUTER_REPEATS)
    # Two measurements: of a model so small that the outer step is all, the difference may come out below zero.
    inner_seconds = max(0.0, round_seconds - found[p.method].best) / p.h
    share = {name: t.best / (t.best + H_TARGET * inner_seconds) for name, t in found.items()}
    rows = []
    for name, t in found.items():
        r = timing.ratio(t, found["mean (DiLoCo)"])
        bound = OUTER_BOUND if name == p.method else None
        rows.append([name, t.best * 1e3, r.best, f"{r.low:.1f} to {r.high:.1f}", share[name], bound])
    columns = ["outer step", "best ms", "/ mean", "quartiles", f"share of a round, H={H_TARGET}", "bound"]
    return Table("An outer step of IsoLoCo", columns, rows), share


def sizes(p: Problem, facts: dict[str, Any]) -> Table:
    """Compilations, memory, throughput."""
    peak = timing.matmul_peak(jnp.dtype(p.model.dtype))
    rate = p.tokens / facts["seconds"]
    flops = transformer.flops_per_token(p.model, p.seq) * rate
    parts = jax.eval_shape(lambda x: p.algo.init(x, p.k), p.params)
    expected = tree.nbytes((parts.params, parts.outer_state, parts.worker_params, parts.inner_state)) + 4
    rows = [
        [f"compilations in {ROUNDS} rounds", facts["compilations"]],
        ["state arrays that were not donated", f"{facts['kept']} of {facts['arrays']}"],
        ["bytes of the state", tree.nbytes(parts)],
        ["K x (parameters + inner state) + merged parameters + outer state", expected],
        ["tokens a second", round(rate)],
        ["GFLOP/s, matrix products", flops / 1e9],
        ["GFLOP/s, measured peak of a matrix product", peak / 1e9],
        ["fraction of the peak", flops / peak],
    ]
    return Table("Facts", ["what", "value"], rows)


def main(config: Any) -> list[Table]:
    """The tables that `jaxlab bench isoloco` prints."""
    p = Problem(config)
    whole, facts = rounds(p)
    outer, _ = outer_steps(p, facts["seconds"])
    return [whole, outer, sizes(p, facts)]
