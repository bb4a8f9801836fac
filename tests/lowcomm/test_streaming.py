"""The schedule's table, partitions, and streaming rounds against NumPy and against plain DiLoCo."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab.core import tree
from jaxlab.lowcomm import Compression, Fragments, LowComm, Schedule, diloco, isoloco, local_sgd, resolve_specs
from jaxlab.lowcomm.streaming import Piece
from tests.lowcomm.problems import (
    adamw,
    assert_close,
    assert_same,
    flat,
    make_batches,
    make_params,
    post_init,
    run,
    worker,
)
from tests.reference import lowcomm_np as ref

K, H = 2, 6
PARAMS = make_params()
STACKED = make_params(layers=3, stacked=True)
BATCHES = make_batches(K, 3 * H)
SGD = optax.sgd(0.1)


def test_schedule_table():
    """P = 4, H = 12, V = 1: four fragments, one every three steps, each taken over one step later."""
    schedule = Schedule(12, 4, overlap=1)
    table = {t: schedule.at(t) for t in range(1, 17)}
    assert table == {
        1: (-1, -1), 2: (-1, -1), 3: (1, -1), 4: (-1, 1), 5: (-1, -1), 6: (2, -1), 7: (-1, 2), 8: (-1, -1),
        9: (3, -1), 10: (-1, 3), 11: (-1, -1), 12: (0, -1), 13: (-1, 0), 14: (-1, -1), 15: (1, -1), 16: (-1, 1),
    }  # fmt: skip


@pytest.mark.parametrize(
    "every, fragments, overlap", [(1, 1, 0), (5, 1, 4), (8, 4, 1), (10, 4, 0), (7, 7, 0), (9, 3, 2)]
)
def test_each_fragment_is_synchronised_and_applied_once_a_period(every, fragments, overlap):
    schedule = Schedule(every, fragments, overlap)
    assert schedule.period == fragments * schedule.stride
    start = 3 * schedule.period + 1
    steps = jnp.arange(start, start + schedule.period)
    sync, apply = map(np.asarray, jax.vmap(schedule.traced)(steps))
    assert sorted(sync[sync >= 0]) == sorted(apply[apply >= 0]) == list(range(fragments))
    for t, f in zip(np.asarray(steps), sync, strict=True):
        if f >= 0:
            assert schedule.at(int(t) + overlap)[1] == f
    assert not any(f >= 0 for t in range(1, schedule.stride) for f in schedule.at(t))


@pytest.mark.parametrize(
    "options, message",
    [
        ((0,), "sync_every must be >= 1 inner step, got 0"),
        ((4, 0), "fragments must be >= 1, got 0"),
        ((3, 4), "sync_every=3 is below the number of fragments=4"),
        ((12, 4, 3), r"overlap must be in \[0, 3\)"),
        ((12, 4, -1), r"overlap must be in \[0, 3\).*got -1"),
    ],
)
def test_bad_schedules(options, message):
    with pytest.raises(ValueError, match=message):
        Schedule(*options)


def test_period_must_be_what_was_asked_for():
    with pytest.raises(ValueError, match=r"sync_every=10 is not a multiple .* fragments=3; the nearest period is 9"):
        LowComm(SGD, local_sgd(), 10, fragments=Fragments.by_layer(PARAMS, 3))


def covered(fragments, params):
    """How often each element of each leaf is in a fragment."""
    counts = jax.tree.map(lambda p: np.zeros(p.shape, int), params)
    flat_counts = dict(zip(tree.leaf_paths(counts), jax.tree.leaves(counts), strict=True))
    for group in fragments.pieces:
        for path, rows in group:
            flat_counts[path][slice(None) if rows is None else list(rows)] += 1
    return flat_counts


@pytest.mark.parametrize("pattern", ["strided", "sequential"])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_by_layer_covers_every_leaf_once_and_splits_no_matrix(n, stacked, pattern):
    params = make_params(layers=4, stacked=stacked)
    fragments = Fragments.by_layer(params, n, pattern=pattern, stacked=stacked)
    assert len(fragments) == n
    assert all((count == 1).all() for count in covered(fragments, params).values())
    shapes = flat(params)
    for f in range(n):
        for path, leaf in fragments.take(params, f).items():
            assert leaf.shape[-2:] == shapes[path].shape[-2:] or path == "layers/b"
    # A layer's weight and bias travel together, and layers are spread as evenly as can be.
    sizes = [len([p for p in fragments.pieces[f] if "layers" in p.path]) for f in range(n)]
    assert n == 1 or stacked or (sizes[0] == 0 and max(sizes) - min(sizes[1:]) <= 2)


def test_by_layer_patterns():
    params = make_params(layers=4)
    paths = lambda fragments: [{p.path.split("/")[1] for p in group} for group in fragments.pieces[1:]]  # noqa: E731
    assert paths(Fragments.by_layer(params, 3)) == [{"0", "2"}, {"1", "3"}]
    assert paths(Fragments.by_layer(params, 3, pattern="sequential")) == [{"0", "1"}, {"2", "3"}]
    stacked = make_params(layers=4, stacked=True)
    rows = [{p.rows for p in group} for group in Fragments.by_layer(stacked, 3, stacked=True).pieces]
    assert rows == [{None}, {(0, 2)}, {(1, 3)}]


@pytest.mark.parametrize("stacked", [False, True])
def test_take_and_put_are_inverse(stacked):
    params = STACKED if stacked else PARAMS
    fragments = Fragments.by_layer(params, 3, stacked=stacked)

    def check(whole, lead):
        rebuilt = jax.tree.map(lambda leaf: leaf * jnp.nan, whole)
        parts = [fragments.take(whole, f, lead=lead) for f in range(3)]
        for f in range(3):
            rebuilt = fragments.put(rebuilt, f, parts[f], lead=lead)
        changed = fragments.put(whole, 1, jax.tree.map(jnp.zeros_like, parts[1]), lead=lead)
        return rebuilt, parts, [fragments.take(changed, f, lead=lead) for f in range(3)]

    for lead in (0, 1):
        whole = params if lead == 0 else tree.broadcast_leading(params, 2)
        rebuilt, parts, changed = jax.jit(check, static_argnums=1)(whole, lead)
        assert_same(rebuilt, whole)
        assert_same((changed[0], changed[2]), (parts[0], parts[2]))
        assert not any(leaf.any() for leaf in jax.tree.leaves(changed[1]))


def test_by_patterns():
    fragments = Fragments.by_patterns(PARAMS, [[r"^embed", r"^head"], [r"/b$"], [r"^layers/.*/w$"]])
    assert [[p.path for p in group] for group in fragments.pieces] == [
        ["embed/w", "head/w"], ["layers/0/b", "layers/1/b"], ["layers/0/w", "layers/1/w"],
    ]  # fmt: skip


def by_layer(params, n, **options):
    return lambda: Fragments.by_layer(params, n, **options)


@pytest.mark.parametrize(
    "make, message",
    [
        (by_layer(PARAMS, 0), "n must be >= 1, got 0"),
        (by_layer(PARAMS, 4), "n=4 fragments need at least 3 layers"),
        (by_layer(STACKED, 5, stacked=True), "n=5 fragments need at least 4 layers (fragment 0 holds the rest), got 3"),
        (by_layer(PARAMS, 2, pattern="random"), "pattern must be one of ('strided', 'sequential'), got 'random'"),
        (by_layer(PARAMS, 2, layers="blocks/"), "layers='blocks/' matches no leaf; paths are ['embed/w'"),
        (by_layer({"layers": PARAMS["layers"]}, 2), "matches every leaf, which leaves fragment 0 empty"),
        (by_layer({"a": jnp.ones(1), "layers": {"s": jnp.ones(())}}, 2, stacked=True), "no leading axis of layers"),
        (lambda: Fragments.by_patterns(PARAMS, [["embed"], ["head"]]), "leaf 'layers/0/b' is in no fragment"),
        (lambda: Fragments.by_patterns(PARAMS, [["embed"], ["."]]), "leaf 'embed/w' is in more than one fragment"),
        (lambda: Fragments.by_patterns(PARAMS, [["."], ["tail"]]), "pattern 'tail' matches no leaf"),
        (lambda: Fragments.by_patterns(PARAMS, [["."], []]), "a fragment holds no leaf"),
        (
            lambda: Fragments(((Piece("w", (0, 1)),), (Piece("w", (1, 2)),))).check({"w": jnp.ones((3, 1))}),
            "leaf 'w' is in more than one fragment",
        ),
        (
            lambda: Fragments(((Piece("w", (0,)),), (Piece("w", (1,)),))).check({"w": jnp.ones((3, 1))}),
            "leaf 'w' has 3 layers, its fragments hold [0, 1]",
        ),
        (
            lambda: Fragments(((Piece("w", (0,)), Piece("w", (1,))),)).check({"w": jnp.ones((2, 1))}),
            "a fragment holds two pieces of one leaf",
        ),
        (lambda: Fragments(((Piece("w", (0,)),),)).check({"w": jnp.ones(())}), "leaf 'w' has no axis of layers"),
        (lambda: Fragments(((Piece("w"), Piece("v")),)).check({"w": jnp.ones(1)}), "'v' is not among the parameters"),
        (
            lambda: Fragments.whole(p := {"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}}).check(p),
            "two leaves have the path 'a/b'",
        ),
        (lambda: LowComm(SGD, local_sgd(), 2, fragments=Fragments.whole(PARAMS)).init(STACKED, 1), "'layers/b'"),
        (lambda: LowComm(SGD, local_sgd(), 2, fragments=Fragments.by_layer(PARAMS, 3)), "sync_every=2 is below"),
        (lambda: LowComm(SGD, local_sgd(), 6, fragments=Fragments.by_layer(PARAMS, 3), overlap=2), "overlap must be"),
    ],
)  # fmt: skip
def test_bad_fragments(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def oracle(params, fragments, **options):
    pieces = [[(piece.path, piece.rows) for piece in group] for group in fragments.pieces]
    options = {"inner": lambda: ref.AdamW(lambda t: 0.01), "period": H, "pieces": pieces} | options
    return ref.train(flat(params), np.float64(BATCHES["x"]), np.float64(BATCHES["y"]), **options)


def test_streaming_equals_numpy_by_round_and_by_step():
    """Three fragments, applied one step late, half mixed: two programs, one trajectory, the oracle's."""
    fragments = Fragments.by_layer(PARAMS, 3)
    algo = LowComm(adamw(), diloco(0.7, 0.9), H, fragments=fragments, overlap=1, mix=0.5)
    expected = oracle(PARAMS, fragments, overlap=1, mix=0.5, outer=lambda: ref.OuterStep(0.7, 0.9, True, False))
    state, metrics = run(algo, algo.init(PARAMS, K), BATCHES)
    assert_close(state.params, expected["params"])
    for k in range(K):
        assert_close(worker(state, k), expected["workers"][k])
    stepwise, by_step = run(algo, algo.init(PARAMS, K), BATCHES, unit="step")
    assert_same(stepwise, state)
    np.testing.assert_array_equal(by_step["loss"], np.moveaxis(metrics["loss"], 1, 2).reshape(-1, K))
    for name in ("delta_sq", "merged_sq"):
        rounds = by_step[name].reshape(3, H, *by_step[name].shape[1:])
        np.testing.assert_allclose(rounds.sum(1), metrics[name], rtol=1e-6)
        busy = (rounds.reshape(3, H, -1) > 0).any((0, 2))
        np.testing.assert_array_equal(busy, [False, True, False, True, False, True])  # dh = 2
    assert (by_step["nonfinite_leaf"] == -1).all()


def test_stacked_layers_with_isotropisation_equal_numpy():
    """A pattern that only some fragments match is resolved on the whole tree."""
    fragments = Fragments.by_layer(STACKED, 3, stacked=True)
    patterns = {r"^layers/w$": 1}
    with pytest.raises(ValueError, match="matches no leaf"):
        LowComm(SGD, isoloco(specs=patterns), H, fragments=fragments).init(STACKED, K)
    resolved = resolve_specs(STACKED, patterns | {r"^layers/b$": 2})
    outer = isoloco(1.2, 0.6, specs=lambda path, leaf: resolved[path])
    algo = LowComm(SGD, outer, H, fragments=fragments)

    class Layers(ref.OuterStep):
        def iso(self, a):  # the stacked biases are rank 2 but not a matrix
            return a if a.shape[-1] == 4 and a.ndim == 2 and a.shape[0] < 3 else super().iso(a)

    expected = oracle(STACKED, fragments, inner=lambda: ref.SGD(lambda t: 0.1),
                      outer=lambda: Layers(1.2, 0.6, True, True))  # fmt: skip
    state, _ = run(algo, algo.init(STACKED, K), BATCHES)
    assert_close(state.params, expected["params"])


@pytest.mark.parametrize("layers", [r"(layers|blocks)/", r"^(?:layers|(blocks))/", "layers/"])
def test_layers_with_groups_of_their_own(layers):
    params = {"embed": jnp.zeros(2), "layers": {str(i): {"w": jnp.zeros((2, 2))} for i in range(2)}}
    pieces = Fragments.by_layer(params, 3, layers=layers).pieces
    assert [[piece.path for piece in group] for group in pieces] == [["embed"], ["layers/0/w"], ["layers/1/w"]]


def test_patterns_that_are_no_regular_expressions():
    params = {"embed": jnp.zeros(2), "layers": {"0": jnp.zeros((2, 2))}}
    with pytest.raises(ValueError, match=r"layers must be a regular expression, got '\(layers/'"):
        Fragments.by_layer(params, 2, layers="(layers/")
    with pytest.raises(ValueError, match=r"fragment pattern must be a regular expression, got '\['"):
        Fragments.by_patterns(params, [["embed"], ["["]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_every": 2.0}, "sync_every must be an integer, got 2.0"),
        ({"sync_every": True}, "sync_every must be an integer, got True"),
        ({"fragments": "2"}, "fragments must be an integer, got '2'"),
        ({"overlap": 1.5}, "overlap must be an integer, got 1.5"),
    ],
)
def test_steps_are_integers(options, message):
    fine = {"sync_every": np.int64(3), "fragments": 1, "overlap": np.int32(1)}
    post_init(Schedule, **fine)
    with pytest.raises(TypeError, match=message):
        post_init(Schedule, **(fine | options))


def test_one_fragment_without_overlap_is_plain_diloco_bit_for_bit():
    plain = LowComm(adamw(), diloco(0.7, 0.9), H)
    streaming = LowComm(adamw(), diloco(0.7, 0.9), H, fragments=Fragments.whole(PARAMS))
    expected, losses = run(plain, plain.init(PARAMS, K), BATCHES)
    state, metrics = run(streaming, streaming.init(PARAMS, K), BATCHES, unit="step")
    assert_same(state._replace(outer_state=()), expected._replace(outer_state=()))
    np.testing.assert_array_equal(metrics["loss"], np.moveaxis(losses["loss"], 1, 2).reshape(-1, K))


def test_mix_of_one_leaves_the_workers_alone():
    fragments = Fragments.by_layer(PARAMS, 3)
    algo = LowComm(SGD, diloco(0.7, 0.9), H, fragments=fragments, mix=1)
    state, _ = run(algo, algo.init(PARAMS, K), BATCHES, unit="step")
    alone = LowComm(SGD, local_sgd(), 10**6)
    expected, _ = run(alone, alone.init(PARAMS, K), BATCHES, unit="step")
    assert_same(state.worker_params, expected.worker_params)
    assert float(jnp.abs(state.params["head"]["w"] - PARAMS["head"]["w"]).max()) > 1e-3


def test_overlap_without_fragments_applies_late():
    algo = LowComm(SGD, local_sgd(), H, overlap=2)
    state, _ = run(algo, algo.init(PARAMS, K), BATCHES)
    expected = oracle(PARAMS, Fragments.whole(PARAMS), inner=lambda: ref.SGD(lambda t: 0.1), overlap=2,
                      outer=lambda: ref.OuterStep(1, 0, False, False))  # fmt: skip
    assert_close(state.params, expected["params"])
    assert_close(worker(state, 1), expected["workers"][1])


def test_bytes_count_each_fragments_own_blocks():
    fragments = Fragments.by_layer(STACKED, 4, stacked=True)
    algo = LowComm(SGD, local_sgd(), 4, fragments=fragments, compress=Compression("int8", block_size=16))
    # embed 12, head 8, and three times w 16, b 4: a block of 16 and its scale each
    assert algo.bytes_per_round(STACKED, 3) == {"payload": 8 * 20, "ring": 2 * 8 * 20}
    shapes = jax.eval_shape(lambda: STACKED)
    assert algo.bytes_per_round(shapes, 3)["payload"] == 8 * 20
