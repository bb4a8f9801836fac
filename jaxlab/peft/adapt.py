"""The adapted model without merged kernels: cheaper training steps for any JAX function.

`f(merge(params, state), x)` is the definition of an adapted model. Its backward pass, however, computes the gradient of
each whole kernel (a product as large as the layer's) only to project it onto the few numbers that are trained. `adapt`
traces f, finds the products of an activation with an adapted kernel, and puts the method's own way in their place:
x K + (x a) b for LoRA, (x R) K for OFT, and so on. Wherever a kernel is used in another way, such as looked up,
transposed for a tied head, or in a loop that is not followed, the merged kernel is put in. The result is that of the
definition up to rounding.

Followed are casts, transpositions, reshapes that keep inputs and outputs apart, `jit`, `jax.checkpoint`, and `lax.scan`
over stacked layers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jaxtyping import Array

from jaxlab.core import tree
from jaxlab.peft.adapters import Adapters, arrays, base_leaf, over_stack, substitute
from jaxlab.peft.spec import Target, check_arrays, flatten


def adapt(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` with adapters: `adapt(f)(params, state, *args)` equals `f(merge(params, state), *args)` up to rounding.

    Args:
      f: a function `f(params, *args, **kwargs)` of pytrees of arrays; what is static belongs into a closure.

    Returns:
      A function of (params, state, *args, **kwargs), to be called under `jit`, since it traces f each time. It can be
      differentiated (in reverse mode only), mapped, scanned and checkpointed like f.

    Raises:
      ValueError: in the function returned, when parts do not fit.

    >>> from jaxlab import peft
    >>> f = lambda params, x: x @ params["q"]
    >>> params, x = {"q": jnp.eye(3)}, jnp.ones((2, 3))
    >>> state = peft.init(jax.random.key(0), params, peft.match(params, [peft.Rule("q", peft.LoRA(1))]))
    >>> bool((jax.jit(adapt(f))(params, state, x) == f(params, x)).all())
    True
    """

    @functools.wraps(f)
    def adapted(params: Any, state: Adapters, *args: Any, **kwargs: Any) -> Any:
        check_arrays(state.spec, state.trainable, state.frozen)
        leaves = flatten(params)
        base = {target.path: base_leaf(target, leaves) for target in state.spec.targets}
        params = substitute(params, base)
        closed, out = jax.make_jaxpr(f, return_shape=True)(params, *args, **kwargs)
        values = jax.tree.leaves(params)
        for i, path in enumerate(tree.leaf_paths(params)):
            if path in base:
                target = state.spec[path]
                values[i] = _Kernel(base[path], *arrays(state, path), target, (), target.in_axes, target.out_axes)
        values += jax.tree.leaves((args, kwargs))
        found = _run(closed.jaxpr, closed.consts, values)
        return jax.tree.unflatten(jax.tree.structure(out), found)

    return adapted


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["leaf", "trainable", "frozen"],
    meta_fields=["target", "steps", "in_dims", "out_dims"],
)
@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The value of an adapted kernel in a program, not computed yet.

    Attributes:
      leaf: of the base.
      trainable, frozen: arrays of its adapter.
      target: what it is; inside a scan over a stack, of one kernel.
      steps: what was done to it since, (primitive name, parameter) each.
      in_dims, out_dims: where its inputs and outputs lie now.
    """

    leaf: Any
    trainable: Any
    frozen: Any
    target: Target
    steps: tuple[tuple[str, Any], ...]
    in_dims: tuple[int, ...]
    out_dims: tuple[int, ...]

    def base(self) -> Array:
        """The kernel without its adapter, as it is now."""
        return self._replay(self.leaf)

    def merged(self) -> Array:
        """The kernel with its adapter, as it is now."""
        target = self.target
        matrix = target.to_matrix(self.leaf.astype(target.compute))
        merged = over_stack(target.method.merged, target)(matrix, self.trainable, self.frozen)
        return self._replay(target.from_matrix(merged).astype(target.dtype))

    def now(self, matrix: Array) -> Array:
        """Another kernel of the target's size, as it would be now; rounded to the last dtype only."""
        casts = [argument for name, argument in self.steps if name == "convert_element_type"]
        kept = dataclasses.replace(self, steps=tuple(s for s in self.steps if s[0] != "convert_element_type"))
        return kept._replay(self.target.from_matrix(matrix)).astype(casts[-1] if casts else self.target.dtype)

    def _replay(self, x: Array) -> Array:
        for name, argument in self.steps:
            if name == "convert_element_type":
                x = x.astype(argument)
            else:
                x = x.transpose(argument) if name == "transpose" else x.reshape(argument)
        return x

    def slice(self) -> "_Kernel":
        """This, where its arrays have lost their first axis to a scan."""
        t = self.target
        down = lambda axes: tuple(axis - 1 for axis in axes)  # noqa: E731
        target = dataclasses.replace(t, shape=t.shape[1:], in_axes=down(t.in_axes), stack_axes=down(t.stack_axes[1:]))
        return dataclasses.replace(self, target=target, in_dims=down(self.in_dims), out_dims=down(self.out_dims))

    @property
    def sliceable(self) -> bool:
        """Whether a scan over its first axis runs over the first of its stacked axes."""
        return self.target.stack_axes[:1] == (0,) and all(name == "convert_element_type" for name, _ in self.steps)

    def followed(self, eqn: Any) -> "_Kernel | None":
        """What an equation makes of it, if that is still a kernel."""
        name = eqn.primitive.name
        if name in ("copy", "copy_p", "optimization_barrier") and len(eqn.invars) == 1:
            return self
        if name == "convert_element_type":
            return self._after(name, eqn.params["new_dtype"], self.in_dims, self.out_dims)
        if name == "transpose":
            order = tuple(eqn.params["permutation"])
            place = lambda dims: tuple(order.index(dim) for dim in dims)  # noqa: E731
            # The stacked axes must stay where a scan looks for them.
            return None if self.target.stack else self._after(name, order, place(self.in_dims), place(self.out_dims))
        if name == "reshape" and eqn.params["dimensions"] is None and not self.target.stack:
            shape = tuple(eqn.params["new_sizes"])
            if (*self.in_dims, *self.out_dims) == tuple(range(eqn.invars[0].aval.ndim)):
                # Inputs before outputs; the border between them must stay a border.
                for k in range(1, len(shape)):
                    if math.prod(shape[:k]) == self.target.n:
                        return self._after(name, shape, tuple(range(k)), tuple(range(k, len(shape))))
        return None

    def _after(self, name: str, argument: Any, in_dims: tuple[int, ...], out_dims: tuple[int, ...]) -> "_Kernel":
        steps = (*self.steps, (name, argument))
        return dataclasses.replace(self, steps=steps, in_dims=in_dims, out_dims=out_dims)


def _is_kernel(x: Any) -> bool:
    return isinstance(x, _Kernel)


def _plain(x: Any) -> Any:
    return x.merged() if _is_kernel(x) else x


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Outputs of a jaxpr, some of whose arguments are kernels."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, jex.Literal) else values[v]

    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        found = _special(eqn, inputs) if any(map(_is_kernel, inputs)) else None
        if found is None:
            found = _bind(jaxpr, eqn, [_plain(x) for x in inputs])
        values.update(zip(eqn.outvars, found, strict=True))
    return [_plain(read(v)) for v in jaxpr.outvars]


def _bind(jaxpr: Any, eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """Outputs of one equation as it is."""
    given = {v: x for v, x in zip(eqn.invars, inputs, strict=True) if not isinstance(v, jex.Literal)}
    inner = jaxpr.replace(constvars=[], invars=list(given), outvars=list(eqn.outvars), eqns=[eqn])
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(inner, []))(*given.values())


def _special(eqn: Any, inputs: Sequence[Any]) -> list[Any] | None:
    """Outputs of an equation that a kernel goes into, or None where the merged kernel has to."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        return _product(eqn, *inputs)
    if name in ("jit", "pjit", "closed_call", "core_call"):
        inner = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
        return _run(inner.jaxpr, inner.consts, inputs)
    if name in ("checkpoint", "remat", "remat2"):
        run = functools.partial(_run, params["jaxpr"], ())
        again = jax.checkpoint(lambda *x: run(x), prevent_cse=params["prevent_cse"], policy=params["policy"])
        return again(*inputs)
    if name == "scan":
        return _scan(params, inputs)
    followed = inputs[0].followed(eqn) if _is_kernel(inputs[0]) else None
    return None if followed is None else [followed]


def _scan(params: Any, inputs: Sequence[Any]) -> list[Any]:
    consts, carried = params["num_consts"], params["num_carry"]
    inner = params["jaxpr"]
    carry = [_plain(x) for x in inputs[consts : consts + carried]]
    xs = [x if not _is_kernel(x) or x.sliceable else x.merged() for x in inputs[consts + carried :]]

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        one = [x.slice() if _is_kernel(x) else x for x in xs]
        found = _run(inner.jaxpr, inner.consts, [*inputs[:consts], *carry, *one])
        return found[:carried], found[carried:]

    options = {key: params[key] for key in ("reverse", "length", "unroll")}
    end, ys = jax.lax.scan(body, carry, xs, **options)
    return [*end, *ys]


def _product(eqn: Any, left: Any, right: Any) -> list[Any] | None:
    """A product of an activation and a kernel over all inputs of the kernel, or None where it is something else."""
    (contract, batch), swap = eqn.params["dimension_numbers"], _is_kernel(left)
    if (swap and _is_kernel(right)) or any(map(len, batch)):
        return None
    kernel, x = (left, right) if swap else (right, left)
    k_dims, x_dims = (contract[0], contract[1]) if swap else (contract[1], contract[0])
    target = kernel.target
    if target.stack or set(k_dims) != set(kernel.in_dims):
        return None
    keep = {key: value for key, value in eqn.params.items() if key in ("precision", "preferred_element_type")}
    # x as [..., n] with the inputs in the target's order.
    order = [x_dims[tuple(k_dims).index(dim)] for dim in kernel.in_dims]
    free = [dim for dim in range(x.ndim) if dim not in x_dims]
    lead, sizes = tuple(x.shape[dim] for dim in free), tuple(x.shape[dim] for dim in order)
    base = kernel.base()
    outs = tuple(base.shape[dim] for dim in kernel.out_dims)
    ahead = len(lead)

    def product(z: Array, matrix: Array | None = None) -> Array:
        weight = base if matrix is None else kernel.now(matrix)
        numbers = ((tuple(range(ahead, z.ndim + len(sizes) - 1)), kernel.in_dims), ((), ()))
        y = jax.lax.dot_general(z.reshape(*z.shape[:-1], *sizes), weight, numbers, **keep)
        # The free axes of the kernel come out in rising order.
        rising = sorted(kernel.out_dims)
        y = y.transpose(*range(ahead), *(ahead + rising.index(dim) for dim in kernel.out_dims))
        return y.reshape(*lead, target.m)

    flat = x.transpose(*free, *order).reshape(*lead, target.n)
    matrix = target.to_matrix(kernel.leaf.astype(target.compute))
    y = target.method.apply(matrix, kernel.trainable, kernel.frozen, flat, product)
    y = y.astype(eqn.outvars[0].aval.dtype).reshape(*lead, *outs)
    rank = [sorted(kernel.out_dims).index(dim) for dim in kernel.out_dims]
    y = y.transpose(*range(ahead), *(ahead + rank.index(i) for i in range(len(outs))))
    if swap:
        y = jnp.moveaxis(y, range(ahead), range(len(outs), y.ndim))
    return [y]
