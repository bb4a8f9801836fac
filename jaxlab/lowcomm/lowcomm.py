"""Low-communication training: K workers train alone for H steps, then one outer step merges what they learnt.

    repeat:
      for each worker k, in parallel, without communication:
        theta_k <- theta;   H times: theta_k, s_k <- inner(grad loss_k(theta_k), s_k, theta_k)
      delta_k = theta - theta_k                      (pseudo-gradient)
      g       = aggregate(delta_1, ..., delta_K)     (the only communication; the mean is one all-reduce)
      theta  <- theta + outer(g)                     (any optax transformation)

The inner optimizer states s_k stay with their workers: they are never averaged and never reset. Which method this is
depends on `outer` and `aggregate` alone: `diloco`, `isoloco`, `local_sgd`, or a merging method of `merging`.

Everything that changes lives in one pytree, `LowCommState`, so that a checkpoint taken at any inner step resumes
exactly. The worker axis K leads every per-worker leaf. The worker function contains no collective; it is mapped over K
by `vmap` on one device, or by `shard_map` over a mesh axis on several devices or processes, with the same result.

Sources: DiLoCo (arXiv 2311.08105), algorithm 1; Streaming DiLoCo (arXiv 2501.18512); IsoLoCo (arXiv 2607.03011).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Key, PyTree

from jaxlab.core import prng, tree
from jaxlab.kernels.bred_update.codec import is_quantized
from jaxlab.lowcomm import checks, merging
from jaxlab.lowcomm.compression import Compression
from jaxlab.lowcomm.streaming import Fragments, Schedule

LossFn = Callable[[PyTree, PyTree, Key[Array, ""]], Float[Array, ""]]
NONFINITE = ("error", "drop")


class LowCommState(NamedTuple):
    """Everything a run needs to continue.

    Attributes:
      params: theta, the merged parameters, leaves [...].
      outer_state: the outer optimizer's state, one a fragment.
      worker_params: theta_k, leaves [K, ...].
      inner_state: the inner optimizers' states, leaves [K, ...].
      residual: what compression has not sent yet, leaves [K, ...]; empty without error feedback.
      step: inner steps done.
    """

    params: PyTree
    outer_state: tuple[PyTree, ...]
    worker_params: PyTree
    inner_state: PyTree
    residual: PyTree
    step: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class LowComm:
    """A low-communication training algorithm.

    Attributes:
      inner: each worker's optimizer. Its schedules count inner steps. Clip inside: `chain(clip_by_global_norm, adamw)`.
      outer: the outer optimizer, fed with the merged pseudo-gradient as if it were a gradient.
      sync_every: H, inner optimizer steps (not micro-batches) between two synchronisations of a parameter.
      aggregate: "mean", another name in `merging.AGGREGATORS`, or a `merging.Aggregator`.
      fragments: a partition of the parameters for streaming, or None for all at once.
      overlap: V, inner steps between the synchronisation of a fragment and its application.
      mix: share of the local parameters kept at the application; 0 replaces them.
      compress: how pseudo-gradients are sent, or None for full precision.
      nonfinite: "error" lets a NaN or Inf reach the metrics (`check_metrics` names worker and leaf), "drop" leaves that
        worker out of the mean, and gives it the merged parameters and a fresh inner state.

    Raises:
      ValueError, TypeError: for a value out of range or of another kind, naming the argument.

    Example:
      >>> algo = LowComm(optax.sgd(0.1), optax.sgd(1.0), sync_every=2)
      >>> state = algo.init({"w": jnp.zeros(3)}, num_workers=2)
      >>> loss = lambda params, batch, key: jnp.mean((params["w"] - batch) ** 2)
      >>> state, metrics = jax.jit(algo.round(loss))(state, jnp.ones((2, 2, 3)), jax.random.key(0))
      >>> metrics["loss"].shape, int(state.step)
      ((2, 2), 2)
    """

    inner: optax.GradientTransformation
    outer: optax.GradientTransformation
    sync_every: int
    aggregate: str | merging.Aggregator = "mean"
    fragments: Fragments | None = None
    overlap: int = 0
    mix: float | int = 0.0
    compress: Compression | None = None
    nonfinite: str = "error"

    def __post_init__(self):
        if isinstance(self.aggregate, str):
            object.__setattr__(self, "aggregate", merging.get(self.aggregate))
        if not isinstance(self.aggregate, merging.Aggregator):
            raise TypeError(f"aggregate must be a name or a merging.Aggregator, got {self.aggregate!r}")
        if not isinstance(self.compress, Compression | None):
            raise TypeError(f"compress must be a Compression or None, got {self.compress!r}")
        checks.transformation("inner", self.inner)
        checks.transformation("outer", self.outer)
        schedule = self.schedule  # validates sync_every, fragments and overlap
        if schedule.period != self.sync_every:
            raise ValueError(
                f"sync_every={self.sync_every} is not a multiple of the number of fragments={schedule.fragments}; "
                f"the nearest period is {schedule.period}"
            )
        if not 0.0 <= self.mix <= 1.0:
            raise ValueError(f"mix must be in [0, 1], got {self.mix}")
        if self.nonfinite not in NONFINITE:
            raise ValueError(f"nonfinite must be one of {NONFINITE}, got {self.nonfinite!r}")

    @property
    def schedule(self) -> Schedule:
        """The synchronisation schedule, a pure function of the inner step."""
        return Schedule(self.sync_every, 1 if self.fragments is None else len(self.fragments), self.overlap)

    def init(
        self,
        params: PyTree,
        num_workers: int,
        *,
        mesh: Mesh | None = None,
        axis: str = "worker",
        param_specs: PyTree | None = None,
    ) -> LowCommState:
        """The state before the first step: every worker starts from `params`.

        Args:
          params: initial parameters, floating leaves [...].
          num_workers: K.
          mesh: places the state: per-worker leaves over `axis`, the merged ones on every device.
          axis: the mesh axis that holds the workers.
          param_specs: `PartitionSpec`s of the parameters over the mesh's other axes (a worker of several devices).

        Raises:
          ValueError: for K < 1, K not divisible by the mesh axis, a missing axis, or fragments that do not fit.
          TypeError: for no parameters or a leaf that is not real floating point, naming its path.
        """
        check_params(params)
        checks.count("num_workers", num_workers)
        if self.fragments is not None:
            self.fragments.check(params)
        make = lambda p: self._init(p, num_workers)  # noqa: E731
        if mesh is None:
            return make(jax.tree.map(jnp.array, params))  # a copy: rounds donate their state, `params` stays usable
        shardings = self.shardings(params, num_workers, mesh=mesh, axis=axis, param_specs=param_specs)
        return jax.jit(make, out_shardings=shardings)(params)

    def _init(self, params: PyTree, k: int) -> LowCommState:
        worker_params = tree.broadcast_leading(params, k)
        keeps = self.compress is not None and self.compress.error_feedback
        return LowCommState(
            params=params,
            outer_state=tuple(self.outer.init(part) for part in self._parts(params)),
            worker_params=worker_params,
            inner_state=jax.vmap(self.inner.init)(worker_params),
            # At least float32: in the parameters' own bfloat16, what is left would itself be rounded away.
            residual=jax.tree.map(lambda w: jnp.zeros(w.shape, _residual_dtype(w)), worker_params) if keeps else (),
            step=jnp.zeros((), jnp.int32),
        )

    def shardings(
        self, params: PyTree, num_workers: int, *, mesh: Mesh, axis: str = "worker", param_specs: PyTree | None = None
    ) -> LowCommState:
        """The `NamedSharding` of every leaf of the state: workers over `axis`, the rest by `param_specs`."""
        _check_axis(mesh, axis, num_workers)
        if param_specs is None:
            param_specs = jax.tree.map(lambda _: PartitionSpec(), params)
        shape = jax.eval_shape(lambda p: self._init(p, num_workers), params)
        is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
        outer = tuple(
            _state_specs(self.outer, state, specs)
            for state, specs in zip(shape.outer_state, self._parts(param_specs, is_leaf=is_spec), strict=True)
        )
        stacked = lambda specs: jax.tree.map(lambda s: PartitionSpec(axis, *s), specs, is_leaf=is_spec)  # noqa: E731
        specs = LowCommState(
            params=param_specs,
            outer_state=outer,
            worker_params=stacked(param_specs),
            inner_state=stacked(_state_specs(self.inner, shape.inner_state, param_specs)),
            residual=stacked(param_specs) if shape.residual != () else (),
            step=PartitionSpec(),
        )
        return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=is_spec)

    def round(
        self,
        loss_fn: LossFn,
        *,
        mesh: Mesh | None = None,
        axis: str = "worker",
        param_specs: PyTree | None = None,
    ) -> Callable[..., Any]:
        """H inner steps of every worker and the synchronisations they contain, as one pure function to jit.

        Args:
          loss_fn: `(params, batch, key) -> scalar loss`, the mean over its batch.
          mesh: maps the workers over `axis` with `shard_map`; None maps them with `vmap` on one device.
          axis: the mesh axis that holds the workers.
          param_specs: as in `init`. The state that comes out is laid out as `init` made it, so that the next call does
            not compile again.

        Returns:
          `f(state, batch, key, weights=None) -> (state, metrics)`. Batch leaves are `[K, H, ...]`; the key is folded
          with the inner step and the worker, so pass the run's root key. `weights [K]` are normalised to sum 1 (sample
          counts; 0 leaves a worker out; `workers.check_weights` checks them on the host, under jit all zeros or one
          that is negative or not finite merge to NaN). The state must be at a round boundary. Metrics: `loss [K, H]`,
          `delta_sq [K]` (squared norms of the pseudo-gradients) and `merged_sq` (of their aggregate), summed over the
          fragments that were synchronised; `delta_sq` is 0 for a worker that is left out. With `nonfinite="error"` also
          `nonfinite_leaf [K]`, the number of the parameters' leaf in which a NaN or Inf was found, or -1. Jit it with
          `donate_argnums=0`.
        """
        step = self.step(loss_fn, mesh=mesh, axis=axis, param_specs=param_specs)
        inner = self._inner(loss_fn, mesh, axis)

        def scan(body, state, batch, rest):
            by_step = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), batch)
            return jax.lax.scan(lambda s, b: body(s, b, *rest), state, by_step, length=self.sync_every)

        def one_fragment(state, batch, key, weights=None):
            self._check(state, batch, weights, (_workers(state), self.sync_every))
            state, losses = scan(inner, state, batch, (key,))
            state, metrics = self._synchronise(state, 0, key, weights, mesh, axis)
            state = self._apply(state, 0)
            return self._placed(state, {"loss": losses.T, **metrics}, mesh, axis, param_specs)

        def streaming(state, batch, key, weights=None):
            self._check(state, batch, weights, (_workers(state), self.sync_every))
            state, metrics = scan(step, state, batch, (key, weights))
            return state, {
                "loss": metrics["loss"].T,
                "delta_sq": metrics["delta_sq"].sum(0),
                "merged_sq": metrics["merged_sq"].sum(0),
                **({"nonfinite_leaf": metrics["nonfinite_leaf"].max(0)} if "nonfinite_leaf" in metrics else {}),
            }

        return one_fragment if self.schedule.fragments == 1 and self.overlap == 0 else streaming

    def step(
        self,
        loss_fn: LossFn,
        *,
        mesh: Mesh | None = None,
        axis: str = "worker",
        param_specs: PyTree | None = None,
    ) -> Callable[..., Any]:
        """One inner step of every worker, and what the schedule synchronises and applies after it.

        Same arguments as `round`; batch leaves are `[K, ...]`. H calls equal one `round`. Use it to checkpoint, log or
        stop inside a round; the metrics are those of `round` for one step, `loss [K]`.
        """
        inner = self._inner(loss_fn, mesh, axis)
        fragments = self.schedule.fragments

        def run(state, batch, key, weights=None):
            self._check(state, batch, weights, (_workers(state),))
            state, loss = inner(state, batch, key)
            sync, apply = self.schedule.traced(state.step)
            no_metrics = jax.eval_shape(lambda s: self._synchronise(s, 0, key, weights, mesh, axis)[1], state)
            # The aggregate is -1 where there is none: a maximum over the steps then finds what was not finite.
            idle = jax.tree.map(lambda m: jnp.full(m.shape, -1 if m.dtype == jnp.int32 else 0, m.dtype), no_metrics)

            def synchronise(f):
                return lambda s: self._synchronise(s, f, key, weights, mesh, axis)

            state, metrics = jax.lax.switch(
                sync + 1, [lambda s: (s, idle), *(synchronise(f) for f in range(fragments))], state
            )
            state = jax.lax.switch(
                apply + 1, [lambda s: s, *(lambda s, f=f: self._apply(s, f) for f in range(fragments))], state
            )
            return self._placed(state, {"loss": loss, **metrics}, mesh, axis, param_specs)

        return run

    def bytes_per_round(self, params: PyTree, num_workers: int) -> dict[str, int]:
        """Bytes that H inner steps put on the network for each worker.

        `payload` is what a worker contributes: for the mean, parameters times 4 bytes, as sums over workers of float16
        and bfloat16 parameters run in float32; what is gathered travels in the parameters' dtype. `ring` is what it
        sends when the collective runs on a ring: `2 (K-1)/K payload` for an all-reduce; `(K-1) payload` for the
        all-gather that compression and the merging methods which compare the workers need.
        """
        checks.count("num_workers", num_workers)
        if self.compress is not None:  # a fragment's part of a stacked leaf is cut into blocks of its own
            sent = jax.tree.leaves(jax.eval_shape(self._parts, params))
            payload = sum(self.compress.nbytes(tree.size(leaf)) for leaf in sent)
        elif self.aggregate.needs_all:
            payload = tree.nbytes(params)
        else:
            widths = [jnp.promote_types(leaf.dtype, jnp.float32).itemsize for leaf in jax.tree.leaves(params)]
            sizes = [tree.size(leaf) for leaf in jax.tree.leaves(params)]
            payload = self.aggregate.sums * sum(n * width for n, width in zip(sizes, widths, strict=True))
        if self.compress is None and not self.aggregate.needs_all:
            ring = 2 * (num_workers - 1) * payload // num_workers
        else:
            ring = (num_workers - 1) * payload
        return {"payload": payload, "ring": ring}

    # The parts of a round.

    def _parts(self, params: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> list[PyTree]:
        """What each outer state covers: the whole tree, or a flat dict a fragment."""
        if self.fragments is None:
            return [params]
        if is_leaf is not None:  # a tree of partition specs: a fragment's rows share their leaf's spec
            leaves = jax.tree.leaves(params, is_leaf=is_leaf)
            flat = dict(zip(tree.leaf_paths(params, is_leaf=is_leaf), leaves, strict=True))
            return [{piece.path: flat[piece.path] for piece in group} for group in self.fragments.pieces]
        return [self.fragments.take(params, f) for f in range(len(self.fragments))]

    def _take(self, params: PyTree, f: int, lead: int = 0) -> PyTree:
        return params if self.fragments is None else self.fragments.take(params, f, lead=lead)

    def _put(self, params: PyTree, f: int, part: PyTree, lead: int = 0) -> PyTree:
        return part if self.fragments is None else self.fragments.put(params, f, part, lead=lead)

    def _inner(self, loss_fn: LossFn, mesh: Mesh | None, axis: str) -> Callable[..., Any]:
        """`(state, batch [K, ...], key) -> (state, loss [K])`: one inner step of every worker, no collective."""
        inner = optax.with_extra_args_support(self.inner)

        def worker(params, inner_state, batch, key):
            loss, grads = jax.value_and_grad(loss_fn)(params, batch, key)
            updates, inner_state = inner.update(grads, inner_state, params)
            return optax.apply_updates(params, updates), inner_state, loss

        mapped = jax.vmap(worker)
        if mesh is not None:
            spec = PartitionSpec(axis)
            mapped = jax.shard_map(mapped, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={axis})

        def run(state, batch, key):
            workers = _workers(state)
            if mesh is not None:
                _check_axis(mesh, axis, workers)
            keys = prng.worker_keys(prng.step_key(key, state.step), workers)
            args = (state.worker_params, state.inner_state, batch, keys)
            if workers == 1 and mesh is None:  # without a batch axis the compiler rounds as in plain training
                one = worker(*jax.tree.map(lambda x: x[0], args))
                worker_params, inner_state, loss = jax.tree.map(lambda x: x[None], one)
            else:
                worker_params, inner_state, loss = mapped(*args)
            return state._replace(worker_params=worker_params, inner_state=inner_state, step=state.step + 1), loss

        return run

    def _synchronise(self, state, f, key, weights, mesh, axis) -> tuple[LowCommState, dict[str, Array]]:
        """Merges fragment f's pseudo-gradients and takes its outer step; the workers are not touched."""
        workers = _workers(state)
        anchor = self._take(state.params, f)
        deltas = jax.tree.map(lambda a, w: a - w, anchor, self._take(state.worker_params, f, lead=1))
        if weights is not None:
            weights = jnp.asarray(weights, jnp.float32)
        bad = nonfinite_leaf(deltas)
        if self.nonfinite == "drop":
            weights = jnp.where(bad >= 0, 0.0, jnp.ones(workers) if weights is None else weights)
            if not isinstance(weights, jax.core.Tracer) and not jnp.any(weights > 0):
                raise ValueError(f"nonfinite='drop' has no worker left to merge: {int(jnp.sum(bad >= 0))} diverged")
        # What an absent worker holds, a NaN perhaps, is nobody's business.
        present = jnp.ones(workers, bool) if weights is None else weights > 0
        metrics = {"delta_sq": jnp.where(present, _square_norms(deltas), 0.0)}
        if self.nonfinite == "error":
            numbers = jnp.array(_leaf_numbers(state.params, anchor, self.fragments is not None), jnp.int32)
            metrics["nonfinite_leaf"] = jnp.where(present & (bad >= 0), numbers[bad], -1)
        if self.compress is not None:
            deltas, state = self._compressed(state, f, deltas, present, mesh, axis)
        elif self.aggregate.needs_all:
            deltas = _gathered(deltas, mesh, axis)
        if self.nonfinite == "drop":
            state = self._revive(state, bad >= 0)
        merge_key = jax.random.fold_in(prng.step_key(key, state.step), workers)  # no worker has number K
        merged = self.aggregate.fn(deltas, weights, merge_key)
        updates, outer_state = optax.with_extra_args_support(self.outer).update(merged, state.outer_state[f], anchor)
        if workers == 1 and self.compress is None and self.aggregate.name == "mean":
            # theta + u = theta_1 + (delta_1 + u), without the rounding of theta - theta_1: with a step of size one the
            # bracket is exactly zero and one worker is plain training, bit for bit.
            local = jax.tree.map(lambda w: w[0], self._take(state.worker_params, f, lead=1))
            new = jax.tree.map(lambda w, d, u: w + (d + u).astype(w.dtype), local, merged, updates)
        else:
            new = optax.apply_updates(anchor, updates)
        metrics["merged_sq"] = optax.tree.norm(merged, squared=True).astype(jnp.float32)
        outer = (*state.outer_state[:f], outer_state, *state.outer_state[f + 1 :])
        return state._replace(params=self._put(state.params, f, new), outer_state=outer), metrics

    def _compressed(self, state, f, deltas, present, mesh, axis) -> tuple[PyTree, LowCommState]:
        """What the workers send: codes and scales travel (an all-gather of bytes), every device decodes and merges."""
        leaves, treedef = jax.tree.flatten(deltas)
        like = {str(i): leaf for i, leaf in enumerate(leaves)}
        flat = like
        if self.compress.error_feedback:
            kept = jax.tree.leaves(self._take(state.residual, f, lead=1))
            flat = {str(i): d.astype(e.dtype) + e for i, (d, e) in enumerate(zip(leaves, kept, strict=True))}
        packed = self.compress.encode_workers(flat)
        if self.compress.error_feedback:
            sent = self.compress.decode_workers(packed, like)
            lost = [
                # A worker that sent a NaN keeps nothing of it; one that is left out has sent nothing.
                jnp.where(_column(present, e), jnp.nan_to_num(flat[i] - sent[i], posinf=0.0, neginf=0.0), e)
                for i, e in zip(flat, kept, strict=True)
            ]
            part = treedef.unflatten(lost)
            state = state._replace(residual=self._put(state.residual, f, part, lead=1))
        received = self.compress.decode_workers(_gathered(packed, mesh, axis), like)
        return treedef.unflatten([received[i] for i in like]), state

    def _apply(self, state: LowCommState, f: int) -> LowCommState:
        """Moves the workers' fragment f to the merged parameters, keeping the share `mix` of their own."""
        merged = self._take(state.params, f)
        local = self._take(state.worker_params, f, lead=1)
        if self.mix == 0.0:
            new = jax.tree.map(lambda g, w: jnp.broadcast_to(g, w.shape), merged, local)
        else:
            new = jax.tree.map(lambda g, w: self.mix * w + (1.0 - self.mix) * g, merged, local)
        return state._replace(worker_params=self._put(state.worker_params, f, new, lead=1))

    def _revive(self, state: LowCommState, lost: Array) -> LowCommState:
        """Gives workers that diverged the merged parameters and fresh inner states; integers (step counts) go on."""
        fresh = jax.vmap(self.inner.init)(tree.broadcast_leading(state.params, _workers(state)))
        choose = lambda new, old: jnp.where(_column(lost, old), new, old)  # noqa: E731
        inner_state = jax.tree.map(
            lambda new, old: choose(new, old) if jnp.issubdtype(old.dtype, jnp.inexact) else old,
            fresh,
            state.inner_state,
        )
        worker_params = jax.tree.map(choose, state.params, state.worker_params)
        residual = jax.tree.map(lambda r: choose(jnp.zeros_like(r), r), state.residual)
        return state._replace(inner_state=inner_state, worker_params=worker_params, residual=residual)

    def _placed(self, state, metrics, mesh, axis, param_specs) -> tuple[LowCommState, dict[str, Array]]:
        """On a mesh, holds the outputs to the layout of `init`; the compiler would choose another for some leaves."""
        if mesh is None:
            return state, metrics
        shardings = self.shardings(state.params, _workers(state), mesh=mesh, axis=axis, param_specs=param_specs)
        split, whole = NamedSharding(mesh, PartitionSpec(axis)), NamedSharding(mesh, PartitionSpec())
        by_metric = {name: split if value.ndim else whole for name, value in metrics.items()}
        return jax.lax.with_sharding_constraint((state, metrics), (shardings, by_metric))

    def _check(self, state: LowCommState, batch: PyTree, weights: Any, lead: tuple[int, ...]) -> None:
        names = "[K, H, ...]" if len(lead) == 2 else "[K, ...]"
        for path, leaf in zip(tree.leaf_paths(batch), jax.tree.leaves(batch), strict=True):
            if jnp.shape(leaf)[: len(lead)] != lead:
                raise ValueError(
                    f"batch leaf {path!r} must be {names} with {list(lead)} in front, got {jnp.shape(leaf)}"
                )
        expected = jax.eval_shape(lambda p: tree.broadcast_leading(p, lead[0]), state.params)
        tree.check_match(expected, state.worker_params, ("params", "worker_params"))
        if weights is not None and jnp.shape(weights) != lead[:1]:
            raise ValueError(f"weights must have shape ({lead[0]},), one a worker, got {jnp.shape(weights)}")
        keeps = self.compress is not None and self.compress.error_feedback
        if len(state.outer_state) != self.schedule.fragments or keeps != bool(jax.tree.leaves(state.residual)):
            raise ValueError(
                f"state was made by another LowComm: {len(state.outer_state)} fragments and residual "
                f"{'kept' if jax.tree.leaves(state.residual) else 'absent'}, here {self.schedule.fragments} and "
                f"{'kept' if keeps else 'absent'}"
            )


def check_params(params: PyTree) -> None:
    """Raises `TypeError` unless `params` has leaves and all are real floating point, naming the first that is not."""
    if params is None or not jax.tree.leaves(params):
        raise TypeError(f"params must be a pytree with at least one array, got {params!r}")
    for path, leaf in zip(tree.leaf_paths(params), jax.tree.leaves(params), strict=True):
        dtype = getattr(leaf, "dtype", type(leaf))
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"params leaf {path!r} must be real floating point, got {dtype}; keep counters and random keys outside"
            )


def nonfinite_leaf(deltas: PyTree) -> Int[Array, " K"]:
    """For each worker, the number of the first leaf `[K, ...]` that holds a NaN or Inf, or -1."""
    bad = jnp.stack([~jnp.all(jnp.isfinite(d), axis=tuple(range(1, d.ndim))) for d in jax.tree.leaves(deltas)])
    return jnp.where(jnp.any(bad, axis=0), jnp.argmax(bad, axis=0), -1).astype(jnp.int32)


def _workers(state: LowCommState) -> int:
    return jax.tree.leaves(state.worker_params)[0].shape[0]


def _leaf_numbers(params: PyTree, part: PyTree, fragment: bool) -> list[int]:
    """The number, among the leaves of `params`, of each leaf of a fragment."""
    if not fragment:
        return list(range(len(jax.tree.leaves(params))))
    return [tree.leaf_paths(params).index(path) for path in tree.leaf_paths(part)]


def _residual_dtype(leaf: Array) -> jnp.dtype:
    return jnp.promote_types(leaf.dtype, jnp.float32)


def _gathered(values: PyTree, mesh: Mesh | None, axis: str) -> PyTree:
    """Brings what the workers made, leaves [K, ...], to every device of the mesh.

    First it is held where it was made: otherwise the compiler may gather what it was made from (deltas, not codes).
    """
    if mesh is None:
        return values
    # bfloat16 travels as bits: XLA's CPU backend would widen it to float32 first.
    narrow = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x  # noqa: E731
    sent = jax.tree.map(narrow, values)
    sent = jax.lax.with_sharding_constraint(sent, NamedSharding(mesh, PartitionSpec(axis)))
    sent = jax.lax.with_sharding_constraint(sent, NamedSharding(mesh, PartitionSpec()))
    widen = lambda x, like: x if x.dtype == like.dtype else jax.lax.bitcast_convert_type(x, like.dtype)  # noqa: E731
    return jax.tree.map(widen, sent, values)


def _column(mask: Array, like: Array) -> Array:
    return mask.reshape(-1, *(1,) * (like.ndim - 1))


def _square_norms(deltas: PyTree) -> Float[Array, " K"]:
    return sum(
        jnp.sum(jnp.square(d.astype(jnp.float32)), axis=tuple(range(1, d.ndim))) for d in jax.tree.leaves(deltas)
    )


def _check_axis(mesh: Mesh, axis: str, workers: int) -> None:
    if axis not in mesh.axis_names:
        raise ValueError(f"axis {axis!r} is not in the mesh; it has {mesh.axis_names}")
    if workers % mesh.shape[axis]:
        raise ValueError(f"{workers} workers do not divide over the {mesh.shape[axis]} devices of mesh axis {axis!r}")


def _state_specs(tx: optax.GradientTransformation, state: PyTree, specs: PyTree) -> PyTree:
    """Partition specs of an optimizer state: those of the parameters where it mirrors them, none elsewhere."""

    def place(x: Any, spec: PartitionSpec) -> Any:
        if not is_quantized(x):
            return spec
        # A block of the last axis must not span devices; all other axes are those of the parameter.
        lead = PartitionSpec(*spec[: len(x.shape) - 1])
        return jax.tree.map(lambda _: lead, x)

    return optax.tree.map_params(
        tx, place, state, specs, transform_non_params=lambda _: PartitionSpec(), is_leaf=is_quantized
    )
