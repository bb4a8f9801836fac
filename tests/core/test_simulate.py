"""One scan over seeds equals a Python loop over steps and seeds, whatever the chunks, and compiles once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.core.progress import Progress
from jaxlab.core.simulate import rollout, simulate

KEY = jax.random.key(3)


def init(key):
    return {"x": jax.random.normal(key, (3,)), "count": jnp.int32(0)}


def step(carry, key, t):
    x = 0.9 * carry["x"] + jax.random.normal(key, (3,)) * (1 + t)
    return {"x": x, "count": carry["count"] + t}, (x.sum(), t)


def loop(steps, seed):
    """The definition, a step at a time."""
    init_key, loop_key = jax.random.split(jax.random.fold_in(KEY, seed))
    carry, outputs = init(init_key), []
    for t in range(steps):
        carry, output = step(carry, jax.random.fold_in(loop_key, t), jnp.int32(t))
        outputs.append(output)
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("seeds", [3, [0, 1, 2], np.arange(3), jnp.arange(3), (7, 2**32 - 1)])
def test_equals_a_python_loop(seeds):
    carry, outputs = rollout(init, step, key=KEY, steps=6, seeds=seeds)
    named = range(seeds) if isinstance(seeds, int) else [int(s) for s in seeds]
    assert outputs[0].shape == (len(named), 6)
    for index, seed in enumerate(named):
        expected = loop(6, seed)
        got = jax.tree.map(lambda leaf, i=index: leaf[i], (carry, outputs))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)
    assert_equal(simulate(init, step, key=KEY, steps=6, seeds=seeds), outputs)


def test_a_seed_does_not_depend_on_the_others():
    together = simulate(init, step, key=KEY, steps=5, seeds=[4, 9, 1])
    alone = simulate(init, step, key=KEY, steps=5, seeds=[9])
    assert_equal(jax.tree.map(lambda leaf: leaf[1:2], together), alone)
    other = simulate(init, step, key=jax.random.key(4), steps=5, seeds=[9])
    assert not np.array_equal(alone[0], other[0])


@pytest.mark.parametrize("chunk", [1, 2, 5, 10, 99])
def test_chunks_change_nothing(chunk):
    whole = rollout(init, step, key=KEY, steps=10, seeds=2)
    done = []
    assert_equal(rollout(init, step, key=KEY, steps=10, seeds=2, chunk=chunk, on_chunk=done.append), whole)
    assert done == [*range(chunk, 10, chunk), 10]


def test_compiles_once():
    traces = []

    def counted(carry, key, t):
        traces.append(t)
        return step(carry, key, t)

    simulate(init, counted, key=KEY, steps=8, seeds=2)
    assert len(traces) == 1
    simulate(init, counted, key=jax.random.key(1), steps=8, seeds=[5, 6])  # other numbers, same program
    assert len(traces) == 1
    simulate(init, counted, key=KEY, steps=24, seeds=2, chunk=8)  # and so are the chunks
    assert len(traces) == 1
    simulate(init, counted, key=KEY, steps=20, seeds=2, chunk=8)  # the last one is shorter
    assert len(traces) == 2


def test_runs_as_one_loop_and_not_unrolled():
    def total(key):
        return simulate(lambda k: jnp.zeros(()), lambda c, k, t: (c + 1, c), key=key, steps=1000, seeds=2)

    text = str(jax.make_jaxpr(total)(KEY))
    assert text.count("scan[") == 1 and len(text) < 10_000


def test_interrupts_between_chunks():
    done = []

    def stop(steps):
        done.append(steps)
        if steps == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(init, step, key=KEY, steps=10, seeds=2, chunk=2, on_chunk=stop)
    assert done == [2, 4]


def test_reports_to_progress(capsys):
    with Progress(6, label="bandit") as progress:
        simulate(init, step, key=KEY, steps=6, seeds=2, chunk=2, on_chunk=progress.update)
    assert [line[:15] for line in capsys.readouterr().err.splitlines()] == [f"bandit  step {n}/" for n in (2, 4, 6)]


def test_initial_and_step_keys_never_meet():
    def split_init(key):
        return jax.random.key_data(jax.random.split(key, 4))

    def show(carry, key, t):
        return carry, (jax.random.key_data(key), jax.random.key_data(jax.random.split(key, 2)))

    first, (keys, children) = rollout(split_init, show, key=KEY, steps=8, seeds=3)
    words = np.concatenate([np.asarray(a).reshape(-1, 2) for a in (first, keys, children)])
    assert len(np.unique(words, axis=0)) == len(words) == 3 * (4 + 8 + 16)


def test_carries_typed_keys_and_gives_outputs_of_any_kind():
    def keyed(carry, key, t):
        return jax.random.fold_in(carry, t), {"key": carry, "flag": t > 1, "none": None}

    final, outputs = rollout(lambda key: key, keyed, key=KEY, steps=4, seeds=2, chunk=2)
    assert final.shape == (2,) and outputs["key"].shape == (2, 4) and outputs["none"] is None
    assert outputs["flag"].tolist() == [[False, False, True, True]] * 2
    carry, nothing = rollout(
        init, lambda c, k, t: (c, None), key=KEY, steps=3, seeds=2, chunk=1, on_chunk=lambda n: None
    )
    assert nothing is None and carry["x"].shape == (2, 3)
    assert simulate(lambda k: 0.0, lambda c, k, t: (c + 1.0, c), key=KEY, steps=3, seeds=1).tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"steps": 0}, "steps must be >= 1, got 0"),
        ({"chunk": 0}, "chunk must be >= 1, got 0"),
        ({"seeds": 0}, "seeds must name at least one seed, got 0"),
        ({"seeds": []}, "seeds must name at least one seed"),
        ({"seeds": [1, -1]}, r"seeds must be in \[0, 2\*\*32\), got -1"),
        ({"seeds": [2**32]}, r"got 4294967296"),
        ({"seeds": [1, 2, 1]}, r"seeds must differ .* got \[1, 2, 1\]"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        simulate(init, step, **({"key": KEY, "steps": 2, "seeds": 2} | options))


def test_a_step_that_changes_the_carry_is_an_error():
    with pytest.raises(TypeError, match="carry"):
        simulate(init, lambda c, k, t: ({**c, "x": c["x"][:2]}, t), key=KEY, steps=2, seeds=1)


@pytest.mark.parametrize("outputs", [True, False])
def test_progress_waits_for_the_work(monkeypatch, outputs):
    events = []
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: events.append(len(jax.tree.leaves(tree)) > 0))
    counted = step if outputs else lambda c, k, t: (step(c, k, t)[0], None)
    simulate(init, counted, key=KEY, steps=4, seeds=2, chunk=2, on_chunk=events.append)
    assert events == [True, 2, True, 4]
