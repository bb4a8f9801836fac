"""Splits and shards. Most tests use a corpus whose token i is i, so that a window shows where it was cut."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlab.data.shards import eval_windows, make_shards, per_worker_batch, permute, split
from jaxlab.data.tokens import Corpus, from_documents, read_tokens, write_tokens

KINDS = ("iid", "group", "contiguous")


def counting(sizes, groups=None):
    """Documents of these sizes; token i of the corpus has the id i."""
    borders = np.concatenate([[0], np.cumsum(sizes)])
    documents = [range(a, b) for a, b in itertools.pairwise(borders)]
    groups = [f"g{i}" for i in range(len(sizes))] if groups is None else groups
    return from_documents(documents, name="counting", vocab=int(borders[-1]), groups=groups)


def epoch(shards, worker, number=0):
    first = number * shards.windows
    return np.stack([shards.window(worker, p) for p in range(first, first + shards.windows)])


CORPUS = counting([30, 7, 50, 41, 12, 60, 33, 28, 90, 5, 44])


@given(size=st.integers(1, 400), seed=st.integers(0, 2**62))
@settings(max_examples=60, deadline=None)
def test_permute_is_a_bijection(size, seed):
    out = permute(np.arange(size), size, np.full(size, seed))
    np.testing.assert_array_equal(np.sort(out), np.arange(size))


def test_permute_works_on_huge_domains_and_depends_on_each_key():
    index = np.arange(1000) + 10**15
    out = permute(index, 10**16, np.full(1000, 3))
    assert len(set(out.tolist())) == 1000 and out.min() >= 0 and out.max() < 10**16
    keys = np.array([3, 4])
    mixed = permute(np.array([10**15, 10**15]), 10**16, keys)
    assert mixed[0] == out[0] and mixed[1] != out[0]


def test_permute_looks_random():
    """Over 2000 keys each of 12 places is taken about equally often, and neighbours do not stay neighbours."""
    keys = np.arange(2000)
    places = np.stack([permute(np.full(2000, i), 12, keys) for i in range(12)])
    for row in places:
        counts = np.bincount(row, minlength=12)
        assert abs(counts - 2000 / 12).max() < 5 * np.sqrt(2000 / 12)
    next_to = (np.diff(places, axis=0) == 1).mean()
    assert abs(next_to - 11 / 132) < 0.02
    large = permute(np.arange(50_000), 50_000, np.full(50_000, 1))
    assert abs(np.corrcoef(np.arange(50_000), large)[0, 1]) < 0.02


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_shards_are_disjoint_equal_and_complete(kind, workers):
    shards = make_shards(CORPUS, workers, seq_len=4, split=kind)
    windows = [epoch(shards, k) for k in range(workers)]
    assert all(w.shape == (shards.windows, 5) and w.dtype == np.int32 for w in windows)
    tokens = np.concatenate(windows).ravel()
    assert len(set(tokens.tolist())) == len(tokens)
    if kind != "group":
        assert shards.windows == len(CORPUS) // 5 // workers


@pytest.mark.parametrize("kind", ("iid", "contiguous"))
def test_windows_are_consecutive_tokens(kind):
    shards = make_shards(CORPUS, 2, seq_len=6, split=kind)
    for k in range(2):
        assert (np.diff(epoch(shards, k), axis=1) == 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_every_window_once_an_epoch_in_a_new_order(kind):
    shards = make_shards(CORPUS, 3, seq_len=4, split=kind, seed=5)
    for k in range(3):
        first, second = epoch(shards, k, 0), epoch(shards, k, 1)
        assert not np.array_equal(first, second)
        assert {tuple(w) for w in first} == {tuple(w) for w in second}
        assert len({tuple(w) for w in first}) == shards.windows
    orders = [epoch(shards, k)[:, 0].argsort().tolist() for k in range(3)]
    assert orders[0] != orders[1]


def test_seed_decides_deal_and_order():
    def starts(seed, kind="iid"):
        return epoch(make_shards(CORPUS, 2, seq_len=4, split=kind, seed=seed), 0)[:, 0].tolist()

    assert starts(0) == starts(0)
    assert sorted(starts(0)) != sorted(starts(1))
    assert starts(0, "contiguous") != starts(1, "contiguous")
    assert sorted(starts(0, "contiguous")) == sorted(starts(1, "contiguous"))


def test_orders_do_not_change_between_versions():
    """A resumed run must find the data where it was: these numbers are a promise."""
    shards = make_shards(CORPUS, 2, seq_len=9, seed=7)
    assert [int(shards.window(1, p)[0]) for p in (0, 1, 2, 1000)] == [30, 210, 190, 230]
    assert make_shards(CORPUS, 2, seq_len=9, seed=7).windows == 20


def test_iid_deals_from_the_whole_corpus_and_contiguous_does_not():
    corpus = counting([4000])
    for kind, spread in (("iid", True), ("contiguous", False)):
        first = epoch(make_shards(corpus, 4, seq_len=9, split=kind), 0)
        assert bool(first.max() - first.min() > 3000) is spread


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_group_split_keeps_groups_whole_and_balanced(workers):
    rng = np.random.default_rng(0)
    sizes = rng.integers(20, 60, 40)
    names = [f"g{i % 13}" for i in range(40)]  # interleaved, so the tokens must be reordered
    corpus = counting(sizes, names)
    shards = make_shards(corpus, workers, seq_len=4, split="group")
    assert sorted(itertools.chain(*shards.worker_groups)) == sorted(set(names))
    group_of_token = np.repeat([int(n[1:]) for n in names], sizes)
    loads = []
    for k in range(workers):
        seen = {f"g{g}" for g in group_of_token[epoch(shards, k)].ravel()}
        assert seen <= set(shards.worker_groups[k])
        loads.append(sum(int(s) for s, n in zip(sizes, names, strict=True) if n in shards.worker_groups[k]))
    largest = max(np.bincount(group_of_token))
    assert max(loads) - min(loads) <= largest < sum(loads) / workers
    assert shards.windows == min(loads) // 5


def test_group_split_of_sorted_groups_does_not_copy():
    corpus = counting([50, 40, 30])
    assert np.shares_memory(make_shards(corpus, 3, seq_len=4, split="group").tokens, corpus.tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_round_is_the_stack_of_its_steps(kind):
    shards = make_shards(CORPUS, 3, seq_len=4, split=kind)
    rounds = shards.batch(2, batch_per_worker=2, inner_steps=5)["tokens"]
    steps = [shards.batch(2 * 5 + h, batch_per_worker=2)["tokens"] for h in range(5)]
    assert rounds.shape == (3, 5, 2, 5) and rounds.dtype == np.int32
    np.testing.assert_array_equal(rounds, np.stack(steps, axis=1))


def test_batch_is_the_windows_of_its_positions_over_epoch_borders():
    shards = make_shards(CORPUS, 3, seq_len=20)
    assert shards.windows == 6
    for step in range(5):
        batch = shards.batch(step, batch_per_worker=4)["tokens"]
        expected = [[shards.window(k, step * 4 + i) for i in range(4)] for k in range(3)]
        np.testing.assert_array_equal(batch, expected)
    assert shards.epochs(3, batch_per_worker=4) == 2.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_can_build_its_own_rows(kind):
    shards = make_shards(CORPUS, 4, seq_len=4, split=kind)
    full = shards.batch(1, batch_per_worker=2, inner_steps=3)["tokens"]
    np.testing.assert_array_equal(
        shards.batch(1, batch_per_worker=2, inner_steps=3, workers=range(2, 4))["tokens"], full[2:]
    )
    one = shards.for_worker(3)
    np.testing.assert_array_equal(one.batch(1, batch_size=2, inner_steps=3)["tokens"], full[3])
    np.testing.assert_array_equal(one.batch(3, batch_size=2)["tokens"], full[3, 0])
    np.testing.assert_array_equal(one.window(7), shards.window(3, 7))
    assert len(one) == shards.windows


def test_numpy_integers_are_positions_too():
    shards = make_shards(CORPUS, 2, seq_len=4)
    np.testing.assert_array_equal(shards.window(np.int64(1), np.int32(3)), shards.window(1, 3))
    np.testing.assert_array_equal(
        shards.batch(np.int64(2), batch_per_worker=2)["tokens"], shards.batch(2, batch_per_worker=2)["tokens"]
    )


def test_shards_of_a_memory_mapped_file(tmp_path):
    corpus = read_tokens(write_tokens(tmp_path / "t.npy", [CORPUS.tokens], CORPUS.vocab))
    mapped, memory = (make_shards(c, 2, seq_len=4).batch(3, batch_per_worker=2) for c in (corpus, CORPUS))
    np.testing.assert_array_equal(mapped["tokens"], memory["tokens"])


@pytest.mark.parametrize(
    ("workers", "options", "error"),
    [
        (0, {}, "workers must be >= 1, got 0"),
        (2, {"seq_len": 0}, "seq_len must be >= 1, got 0"),
        (2, {"split": "idd"}, "split must be one of .*did you mean 'iid'"),
        (81, {}, "workers=81 with seq_len=4 is too much"),
        (81, {"split": "contiguous"}, "80 windows of 5"),
        (12, {"split": "group"}, "workers=12, but corpus 'counting' has 11"),
        (11, {"split": "group", "seq_len": 5}, "leaves a worker without any"),
    ],
)
def test_make_shards_errors(workers, options, error):
    with pytest.raises(ValueError, match=error):
        make_shards(CORPUS, workers, **{"seq_len": 4, **options})


def test_batch_errors():
    shards = make_shards(CORPUS, 2, seq_len=4)
    for options, error in [
        ({"step": -1}, "step must be >= 0"),
        ({"batch_per_worker": 0}, "batch_per_worker must be >= 1"),
        ({"inner_steps": 0}, "inner_steps must be >= 1"),
        ({"workers": [0, 2]}, r"worker must be in 0\.\.1, got 2"),
    ]:
        with pytest.raises(ValueError, match=error):
            shards.batch(**{"step": 0, "batch_per_worker": 1, **options})
    with pytest.raises(ValueError, match="position must be >= 0, got -1"):
        shards.window(0, -1)
    with pytest.raises(ValueError, match=r"worker must be in 0\.\.1, got -1"):
        shards.for_worker(-1)


def test_ids_outside_of_the_vocabulary_are_not_passed_on():
    corpus = Corpus(np.array([1, 2, 300], np.uint16), np.zeros(1, int), np.zeros(1, int), ("",), "x", 256)
    with pytest.raises(ValueError, match=r"vocab=256\), got 1\.\.300"):
        make_shards(corpus, 1, seq_len=2).batch(0, batch_per_worker=1)
    with pytest.raises(ValueError, match="vocab=256"):
        eval_windows(corpus, seq_len=2, count=1)


def test_per_worker_batch():
    assert per_worker_batch(32, 8) == 4
    with pytest.raises(ValueError, match=r"global_batch must be a multiple of workers=3, got 32; near: 30, 33"):
        per_worker_batch(32, 3)
    with pytest.raises(ValueError, match=r"near: 8$"):
        per_worker_batch(5, 8)
    with pytest.raises(ValueError, match="workers must be >= 1"):
        per_worker_batch(4, 0)


@pytest.mark.parametrize("shuffle", [True, False])
def test_split_does_not_leak(shuffle):
    """Each token is in exactly one part, each part is whole documents, and no window of one shows text of another."""
    parts = split(CORPUS, (0.6, 0.2, 0.2), seed=3, shuffle=shuffle)
    np.testing.assert_array_equal(np.sort(np.concatenate([p.tokens for p in parts])), np.arange(len(CORPUS)))
    originals = {tuple(CORPUS.document(i)) for i in range(CORPUS.num_documents)}
    assert {tuple(p.document(i)) for p in parts for i in range(p.num_documents)} == originals
    assert all((np.diff(p.tokens.astype(int)) > 0).all() for p in parts)  # in the order of the corpus
    train, valid, _ = parts
    held_out = set(eval_windows(valid, seq_len=4, count=5).ravel().tolist())
    assert held_out.isdisjoint(epoch(make_shards(train, 1, seq_len=4), 0).ravel().tolist())
    if not shuffle:
        assert np.concatenate([p.tokens for p in parts]).tolist() == list(range(len(CORPUS)))
        assert all(np.shares_memory(p.tokens, CORPUS.tokens) for p in parts)


def test_split_sizes_follow_the_fractions():
    sizes = np.random.default_rng(1).integers(1, 200, 400)
    corpus = counting(sizes)
    for seed in range(5):
        parts = split(corpus, (0.8, 0.15, 0.05), seed=seed)
        for part, share in zip(parts, (0.8, 0.15, 0.05), strict=True):
            assert abs(len(part) - share * len(corpus)) <= sizes.max()


def test_split_is_deterministic_and_keeps_what_belongs_to_a_document():
    again = [p.sha256 for p in split(CORPUS, (0.5, 0.5), seed=1)]
    assert again == [p.sha256 for p in split(CORPUS, (0.5, 0.5), seed=1)]
    assert again != [p.sha256 for p in split(CORPUS, (0.5, 0.5), seed=2)]
    for part in split(CORPUS, (0.5, 0.5)):
        for i in range(part.num_documents):
            original = np.searchsorted(CORPUS.starts, part.document(i)[0], side="right") - 1
            assert part.group_names[part.groups[i]] == CORPUS.group_names[CORPUS.groups[original]]


def test_split_errors():
    for fractions in [(0.5, 0.4), (1.5, -0.5), (1.0, 0.0), ()]:
        with pytest.raises(ValueError, match="fractions must be positive with a sum of 1"):
            split(CORPUS, fractions)
    one = counting([100])
    with pytest.raises(ValueError, match=r"corpus\.chunked\(size\)"):
        split(one)
    assert [len(p) for p in split(one.chunked(5), (0.8, 0.2))] == [80, 20]


def test_eval_windows_are_fixed_spread_and_disjoint():
    windows = eval_windows(CORPUS, seq_len=4, count=20)
    assert windows.shape == (20, 5) and windows.dtype == np.int32
    np.testing.assert_array_equal(windows, eval_windows(CORPUS, seq_len=4, count=20))
    assert len(np.unique(windows)) == windows.size
    assert len(set(np.diff(windows[:, 0]).tolist())) == 1 and (np.diff(windows, axis=1) == 1).all()
    assert windows[-1, 0] > 0.9 * len(CORPUS)
    starts = {int(eval_windows(CORPUS, seq_len=4, count=20, seed=s)[0, 0]) for s in range(40)}
    assert starts == set(range(len(CORPUS) // 20 - 4))
    assert eval_windows(CORPUS, seq_len=4, count=80).shape == (80, 5)
    with pytest.raises(ValueError, match=r"count must be <= 80 \(windows of 5 in 'counting'\), got 81"):
        eval_windows(CORPUS, seq_len=4, count=81)
    with pytest.raises(ValueError, match="count must be >= 1"):
        eval_windows(CORPUS, seq_len=4, count=0)


def test_empty_documents_do_no_harm():
    corpus = dataclasses.replace(
        counting([40, 60]), starts=np.array([0, 0, 40, 40, 100]), groups=np.array([0, 0, 1, 1, 1])
    )
    assert sum(len(p) for p in split(corpus, (0.5, 0.5))) == 100
    assert make_shards(corpus, 2, seq_len=4, split="group").windows == 8


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int64])
def test_negative_ids_are_refused_in_every_dtype(dtype):
    """Also where the dtype's largest number is below vocab, so that no id can be too large."""
    tokens = np.array([3, 1, -1, 2, 3, 1, 2, 3], dtype)
    bad = Corpus(tokens, np.array([0]), np.array([0]), ("",), "negative", 256)
    with pytest.raises(ValueError, match=r"tokens must be in \[0, vocab=256\), got -1\.\.3"):
        eval_windows(bad, seq_len=3, count=2)
