"""Devices, meshes and processes: one place that builds meshes, starts `jax.distributed` and moves trees in and out."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import PyTree

_MORE_DEVICES = (
    "on CPU set XLA_FLAGS=--xla_force_host_platform_device_count=N before JAX starts, "
    "or run several processes (--distributed)"
)


def make_mesh(axes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds a mesh whose axes are all `Auto`: the compiler chooses how intermediate values are laid out.

    `jax.make_mesh` has made `Explicit` axes by default since JAX 0.9; every mesh of this library comes from here.

    Args:
      axes: axis name -> number of devices along it, major to minor, such as `{"worker": 4, "data": 2}`.
      devices: the devices to use, exactly as many as the product of the axis sizes. By default the first ones of
        `jax.devices()`; with several processes all of them, since a mesh that leaves a process out deadlocks.

    Returns:
      The mesh.

    Raises:
      ValueError: when there are no axes, a size is not a positive integer, or the devices do not fit the sizes.

    >>> make_mesh({"worker": 1, "data": 1}).axis_names
    ('worker', 'data')
    """
    if not axes:
        raise ValueError("axes must name at least one mesh axis, got none")
    for name, size in axes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"axes[{name!r}] must be an integer >= 1, got {size!r}")
    need, text = math.prod(axes.values()), " x ".join(f"{name}={size}" for name, size in axes.items())
    if devices is not None:
        if len(devices) != need:
            raise ValueError(f"axes {text} need exactly {need} devices, got a list of {len(devices)}")
        chosen = list(devices)
    else:
        there = jax.devices()
        if len(there) < need:
            raise ValueError(
                f"axes {text} need {need} devices, but there are {len(there)} ({there[0].platform}); {_MORE_DEVICES}"
            )
        if jax.process_count() > 1 and len(there) != need:
            raise ValueError(
                f"axes {text} use {need} devices, but the {jax.process_count()} processes have {len(there)}: a mesh "
                "over several processes must use all of them (or pass devices)"
            )
        chosen = there[:need]
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes), devices=tuple(chosen)
    )


def named(mesh: Mesh, *spec: str | tuple[str, ...] | None) -> NamedSharding:
    """The sharding that splits array axis d over mesh axis `spec[d]` (`None`: not split); no spec: replicated.

    Raises:
      ValueError: when the mesh lacks a named axis.

    >>> tuple(named(make_mesh({"worker": 1}), "worker").spec)
    ('worker',)
    """
    for entry in spec:
        for name in (entry,) if isinstance(entry, str) else entry or ():
            if name not in mesh.axis_names:
                raise ValueError(f"spec names mesh axis {name!r}; the mesh has {', '.join(mesh.axis_names)}")
    return NamedSharding(mesh, PartitionSpec(*spec))


def initialize(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Joins this process to a job of several (`jax.distributed`); call it before anything touches a device.

    Without arguments the cluster is detected by JAX (Slurm, Open MPI, TPU pods, GKE). On CPU the collectives run over
    gloo. A second call without arguments does nothing, a second call with arguments is an error.

    Args:
      coordinator: `host:port` of process 0.
      num_processes: how many processes the job has.
      process_id: this one's index, 0 <= process_id < num_processes.

    Raises:
      ValueError: when an argument is malformed, or nothing was given and no cluster was found.
      RuntimeError: when JAX already uses its devices, or the process has joined another job before.
    """
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    if jax.distributed.is_initialized():
        if any(value is not None for value in given.values()):
            raise RuntimeError(
                f"this process already is process {jax.process_index()} of {jax.process_count()}; initialize(...) "
                "joins a job once, and a second call may only come without arguments"
            )
        return
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        raise ValueError(f"coordinator must be host:port, got {coordinator!r}")
    if num_processes is not None and num_processes < 1:
        raise ValueError(f"num_processes must be >= 1, got {num_processes}")
    if process_id is not None and (process_id < 0 or (num_processes is not None and process_id >= num_processes)):
        raise ValueError(f"process_id must be in [0, num_processes={num_processes}), got {process_id}")
    # It only concerns the CPU backend, and must be set before that exists; other backends bring their own collectives.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id)
    except ValueError as error:
        raise ValueError(
            f"cannot tell how the processes are connected ({error}): no Slurm, Open MPI, TPU or GKE job was found, so "
            f"give coordinator (host:port), num_processes and process_id; got {given}"
        ) from error


def describe_devices() -> str:
    """One line about what this process computes on: devices, kind, process, versions."""
    local = jax.local_devices()
    kind = "" if local[0].device_kind == local[0].platform else f" ({local[0].device_kind})"
    where = (
        f"; process {jax.process_index()} of {jax.process_count()}, {jax.device_count()} devices in all"
        if jax.process_count() > 1
        else ""
    )
    return f"{len(local)} {local[0].platform} device{'s' * (len(local) != 1)}{kind}{where}; jax {jax.__version__}"


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def to_host(tree: PyTree) -> PyTree:
    """Copies a tree to NumPy arrays; every process gets the whole value.

    With several processes this is a collective: all of them must call it, with the same tree.

    Args:
      tree: arrays of any sharding; typed keys come back as their raw `uint32` words.

    Returns:
      The same tree of `numpy.ndarray` leaves.

    >>> to_host({"a": jax.numpy.arange(3)})
    {'a': array([0, 1, 2], dtype=int32)}
    """

    def local(x: Any) -> Any:
        x = jax.random.key_data(x) if _is_key(x) else x
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return x
        return x.addressable_data(0) if x.is_fully_replicated else multihost_utils.process_allgather(x, tiled=True)

    # device_get starts all copies before it waits for the first.
    return jax.tree.map(np.asarray, jax.device_get(jax.tree.map(local, tree)))


def put(tree: PyTree, sharding: Sharding | PyTree) -> PyTree:
    """Places a tree on devices; with several processes every one passes the same whole values.

    Args:
      tree: NumPy or JAX arrays, scalars, typed keys.
      sharding: one sharding for all leaves, or a tree of them (a prefix of `tree`).

    Returns:
      The tree of `jax.Array` leaves under that sharding.

    >>> tuple(put({"a": np.ones(2)}, named(make_mesh({"data": 1}), "data"))["a"].sharding.spec)
    ('data',)
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    shardings = jax.tree.map(lambda s, part: jax.tree.map(lambda _: s, part), sharding, tree)
    return jax.tree.map(_put_global, tree, shardings)


def _put_global(x: Any, sharding: Sharding) -> jax.Array:
    """Each process fills in its own shards from the whole value; nothing travels between them."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.jit(lambda y: y, out_shardings=sharding)(x)
    if _is_key(x):
        data, impl = np.asarray(jax.random.key_data(x)), jax.random.key_impl(x)
        return jax.jit(lambda y: jax.random.wrap_key_data(y, impl=impl), out_shardings=sharding)(data)
    whole = np.asarray(x)
    whole = whole.astype(jax.dtypes.canonicalize_dtype(whole.dtype))
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
