"""How fast a step of AdamW and Lion is with states in 4 and 3 bits, and how much memory it takes.

Random parameters and gradients, everything jitted and donated, one process, all programs in turn (`core.timing`); on a
shared machine only ratios mean anything, and CPU time more than wall-clock time. A step with float32 states reads and
writes 28 bytes a parameter, one with 4-bit states 14: the fewer bytes a second a core gets from memory, the better the
fused step looks. `config.bench.peers=True` adds the optimizers of torch, torchao and bitsandbytes that are installed.
"""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from jaxlab.core import config as configs
from jaxlab.core import timing, tree
from jaxlab.core.report import Table
from jaxlab.kernels.bred_update.codec import QuantSpec
from jaxlab.optim import fused

REPEATS = 15  # timed steps of each program
PEER_REPEATS = 3  # timed steps where peers take part, which take seconds
LAYER = {"qkv": (768, 2304), "out": (768, 768), "up": (768, 3072), "down": (3072, 768), "norm": (768,)}
MATRIX, LAYERS = "one matrix", "layers of a transformer"
TREES: dict[str, dict[str, tuple[int, ...]]] = {
    MATRIX: {"w": (4096, 4096)},
    LAYERS: {f"{i}/{name}": shape for i in range(3) for name, shape in LAYER.items()},
}
ADAMW, LION = "optax.adamw, float32", "optax.lion, float32"
FUSED, FUSED3, FUSED_LION = "fused.adamw, 4 bits", "fused.adamw, 3 bits", "fused.lion, 4 bits"
WRAPPER = "quantize_state(optax.adamw), 4 bits"
CPU_BOUND = 1.25  # of CPU time over float32's: 0.8 of its throughput
# Of the wrapper's CPU time over the fused step's, on the layers of a transformer. The updates that an optax optimizer
# returns are a float32 array; one as large as the whole model is new memory in each step, and that costs as much again.
WRAPPER_BOUND = 2.5
TEMP_BOUND = 10.0  # MB of temporary memory
RATE = 1e-3

Step = Callable[[tuple[PyTree, PyTree], PyTree], tuple[tuple[PyTree, PyTree], tuple[()]]]


def of_optax(tx: optax.GradientTransformation) -> tuple[Callable[[PyTree], PyTree], Step]:
    """(init, step) of an optax optimizer, with `apply_updates` in the step."""

    def step(carry: tuple[PyTree, PyTree], grads: PyTree) -> Any:
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), ()

    return tx.init, step


def of_fused(opt: fused.FusedOptimizer) -> tuple[Callable[[PyTree], PyTree], Step]:
    """(init, step) of a fused optimizer."""
    return opt.init, lambda carry, grads: (opt.step(carry[0], grads, carry[1]), ())


def programs() -> dict[str, tuple[Callable[[PyTree], PyTree], Step]]:
    """What is timed, by name."""
    from jaxlab.optim import bred

    return {
        ADAMW: of_optax(optax.adamw(RATE)),
        FUSED: of_fused(fused.adamw(RATE)),
        FUSED3: of_fused(fused.adamw(RATE, spec=QuantSpec(bits=3))),
        WRAPPER: of_optax(bred.quantize_state(optax.adamw(RATE))),
        LION: of_optax(optax.lion(RATE)),
        FUSED_LION: of_fused(fused.lion(RATE)),
    }


def values(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Any]:
    """Normal numbers of these shapes."""
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal(shape, np.float32)) for name, shape in shapes.items()}


def prepared(
    names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Callable[[], Any]], dict[str, tuple[float, float | None]]]:
    """Calls that do a step each, and (bytes a parameter of the state, MB of temporary memory), by name."""
    grads, calls, memory = values(shapes, 1), {}, {}
    for name in names:
        init, step = programs()[name]
        params = values(shapes, 0)
        carry = params, init(params)
        compiled = jax.jit(step, donate_argnums=0).lower(carry, grads).compile()
        analysis = compiled.memory_analysis()
        temporary = None if analysis is None else analysis.temp_size_in_bytes / 1e6
        memory[name] = tree.nbytes(carry[1]) / tree.size(params), temporary
        calls[name] = timing.stepper(compiled, carry, grads)
    return calls, memory


def steps(title: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Table, dict[str, float]]:
    """Times a step of every program on one tree; the facts are the numbers that have a bound."""
    calls, memory = prepared(list(programs()), shapes)
    found = timing.measure(calls, repeats=REPEATS, warmup=2)
    wrapper = timing.ratio(found[WRAPPER], found[FUSED]).cpu
    bounds = {
        FUSED: f"CPU time <= {CPU_BOUND}, temporary < {TEMP_BOUND:g} MB",
        WRAPPER: f"CPU time {wrapper:.2f} of the fused step's" + (f", <= {WRAPPER_BOUND}" if title == LAYERS else ""),
    }
    rows, facts = [], {"wrapper": wrapper}
    for name, t in found.items():
        base = LION if name in (LION, FUSED_LION) else ADAMW
        r = timing.ratio(t, found[base])
        quartiles = "" if name == base else f"{r.low:.2f} to {r.high:.2f}"
        stored, temporary = memory[name]
        rows.append([name, t.best * 1e3, t.median * 1e3, r.best, quartiles, r.cpu, stored, temporary, bounds.get(name)])
        if name == FUSED:
            facts |= {"cpu": r.cpu, "wall": r.best, "temporary": temporary or 0.0}
    columns = ["step", "best ms", "median ms", "time / float32, best", "quartiles", "CPU time / float32"]
    columns += ["bytes a parameter", "temporary MB", "bound"]
    size = sum(int(np.prod(shape)) for shape in shapes.values())
    return Table(f"One step: {title}, {size} float32 parameters, {jax.default_backend()}", columns, rows), facts


PEERS = {
    "torch.optim.AdamW": (("torch.optim", "AdamW"),),
    "torchao AdamW4bit": (("torchao.optim", "AdamW4bit"), ("torchao.prototype.low_bit_optim", "AdamW4bit")),
    "bitsandbytes AdamW8bit": (("bitsandbytes.optim", "AdamW8bit"),),
}


def _torch_bytes(x: Any) -> int:
    """Bytes of the tensors in an optimizer's state, those inside of tensor subclasses included."""
    if isinstance(x, Mapping):
        return sum(map(_torch_bytes, x.values()))
    if hasattr(x, "__tensor_flatten__"):
        return sum(_torch_bytes(getattr(x, name)) for name in x.__tensor_flatten__()[0])
    return x.numel() * x.element_size() if hasattr(x, "element_size") else 0


def _step(optimizer: Any) -> None:
    optimizer.step()


def _peer(places: Sequence[tuple[str, str]], shape: tuple[int, ...]) -> tuple[Callable[[], None], Any]:
    """(one step, its optimizer); ImportError where no place has the optimizer."""
    torch = importlib.import_module("torch")
    for module, name in places:
        try:
            make = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
        param = torch.nn.Parameter(torch.randn(shape))
        param.grad = torch.randn(shape)
        optimizer = make([param], lr=RATE)
        return functools.partial(_step, optimizer), optimizer
    raise ImportError(f"{places[0][0]}.{places[0][1]} is not installed")


def peers(shapes: Mapping[str, tuple[int, ...]]) -> Table:
    """Times the optimizers of other libraries that are installed, on a CPU, on the first array of the tree."""
    name, shape = next(iter(shapes.items()))
    calls, memory = prepared([ADAMW, FUSED], {name: shape})
    found, missing = {}, []
    for peer, places in PEERS.items():
        try:
            calls[peer], found[peer] = _peer(places, shape)
        except ImportError as error:
            missing.append([peer, *[None] * 5, f"not measured: {error}"])
    timings = timing.measure(calls, repeats=PEER_REPEATS)
    rows = []
    for program, t in timings.items():
        r = timing.ratio(t, timings[FUSED])
        stored = memory[program][0] if program in memory else _torch_bytes(found[program].state) / np.prod(shape)
        rows.append([program, t.best * 1e3, t.median * 1e3, r.best, r.cpu, float(stored), ""])
    columns = ["step", "best ms", "median ms", "time / fused", "CPU time / fused", "bytes a parameter", "note"]
    return Table(f"Peers on a CPU: one array {list(shape)}", columns, rows + missing)


def main(config: Any) -> list[Table]:
    """The tables that `jaxlab bench bred` prints."""
    tables = [steps(title, shapes)[0] for title, shapes in TREES.items()]
    if configs.to_dict(config).get("bench", {}).get("peers"):
        tables.append(peers(TREES[MATRIX]))
    return tables
