"""MoLF: its trace against NumPy, its limits against optax, routing by module and layer, devices, wrappers, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab import peft
from jaxlab.core import mesh
from jaxlab.core.checkpoint import Checkpointer
from jaxlab.core.tree import leaf_paths
from jaxlab.peft import Member, Mixture, Score, mixture, molf, routing, shares
from jaxlab.peft.molf import EPD
from tests.peft.small import KEY, PARAMS, X, close, distance, f
from tests.reference import molf_np

SPECS = [
    peft.match(PARAMS, [peft.Rule("kernel", peft.LoRA(2, alpha=4))]),
    peft.match(PARAMS, [peft.Rule("kernel", peft.LoRA(3, alpha=6, rs=True))]),
]
MODULES = ("in/kernel", "out/kernel")


def noise(like, seed, size=1.0):
    """A tree of random numbers with the shapes of another."""
    leaves, structure = jax.tree.flatten(like)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(structure, [jnp.asarray(size * rng.standard_normal(x.shape), x.dtype) for x in leaves])


def start(experts=2, base=True, extra=True):
    """A mixture whose LoRAs are not at zero, and a parameter that belongs to no module."""
    params = {**PARAMS, "norm": {"scale": jnp.linspace(0.5, 1, 8)}} if extra else PARAMS
    made = mixture(KEY, params, SPECS[:experts], base=base)
    return Mixture(made.base, noise(made.experts, 5, 0.3), made.specs)


def reference_layout(trained):
    """(modules, plain) of a mixture as the reference wants them."""
    modules = {}
    for module in MODULES:
        layer = module.split("/")[0]
        base = [trained.base[layer]] if trained.base is not None else []
        modules[module] = base + [expert[module] for expert in trained.experts]
    return modules, {"scale": trained.base["norm"]["scale"]} if trained.base is not None else {}


def gradients(trained, t):
    """Gradients with a drift, whose size differs between leaves and changes with time, so that winners change.

    A part of the first is 0: PFN's elements m / sqrt(v) are all the same after one step, and its scores equal.
    """
    drift = noise(trained, 7)
    sizes = iter(np.exp(2.0 * np.random.default_rng(t // 3).standard_normal(99)))
    out = jax.tree.map(lambda g, d: next(sizes) * (g + d), noise(trained, 100 + t), drift)
    return jax.tree.map(lambda g: jnp.where(g > 0, g, 0) if g.shape[-1] in (2, 3, 8) else g, out) if t == 0 else out


@pytest.mark.parametrize("base", [True, False], ids=["molf", "efficient"])
@pytest.mark.parametrize(("score", "topk"), [("epd", 1), ("epd", 2), ("pfn", 1)])
def test_twenty_steps_equal_numpy(base, score, topk):
    """Parameters, moments, scores and winners, with schedules, decay, and biases in the base's expert."""
    trained = start(base=base)
    full = optax.linear_schedule(1e-2, 2e-3, 15)
    lora = [optax.linear_schedule(3e-2, 1e-2, 10), 2e-2]
    tx = molf(
        full if base else None, lora, topk=topk, score=score, b2=0.9, weight_decay_full=0.1, weight_decay_lora=0.01
    )
    exact = [lambda t: 1e-2 + min(t, 15) / 15 * -8e-3, lambda t: 3e-2 + min(t, 10) / 10 * -2e-2, lambda t: 2e-2]
    modules, plain = reference_layout(trained)
    ref = molf_np.Optimizer(
        modules,
        plain,
        rates=exact if base else exact[1:],
        decays=[0.1, 0.01, 0.01] if base else [0.01, 0.01],
        plain_rate=exact[0],
        plain_decay=0.1,
        topk=topk,
        score=score,
        b2=0.9,
    )
    state, step, seen = tx.init(trained), jax.jit(tx.update), []
    for t in range(20):
        grads = gradients(trained, t)
        ref.step(*reference_layout(grads))
        updates, state = step(grads, state, trained)
        trained = optax.apply_updates(trained, updates)
        for module in MODULES:
            found = routing(state)[module]
            np.testing.assert_allclose(found.scores, ref.scores[module], rtol=1e-5)
            np.testing.assert_array_equal(found.winners, ref.winners[module])
            assert found.winners.sum() == topk
        seen.append(np.concatenate([ref.winners[module] for module in MODULES]))
    close(reference_layout(trained), (ref.modules, ref.plain), atol=1e-6)
    for tree, moments in ((state.mu, ref.m), (state.nu, ref.v)):
        own, own_plain = reference_layout(tree)
        for (module, e, name), want in ((k, x) for k, x in moments.items() if isinstance(k, tuple)):
            np.testing.assert_allclose(own[module][e][name], want, rtol=1e-5, atol=1e-6)
        for name, x in own_plain.items():
            np.testing.assert_allclose(x, moments[name], rtol=1e-5, atol=1e-6)
    # The trace would say little if the same expert won all the time.
    counts = np.sum(seen, axis=0)
    assert ((counts > 0) & (counts < 20)).sum() >= 4 or topk == len(trained.experts) + base
    for i, module in enumerate(MODULES):
        own = counts.reshape(2, -1)[i]
        np.testing.assert_array_equal(routing(state)[module].wins, own)
        np.testing.assert_allclose(shares(state)[module], own / 20)


def test_the_trace_depends_on_what_it_is_said_to_depend_on():
    """Negative controls: another score, rate, decay, or number of winners gives other parameters."""
    trained = start()

    def end(**changes):
        kwargs = {"lr_full": 1e-2, "lr_lora": 2e-2, "weight_decay_full": 0.1} | changes
        tx, p = molf(**kwargs), trained
        state, step = tx.init(p), jax.jit(tx.update)
        for t in range(12):
            updates, state = step(gradients(p, t), state, p)
            p = optax.apply_updates(p, updates)
        return p

    base = end()
    for changes in (
        {"score": "pfn"},
        {"topk": 2},
        {"lr_lora": 1e-2},
        {"lr_lora": [1e-2, 2e-2]},
        {"weight_decay_full": 0.0},
        {"b1": 0.8},
    ):
        assert distance(base, end(**changes)) > 1e-4, changes


def test_one_expert_is_adamw():
    """Every module has one expert, which wins always: optax's AdamW, up to how XLA fuses it."""
    pattern = r"(?P<module>in|out)/(kernel|bias)$"
    params = {**PARAMS, "norm": {"scale": jnp.linspace(0.5, 1, 8)}}
    tx = molf(1e-2, groups=[pattern], weight_decay_full=0.1)
    decays = jax.tree.map(lambda x: x.ndim > 1, params)
    adamw = optax.adamw(1e-2, weight_decay=0.1, mask=decays)
    one, two = (params, tx.init(params)), (params, adamw.init(params))
    for t in range(12):
        grads = noise(params, t)
        after = []
        for p, s, update in ((*one, tx.update), (*two, adamw.update)):
            updates, s = jax.jit(update)(grads, s, p)
            after.append((optax.apply_updates(p, updates), s))
        one, two = after
    close(one[0], two[0], atol=1e-7)
    assert distance(one[0], params) > 0.05


def test_losers_neither_step_nor_decay_and_keep_their_moments():
    trained = start()
    tx = molf(1e-2, 2e-2, weight_decay_full=0.5, weight_decay_lora=0.5)
    state, step = tx.init(trained), jax.jit(tx.update)
    for t in range(1, 9):
        grads = gradients(trained, t)
        updates, after = step(grads, state, trained)
        moved = optax.apply_updates(trained, updates)
        for module in MODULES:
            winners = np.asarray(routing(after)[module].winners)
            parts = [reference_layout(x)[0][module] for x in (trained, moved, state.mu, after.mu)]
            for won, old, new, mu, new_mu in zip(winners, *parts, strict=True):
                for name in old:
                    assert bool((old[name] == new[name]).all()) == (not won), (t, module, name)
                    assert not (mu[name] == new_mu[name]).any()
        # What is in no module steps always.
        assert not (moved.base["norm"]["scale"] == trained.base["norm"]["scale"]).any()
        trained, state = moved, after


def test_gradients_are_those_of_the_sum():
    trained = start(extra=False)

    def plain(kernels, a, b):
        merged = {
            name: {
                "kernel": kernels[name] + 2 * a[0][name] @ b[0][name] + 6 / 3**0.5 * a[1][name] @ b[1][name],
                "bias": PARAMS[name]["bias"],
            }
            for name in ("in", "out")
        }
        return jnp.sum(jnp.sin(f(merged, X)))

    kernels = {name: PARAMS[name]["kernel"] for name in ("in", "out")}
    a, b = (
        [{name: expert[f"{name}/kernel"][part] for name in ("in", "out")} for expert in trained.experts]
        for part in ("a", "b")
    )
    want = jax.grad(plain, argnums=(0, 1, 2))(kernels, a, b)
    got = jax.grad(lambda m: jnp.sum(jnp.sin(f(m.merged(), X))))(trained)
    for name in ("in", "out"):
        np.testing.assert_allclose(got.base[name]["kernel"], want[0][name], atol=1e-4)
        for e in range(2):
            np.testing.assert_allclose(got.experts[e][f"{name}/kernel"]["a"], want[1][e][name], atol=1e-4)
            np.testing.assert_allclose(got.experts[e][f"{name}/kernel"]["b"], want[2][e][name], atol=1e-4)


def test_a_new_mixture_is_the_model_and_its_experts_differ():
    made = mixture(KEY, PARAMS, SPECS)
    close(f(made.merged(), X), f(PARAMS, X), atol=0)
    same = mixture(KEY, PARAMS, [SPECS[0], SPECS[0]], base=False)
    close(f(same.merged(PARAMS), X), f(PARAMS, X), atol=0)
    a, b = (expert["in/kernel"]["a"] for expert in same.experts)
    assert float(jnp.abs(a - b).max()) > 0.1
    assert same.base is None and len(jax.tree.leaves(same)) == 8


def test_rates_decide_who_wins():
    """Without signal in the gradients, EPD goes by the rates: the base at equal ones, the LoRA at a large one."""
    made = mixture(KEY, PARAMS, SPECS[:1])
    grads = jax.grad(lambda m: jnp.mean((f(m.merged(), X) - 1.0) ** 2))(made)
    for lora, winner in ((1e-3, 0), (1e-1, 1)):
        tx = molf(1e-3, lora)
        _, state = jax.jit(tx.update)(grads, tx.init(made), made)
        assert all(found.winners.tolist() == [winner == 0, winner == 1] for found in routing(state).values())
    # PFN does not know the rates.
    found = []
    for lora in (1e-3, 1e-1):
        tx = molf(1e-3, lora, score="pfn")
        found.append(routing(jax.jit(tx.update)(grads, tx.init(made), made)[1]))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_equal_scores_go_to_the_first():
    params = {"x": jnp.ones((2, 2)), "y": jnp.ones((2, 2)), "z": jnp.ones((2, 2))}
    number = {"x": 0, "y": 2, "z": 1}
    for topk, want in ((1, [True, False, False]), (2, [True, True, False])):
        tx = molf(0.1, 0.1, groups=lambda path: ("m", number[path]), topk=topk)
        updates, state = tx.update(params, tx.init(params), params)
        assert routing(state)["m"].winners.tolist() == want
        assert [bool((updates[k] != 0).all()) for k in "xzy"] == want


def test_own_scores():
    trained, grads = start(), gradients(start(), 0)
    by_function = molf(1e-2, 2e-2, score=EPD.element)
    by_pair = molf(1e-2, 2e-2, score=Score(lambda m, v: jnp.abs(m), lambda total, n, lr: total))
    state = by_function.update(grads, by_function.init(trained), trained)[1]
    named = molf(1e-2, 2e-2)
    want = named.update(grads, named.init(trained), trained)[1]
    jax.tree.map(np.testing.assert_array_equal, routing(state), routing(want))
    scores = routing(by_pair.update(grads, by_pair.init(trained), trained)[1])["in/kernel"].scores
    want_sum = sum(float(jnp.abs(0.1 * g).sum()) for g in jax.tree.leaves(grads.base["in"]))
    np.testing.assert_allclose(scores[0], want_sum, rtol=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
def test_every_layer_of_a_stack_is_routed_by_itself(axis):
    """Kernels on a stacked axis, as of scanned layers, do what as many single ones do."""
    layers = [jax.tree.map(lambda x, i=i: x * (1 + i), PARAMS["in"]) for i in range(3)]
    stacked = {"kernel": jnp.stack([x["kernel"] for x in layers], axis), "bias": jnp.stack([x["bias"] for x in layers])}
    one = mixture(KEY, stacked, [peft.match(stacked, [peft.Rule("kernel", peft.LoRA(2), stack_axes=(axis,))])])
    single = {str(i): x for i, x in enumerate(layers)}
    many = mixture(KEY, single, [peft.match(single, [peft.Rule("kernel", peft.LoRA(2))])])

    def split(tree):
        """A stacked tree as one of single layers."""
        own = [jax.tree.map(lambda x, i=i: x[i], tree.experts[0]["kernel"]) for i in range(3)]
        kernels = [jnp.take(tree.base["kernel"], i, axis) for i in range(3)]
        base = {str(i): {"bias": tree.base["bias"][i], "kernel": kernels[i]} for i in range(3)}
        return Mixture(base, ({f"{i}/kernel": x for i, x in enumerate(own)},), many.specs)

    tx = molf(1e-2, 2e-2, weight_decay_full=0.1, weight_decay_lora=0.1)
    p, q = one, split(one)
    s, t = tx.init(p), tx.init(q)
    step, seen = jax.jit(tx.update), []
    for i in range(6):
        grads = noise(one, i)
        loras = jax.tree.map(lambda g: g * jnp.array([0.1, 1.0, 3.0])[:, None, None], grads.experts)
        grads = Mixture(grads.base, loras, one.specs)
        updates, s = step(grads, s, p)
        p = optax.apply_updates(p, updates)
        updates, t = step(split(grads), t, q)
        q = optax.apply_updates(q, updates)
        found = routing(s)["kernel"]
        assert found.winners.shape == (3, 2)
        np.testing.assert_array_equal(found.winners, [routing(t)[f"{k}/kernel"].winners for k in range(3)])
        seen.append(np.asarray(found.winners)[:, 0])
    close(split(p), q, atol=1e-6)
    assert len({tuple(x) for x in np.transpose(seen)}) > 1, "all layers were routed alike"


def shardings(trained, m):
    """Matrices split along an axis of size 8 or 16, on all devices of the mesh; vectors whole."""

    def place(x):
        axis = next((i for i, n in enumerate(x.shape) if n % 8 == 0), None) if x.ndim > 1 else None
        return mesh.named(m, *(["x" if i == axis else None for i in range(x.ndim)]))

    return jax.tree.map(place, trained)


@pytest.mark.parametrize("devices", [2, 8])
def test_sharded_arrays_have_the_same_winners_everywhere(devices):
    trained = start()
    m = mesh.make_mesh({"x": devices})
    split = mesh.put(trained, shardings(trained, m))
    assert len(split.base["in"]["kernel"].sharding.device_set) == devices
    assert not split.base["in"]["kernel"].sharding.is_fully_replicated
    tx = molf(1e-2, 2e-2, weight_decay_full=0.1)
    one, many = (trained, tx.init(trained)), (split, jax.jit(tx.init)(split))
    step = jax.jit(tx.update)
    for t in range(6):
        grads = gradients(trained, t)
        both = []
        for (p, s), g in zip((one, many), (grads, mesh.put(grads, shardings(grads, m))), strict=True):
            updates, s = step(g, s, p)
            both.append((optax.apply_updates(p, updates), s))
        one, many = both
        for module in MODULES:
            winners = routing(many[1])[module].winners
            want = np.asarray(routing(one[1])[module].winners)
            shown = [np.asarray(shard.data) for shard in winners.addressable_shards]
            assert len(shown) == devices
            for data in shown:
                np.testing.assert_array_equal(data, want)
    close(one[0], jax.device_get(many[0]))
    assert not many[0].base["in"]["kernel"].sharding.is_fully_replicated


def test_shard_map_sums_over_what_it_is_told_to():
    """Inside shard_map a function sees a shard: with `shards` the winners are those of the whole arrays."""
    trained = start()
    m = mesh.make_mesh({"x": 2})
    specs = jax.tree.map(lambda s: s.spec, shardings(trained, m))
    split = {path for path, spec in zip(leaf_paths(trained), jax.tree.leaves(specs), strict=True) if "x" in spec}
    assert 0 < len(split) < len(leaf_paths(trained))
    grads = gradients(trained, 3)
    out = jax.sharding.PartitionSpec("x")

    def run(tx):
        def local(grads, params):
            updates, state = tx.update(grads, tx.init(params), params)
            found = {k: r.scores[None] for k, r in routing(state).items()}
            return updates, jax.tree.map(lambda x: jax.lax.pcast(x, "x", to="varying") if not_varying(x) else x, found)

        return jax.jit(jax.shard_map(local, mesh=m, in_specs=(specs, specs), out_specs=(specs, out), check_vma=False))(
            grads, trained
        )

    def not_varying(_):
        return False

    told = molf(1e-2, 2e-2, shards=lambda path: ("x",) if path in split else ())
    updates, scores = run(told)
    tx = molf(1e-2, 2e-2)
    want_updates, state = tx.update(grads, tx.init(trained), trained)
    close(jax.device_get(updates), want_updates, atol=1e-7)
    for module in MODULES:
        np.testing.assert_allclose(scores[module], np.stack([routing(state)[module].scores] * 2), rtol=1e-5)
    _, alone = run(tx)
    assert all(float(jnp.abs(alone[module][0] - alone[module][1]).max()) > 1e-5 for module in MODULES)


def test_inside_other_transformations():
    trained = start()
    grads = gradients(trained, 1)
    plain = molf(1e-2, 2e-2)
    want = plain.update(grads, plain.init(trained), trained)[0]

    injected = optax.inject_hyperparams(molf)(lr_full=1e-2, lr_lora=2e-2, topk=1)
    state = injected.init(trained)
    close(jax.jit(injected.update)(grads, state, trained)[0], want, atol=1e-7)
    state.hyperparams["topk"] = jnp.asarray(2, state.hyperparams["topk"].dtype)
    both = jax.jit(injected.update)(grads, state, trained)[1]
    assert all(found.winners.sum() == 2 for found in routing(both).values())

    chained = optax.chain(optax.clip_by_global_norm(1e6), molf(1e-2, 2e-2))
    close(chained.update(grads, chained.init(trained), trained)[0], want, atol=1e-7)

    labels = jax.tree.map(lambda x: "a", trained)
    labels = Mixture({**labels.base, "norm": {"scale": "b"}}, labels.experts, labels.specs)
    parts = optax.partition({"a": molf(1e-2, 2e-2), "b": optax.sgd(1.0)}, labels)
    got = parts.update(grads, parts.init(trained), trained)[0]
    close(got.experts, want.experts, atol=1e-7)
    close(got.base["norm"]["scale"], -grads.base["norm"]["scale"], atol=1e-7)

    every = optax.MultiSteps(molf(1e-2, 2e-2), 2)
    state, step = every.init(trained), jax.jit(every.update)
    updates, state = step(grads, state, trained)
    assert all(not x.any() for x in jax.tree.leaves(updates))
    close(step(grads, state, trained)[0], want, atol=1e-7)


def test_scan_and_vmap():
    trained = start()
    tx = molf(optax.linear_schedule(1e-2, 0.0, 9), 2e-2)
    grads = [gradients(trained, t) for t in range(4)]

    def loop(p):
        s = tx.init(p)
        for g in grads:
            updates, s = tx.update(g, s, p)
            p = optax.apply_updates(p, updates)
        return p, s

    def body(carry, g):
        updates, s = tx.update(g, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), s), None

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *grads)
    scanned = jax.jit(lambda p: jax.lax.scan(body, (p, tx.init(p)), stacked)[0])
    want = jax.jit(loop)(trained)
    close(scanned(trained), want, atol=1e-6)
    workers = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), trained)
    got = jax.jit(jax.vmap(loop))(workers)
    close(jax.tree.map(lambda x: x[0], got), want, atol=1e-6)


def test_narrow_parameters_have_wide_moments():
    trained = jax.tree.map(lambda x: x.astype(jnp.bfloat16), start())
    grads = jax.tree.map(lambda x: x.astype(jnp.bfloat16), gradients(start(), 0))
    tx = molf(1e-2, 2e-2)
    updates, state = tx.update(grads, tx.init(trained), trained)
    assert {x.dtype.name for x in jax.tree.leaves((state.mu, state.nu))} == {"float32"}
    assert {x.dtype.name for x in jax.tree.leaves(updates)} == {"bfloat16"}
    after = tx.update(grads, state, trained)[1]
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)


def test_training_lowers_the_loss_and_resumes(tmp_path):
    trained = mixture(KEY, PARAMS, SPECS)
    target = jnp.sin(3 * X)
    tx = molf(3e-3, 1e-2)

    @jax.jit
    def step(p, s):
        value, grads = jax.value_and_grad(lambda m: jnp.mean((f(m.merged(), X) - target) ** 2))(p)
        updates, s = tx.update(grads, s, p)
        return optax.apply_updates(p, updates), s, value

    state, values, kept = tx.init(trained), [], None
    for t in range(150):
        if t == 100:
            kept = {"trained": trained, "opt": state}
            checkpoints = Checkpointer(tmp_path / "checkpoints")
            checkpoints.save(t, kept)
            checkpoints.close()
        trained, state, value = step(trained, state)
        values.append(float(value))
    assert values[-1] < 0.1 * values[0]
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        back = checkpoints.restore(kept).state
    p, s = back["trained"], back["opt"]
    for _ in range(50):
        p, s, _ = step(p, s)
    jax.tree.map(np.testing.assert_array_equal, p, trained)
    assert sum(int(found.wins.sum()) for found in routing(state).values()) == 2 * 150


def test_efficient_has_no_base_in_what_is_trained():
    trained = start(base=False)
    tx = molf(lr_lora=1e-2)
    updates, state = tx.update(gradients(trained, 0), tx.init(trained), trained)
    assert {found.winners.shape for found in routing(state).values()} == {(2,)}
    ranks = [expert["in/kernel"]["a"].shape[1] for expert in updates.experts]
    assert ranks == [2, 3]
    grads = jax.grad(lambda m: jnp.sum(f(m.merged(PARAMS), X) ** 2))(trained)
    assert grads.base is None and all(bool(x.any()) for x in jax.tree.leaves(grads))


def group(pattern, tree=PARAMS):
    tx = molf(1e-3, 1e-3, groups=pattern)
    return tx.init(tree)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: molf(-1.0), "lr_full must be a finite number >= 0, a schedule or None, got -1.0"),
        (lambda: molf(1e-3, [1e-3, float("nan")]), "lr_lora must be a finite number"),
        (lambda: molf(1e-3, 1e-3, score="best"), r"score must be one of \('epd', 'pfn'\), .* got 'best'"),
        (lambda: molf(1e-3, 1e-3, topk=0), "topk must be >= 1, got 0"),
        (
            lambda: molf(1e-3, 1e-3, topk=4).init(start()),
            "topk must be from 1 to 3, .* of in/kernel, got 4",
        ),
        (lambda: molf(1e-3, 1e-3, b1=1.0), r"b1 must be in \[0, 1\), got 1.0"),
        (lambda: molf(1e-3, 1e-3, weight_decay_lora=-0.1), "weight_decay_lora must be finite and >= 0, got -0.1"),
        (lambda: molf(None, 1e-3).init(start()), "lr_full must be given: base/in/bias belongs to the base"),
        (lambda: molf(1e-3).init(start()), "lr_lora must be given: experts/0/in/kernel/a belongs to LoRA 1"),
        (lambda: molf(1e-3, [1e-3]).init(start()), "lr_lora has 1 rates, but experts/1/in/kernel/a belongs"),
        (
            lambda: group(["(?P<module>nothing)"]),
            r"groups\[0\], .*nothing.*, decides for no path; paths: in",
        ),
        (lambda: group(["in/kernel"]), r"groups\[0\] must have a group \(\?P<module>...\), got 'in/kernel'"),
        (lambda: group(["(?P<module>in)", None]), r"groups\[1\] must be a pattern"),
        (lambda: group(lambda path: None), "groups must put at least one leaf into a module"),
        (lambda: group(lambda path: ("m", -1)), r"expert of groups\('in/bias'\) must be >= 0, got -1"),
        (lambda: group(lambda path: ("m", 0, (2,))), r"in/bias: stack_axes must lie in shape \[16\], got \(2,\)"),
        (lambda: group(lambda path: ("m", 0, (0,))), "stacked axes of sizes"),
        (lambda: group(["(?P<module>e)"], {"e": jnp.ones((0, 3))}), "expert 0 of e has no numbers"),
        (lambda: mixture(KEY, PARAMS, SPECS[:1], base=False), "specs must hold at least 2 with a frozen base, got 1"),
        (lambda: start().merged(PARAMS), r"this mixture has a base of its own: merged\(\) takes none"),
        (lambda: start(base=False).merged(), r"this mixture has a frozen base: merged\(params\) needs it"),
        (lambda: routing((optax.EmptyState(),)), "opt_state must hold one state of molf, got 0"),
        (lambda: molf(1e-3, 1e-3).update(start(), molf(1e-3, 1e-3).init(start())), "molf's update needs params"),
    ],
)
def test_bad_values_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: molf(1e-3, 1e-3).init(PARAMS), "groups must be given for a tree that is no Mixture, got dict"),
        (lambda: group("in"), "groups must be a function of a path or a sequence of patterns, got 'in'"),
        (
            lambda: group(lambda path: "m"),
            r"groups\('in/bias'\) must give Member\(module, .* or None, got 'm'",
        ),
        (
            lambda: mixture(KEY, PARAMS, [peft.match(PARAMS, [peft.Rule("kernel", peft.PiSSA(2))])]),
            r"specs\[0\]: in/kernel has the method pissa r2, but experts must be LoRA",
        ),
    ],
)
def test_bad_types_are_named(make, words):
    with pytest.raises(TypeError, match=words):
        make()


def test_members_may_be_named_by_a_function():
    number = {"in/kernel": Member("one", 0), "out/kernel": Member("one", 1), "in/bias": None, "out/bias": None}
    tx = molf(1e-2, 1e-2, groups=number.__getitem__)
    updates, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    found = routing(state)["one"]
    moved = [bool(updates[name]["kernel"].any()) for name in ("in", "out")]
    assert moved == found.winners.tolist() and sum(moved) == 1
    assert updates["in"]["bias"].any()
