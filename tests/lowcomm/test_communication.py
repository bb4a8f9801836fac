"""What compiled rounds send and store: collectives counted in the HLO, bytes from the memory analysis."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab import lowcomm
from jaxlab.core import tree
from jaxlab.core.mesh import make_mesh
from jaxlab.lowcomm.communication import collectives
from tests.lowcomm import small

H, K = 3, small.WORKERS
KEY_BYTES = 8


def compiled(algo, *, unit="round", mesh=True, params=None, batch=None):
    """(jitted call, state, batch, compiled program) of an algorithm on four devices, a worker each, or on one."""
    mesh = make_mesh({"worker": K}) if mesh else None
    state = algo.init(small.params() if params is None else params, K, mesh=mesh)
    rows = small.batch(0, steps=H if unit == "round" else None) if batch is None else batch
    rows = small.place(rows, mesh, "worker")
    call = jax.jit(getattr(algo, unit)(small.loss_fn, mesh=mesh), donate_argnums=0)
    return call, state, rows, call.lower(state, rows, jax.random.key(0)).compile()


def check_calls(call, state, rows):
    """Three calls: one compilation, every input buffer given up, outputs laid out as the inputs."""
    for i in range(3):
        before = state
        state, _ = call(state, rows, jax.random.key(i))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before)), "the state must be donated"
        for path, old, new in zip(tree.leaf_paths(state), jax.tree.leaves(before), jax.tree.leaves(state), strict=True):
            assert old.sharding == new.sharding, path
    assert call._cache_size() == 1, "one compilation a configuration"


def a_device(tree_of_arrays):
    """Bytes of a tree's arrays on the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree_of_arrays))


def check_memory(program, state, rows):
    """The program takes the state, the batch and (where it is used) a key, and writes the new state over the old."""
    memory = program.memory_analysis()
    assert memory.argument_size_in_bytes - a_device(state) - a_device(rows) in (0, KEY_BYTES)
    assert memory.alias_size_in_bytes == a_device(state)


def adamw():
    return optax.adamw(0.02)


@pytest.mark.parametrize(
    "algo",
    [
        lowcomm.LowComm(adamw(), lowcomm.isoloco(1.2, 0.5), H),
        lowcomm.LowComm(adamw(), lowcomm.diloco(0.7, 0.9), H),
        lowcomm.LowComm(adamw(), lowcomm.local_sgd(), H, "iso_c"),
    ],
    ids=["isoloco", "diloco", "iso_c"],
)
def test_a_round_is_one_all_reduce_of_the_parameters(algo):
    call, state, rows, program = compiled(algo)
    found = collectives(program.as_text())
    assert {c.kind for c in found} == {"all-reduce"} and {c.dtypes for c in found} == {("f32",)}
    assert not any(c.in_loop for c in found), "the inner steps must not communicate"
    assert sum(c.nbytes for c in found) == small.NBYTES == algo.bytes_per_round(small.params(), K)["payload"]
    check_memory(program, state, rows)
    check_calls(call, state, rows)


def test_weights_and_dropping_workers_cost_a_few_bytes():
    """A weighted mean over two workers a device, and a mean without the workers that diverged."""
    algo, mesh = lowcomm.LowComm(adamw(), lowcomm.diloco(0.7, 0.9), H), make_mesh({"worker": 2})
    state = algo.init(small.params(), K, mesh=mesh)
    call = jax.jit(algo.round(small.loss_fn, mesh=mesh), donate_argnums=0)
    args = (small.place(small.batch(0, steps=H), mesh, "worker"), jax.random.key(0), jnp.ones(K))
    weighted = call.lower(state, *args).compile()
    *_, dropping = compiled(lowcomm.LowComm(adamw(), lowcomm.diloco(0.7, 0.9), H, nonfinite="drop"))
    for program in (weighted, dropping):
        found = collectives(program.as_text())
        assert {c.kind for c in found} == {"all-reduce"} and not any(c.in_loop for c in found)
        # At most a flag and a weight a worker, and their sums.
        assert small.NBYTES <= sum(c.nbytes for c in found) <= small.NBYTES + 8 * (K + 1)


@pytest.mark.parametrize("name", ["int8", "int4", "e3m0"])
def test_compressed_rounds_gather_codes(name):
    algo = lowcomm.LowComm(adamw(), lowcomm.diloco(0.7, 0.9), H, compress=lowcomm.Compression(name, block_size=8))
    call, state, rows, program = compiled(algo)
    found = collectives(program.as_text())
    assert {c.kind for c in found} == {"all-gather"}, "no full-precision all-reduce beside the codes"
    assert not any(c.in_loop for c in found)
    sent = {kind: sum(c.nbytes for c in found if c.dtypes == (kind,)) for kind in ("u8", "f32")}
    blocks = 3 + 1 + 1  # 24, 8 and 2 elements in blocks of 8
    assert sent == {"u8": K * blocks * (8 if name == "int8" else 4), "f32": K * blocks * 4}
    assert sum(c.nbytes for c in found) == K * algo.bytes_per_round(small.params(), K)["payload"]
    assert algo.bytes_per_round(small.params(), K)["ring"] == (K - 1) * sum(sent.values()) // K
    check_memory(program, state, rows)
    if name == "int8":
        check_calls(call, state, rows)


@pytest.mark.parametrize("name", ["dare", "ties"])
def test_merging_by_sums_needs_no_gather(name):
    """TIES sums signs, matching entries and their counts: three times the parameters."""
    algo = lowcomm.LowComm(adamw(), lowcomm.local_sgd(), H, name)
    *_, program = compiled(algo)
    found = collectives(program.as_text())
    assert {c.kind for c in found} == {"all-reduce"} and not any(c.in_loop for c in found)
    payload = algo.bytes_per_round(small.params(), K)["payload"]
    assert sum(c.nbytes for c in found) == payload == small.NBYTES * (3 if name == "ties" else 1)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["mean", "ties", "iso_c", "tsv_m"])
def test_half_precision_parameters(name, dtype):
    """Sums over workers run, and travel, in float32; what is gathered travels as it is."""
    params = jax.tree.map(lambda p: p.astype(dtype), small.params())
    algo = lowcomm.LowComm(optax.sgd(0.1), lowcomm.local_sgd(), H, name)
    batch = jax.tree.map(lambda x: jnp.asarray(x, dtype), small.batch(0, steps=H))
    *_, program = compiled(algo, params=params, batch=batch)
    found = collectives(program.as_text())
    payload = algo.bytes_per_round(params, K)["payload"]
    gathers = name == "tsv_m"
    assert payload == small.NBYTES * {"ties": 3, "tsv_m": 0.5}.get(name, 1)
    assert sum(c.nbytes for c in found) == payload * (K if gathers else 1)
    assert {c.kind for c in found} == {"all-gather" if gathers else "all-reduce"}


@pytest.mark.parametrize("algo", [lowcomm.LowComm(adamw(), lowcomm.local_sgd(), H), lowcomm.DataParallel(adamw())])
def test_bytes_of_no_workers(algo):
    more = () if isinstance(algo, lowcomm.LowComm) else (H,)
    with pytest.raises(ValueError, match="num_workers must be >= 1, got 0"):
        algo.bytes_per_round(small.params(), 0, *more)


@pytest.mark.parametrize("name", ["tsv_m", "iso_cts"])
def test_merging_that_compares_workers_gathers_their_deltas(name):
    algo = lowcomm.LowComm(adamw(), lowcomm.local_sgd(), H, name)
    assert algo.aggregate.needs_all
    *_, program = compiled(algo)
    found = collectives(program.as_text())
    assert {c.kind for c in found} == {"all-gather"} and not any(c.in_loop for c in found)
    assert sum(c.nbytes for c in found) == K * algo.bytes_per_round(small.params(), K)["payload"] == K * small.NBYTES


def test_data_parallel_reduces_the_gradients_in_every_step():
    algo = lowcomm.DataParallel(adamw())
    call, state, rows, program = compiled(algo)
    found = [c for c in collectives(program.as_text()) if c.nbytes > 4]  # the loss itself is one number
    assert {c.kind for c in found} == {"all-reduce"} and all(c.in_loop for c in found)
    once = sum(c.nbytes for c in found)
    assert small.NBYTES <= once <= small.NBYTES + 4
    assert algo.bytes_per_round(small.params(), K, H)["payload"] == H * small.NBYTES
    check_memory(program, state, rows)
    check_calls(call, state, rows)


def computations(hlo):
    """Name -> lines of every computation of a program, and the name of the entry."""
    found, entry, name = {}, None, None
    for line in hlo.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            name = head[2]
            entry = name if head[1] else entry
            found[name] = []
        elif name is not None:
            found[name].append(line)
    return found, entry


def guarded(hlo):
    """Names of the computations with a collective, and whether each is reached through a conditional only."""
    found, entry = computations(hlo)
    callers = {name: [] for name in found}
    for name, lines in found.items():
        for line in lines:
            for called in set(re.findall(r"%([\w.\-]+)", line)) & set(found):
                callers[called].append((name, " conditional(" in line))

    @functools.cache
    def safe(name):
        if name == entry:
            return False
        return bool(callers[name]) and all(branch or safe(caller) for caller, branch in callers[name])

    return {name: safe(name) for name, lines in found.items() if collectives("\n".join(lines))}


def test_a_single_step_communicates_in_the_branch_of_the_schedule_only():
    groups = lowcomm.Fragments.by_patterns(small.params(), (["hidden"], ["out"]))
    algo = lowcomm.LowComm(adamw(), lowcomm.diloco(0.7, 0.9), 4, "mean", groups)
    call, state, rows, program = compiled(algo, unit="step")
    text = program.as_text()
    branches = guarded(text)
    assert len(branches) == 2 and all(branches.values()), branches
    by_branch = sorted(sum(c.nbytes for c in collectives("\n".join(computations(text)[0][b]))) for b in branches)
    assert by_branch == [4 * (4 * 2 + 2), 4 * 6 * 4], "each branch reduces its fragment"
    assert {c.kind for c in collectives(text)} == {"all-reduce"}
    check_memory(program, state, rows)
    check_calls(call, state, rows)


def test_a_collective_outside_the_branches_would_be_seen():
    """The check above finds one that every step does."""
    *_, program = compiled(lowcomm.DataParallel(adamw()), unit="step")
    assert list(guarded(program.as_text()).values()).count(False) >= 1


WIDE = {"w": jnp.zeros((256, 64)), "b": jnp.zeros(64)}


def wide_loss(params, batch, key):
    return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


@pytest.mark.parametrize("unit", ["round", "step"])
def test_memory_is_k_workers_and_one_outer_state(unit):
    """State: K (parameters + inner state) + parameters + outer state. Beside it less than two copies of the workers."""
    algo = lowcomm.LowComm(adamw(), lowcomm.diloco(0.7, 0.9), H)
    state = algo.init(WIDE, K)
    n = tree.nbytes(WIDE)
    inner = 2 * n + 4  # two moments and a count
    assert a_device(state) == K * (n + inner) + n + n + 4  # merged parameters, momentum, step
    lead = (K, H) if unit == "round" else (K,)
    rows = jnp.ones((*lead, 2, 256))
    call = jax.jit(getattr(algo, unit)(wide_loss), donate_argnums=0)
    program = call.lower(state, rows, jax.random.key(0)).compile()
    check_memory(program, state, rows)
    memory = program.memory_analysis()
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 2000, "what comes out beside the state is metrics"
    assert memory.temp_size_in_bytes <= 2 * K * n, "gradients and pseudo-gradients: measured 1.5 K n"


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("%r = f32[4]{0} all-reduce(f32[4]{0} %x), to_apply=%add", ("all-reduce", 16, ("f32",))),
        (
            "%r = (f32[2]{0}, f32[2]{0}, s32[]{}, f32[], f32[], /*index=5*/f32[3]{0}) all-reduce(%a, %b), to_apply=%s",
            ("all-reduce", 8 + 8 + 4 + 4 + 4 + 12, ("f32", "s32")),
        ),
        ("%s = (bf16[4]{0}, bf16[16]{0}) all-gather-start(bf16[4]{0} %x), dim=0", ("all-gather", 32, ("bf16",))),
        (
            "%s = (f32[2]{0}, bf16[3]{0}, f32[4]{0}, bf16[6]{0}) all-gather-start(%a, %b), dimensions={0}",
            ("all-gather", 16 + 12, ("f32", "bf16")),
        ),
        (
            "%s = ((f32[2]{0}, f32[3]{0}), (f32[4]{0}, f32[6]{0})) all-gather-start(%a, %b), dimensions={0}",
            ("all-gather", 16 + 24, ("f32",)),
        ),
        ("%s = f32[1000]{0} all-reduce-start(%a), to_apply=%add", ("all-reduce", 4000, ("f32",))),
        ("%ar = (f32[1000]{0}, f32[3000]{0}) all-reduce-start(%a, %b)", ("all-reduce", 16000, ("f32",))),
        ("%p = (f32[128], f32[128], u32[], u32[]) collective-permute-start(%a)", ("collective-permute", 512, ("f32",))),
        ("%p = (u32[], u32[], u32[], u32[]) collective-permute-start(%a)", ("collective-permute", 4, ("u32",))),
        ("%p = (f32[128], f32[128]) collective-permute-start(%a)", ("collective-permute", 512, ("f32",))),
        ("%s = u8[3,5]{1,0} all-gather(u8[1,5]{1,0} %x)", ("all-gather", 15, ("u8",))),
        ("%s = f8e4m3fn[8]{0} reduce-scatter(f8e4m3fn[32]{0} %x)", ("reduce-scatter", 8, ("f8e4m3fn",))),
        ("%s = pred[8]{0} collective-permute(pred[8]{0} %x)", ("collective-permute", 8, ("pred",))),
        ("%d = f32[16]{0} all-gather-done(%s)", None),
        ("%g = f32[4]{0} get-tuple-element(%all-reduce.3), index=0", None),
    ],
)
def test_reading_hlo(line, wanted):
    found = collectives("ENTRY %main (x: f32[4]) -> f32[4] {\n  " + line + "\n}")
    assert [(c.kind, c.nbytes, c.dtypes) for c in found] == ([] if wanted is None else [wanted])
    inner = collectives("%body (x: f32[4]) -> f32[4] {\n  " + line + "\n}\nENTRY %main () -> f32[] {\n}")
    assert all(c.in_loop for c in inner) and not any(c.in_loop for c in found)


def test_bytes_on_a_ring():
    """2 (K-1)/K payload for an all-reduce, (K-1) payload for a gather; nothing for one worker."""
    params = {"w": np.zeros((10, 30), np.float32)}
    mean = lowcomm.LowComm(adamw(), lowcomm.local_sgd(), H)
    assert mean.bytes_per_round(params, 8) == {"payload": 1200, "ring": 2100}
    assert mean.bytes_per_round(params, 1)["ring"] == 0
    gather = lowcomm.LowComm(adamw(), lowcomm.local_sgd(), H, "tsv_m")
    assert gather.bytes_per_round(params, 8) == {"payload": 1200, "ring": 8400}
    codes = lowcomm.LowComm(adamw(), lowcomm.local_sgd(), H, compress=lowcomm.Compression("int4"))
    assert codes.bytes_per_round(params, 8) == {"payload": 2 * (128 + 4), "ring": 7 * 264}
    assert lowcomm.DataParallel(adamw()).bytes_per_round(params, 8, 15) == {"payload": 18000, "ring": 31500}
