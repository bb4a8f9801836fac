"""The corpus and its files."""

import dataclasses

import numpy as np
import pytest

from jaxlab.data.tokens import Corpus, from_documents, read_tokens, sidecar, write_tokens

DOCUMENTS = [[1, 2, 300], [], [4], [5, 6, 7, 8]]


def corpus():
    return from_documents(DOCUMENTS, name="four", vocab=301, groups=["b", "a", "b", "a"])


def test_documents_and_sizes():
    c = corpus()
    assert len(c) == 8 and c.num_documents == 4 and c.tokens.dtype == np.uint16
    assert [c.document(i).tolist() for i in range(4)] == DOCUMENTS
    assert c.document(-1).tolist() == DOCUMENTS[-1]
    assert c.sizes.tolist() == [3, 0, 1, 4]
    assert c.group_names == ("a", "b") and c.groups.tolist() == [1, 0, 1, 0]
    with pytest.raises(IndexError):
        c.document(4)


def test_sha256_covers_tokens_and_starts():
    digest = corpus().sha256
    assert digest == corpus().sha256 and len(digest) == 64
    moved = dataclasses.replace(corpus(), starts=np.array([0, 2, 3, 4]))
    other = dataclasses.replace(corpus(), tokens=corpus().tokens[::-1])
    assert len({digest, moved.sha256, other.sha256}) == 3
    big_endian = dataclasses.replace(corpus(), tokens=corpus().tokens.astype(">u2"))
    assert big_endian.sha256 == digest


def test_select_keeps_order_groups_and_views():
    c = corpus()
    picked = c.select([3, 0], name="two")
    assert picked.tokens.tolist() == [5, 6, 7, 8, 1, 2, 300] and picked.starts.tolist() == [0, 4]
    assert picked.groups.tolist() == [0, 1] and picked.name == "two" and picked.vocab == 301
    run = c.select([1, 2, 3])
    assert np.shares_memory(run.tokens, c.tokens) and run.tokens.tolist() == [4, 5, 6, 7, 8]
    with pytest.raises(ValueError, match="got none"):
        c.select([])


def test_select_counts_from_the_end_and_refuses_what_is_no_index():
    c = corpus()
    for documents in ([-1, 0], [-2, -1], [-1], [0, -4, 3], np.array([-1, 0], np.int8)):
        wanted = np.concatenate([c.document(int(i)) for i in documents])
        assert c.select(documents).tokens.tolist() == wanted.tolist()
    assert c.select([-1, 0]).groups.tolist() == [0, 1]
    for documents in ([4], [0, -5], np.array([200], np.uint8)):
        with pytest.raises(IndexError, match="documents must be below 4, or count from the end, got"):
            c.select(documents)
    with pytest.raises(TypeError, match="documents must be a 1-D sequence of integers, got an array of dtype bool"):
        c.select([True, False, True, False])
    for documents in (np.array([True, False]), np.array([0.9, 1.2]), [0.9, 1.2]):
        with pytest.raises(TypeError, match="documents"):  # jaxtyping's words, where the tests check annotations
            c.select(documents)


def test_chunked_keeps_tokens_and_borders():
    c = corpus().chunked(2)
    assert [c.document(i).tolist() for i in range(c.num_documents)] == [[1, 2], [300], [], [4], [5, 6], [7, 8]]
    assert c.groups.tolist() == [1, 1, 0, 1, 0, 0]
    with pytest.raises(ValueError, match="size must be >= 1, got 0"):
        c.chunked(0)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"tokens": np.zeros(8)}, "tokens must be a 1-D integer"),
        ({"tokens": np.zeros((2, 4), np.uint8)}, "tokens must be a 1-D integer"),
        ({"tokens": np.zeros(0, np.uint8)}, "tokens must not be empty"),
        ({"starts": np.array([1, 2, 3, 4])}, "begin with 0"),
        ({"starts": np.array([0, 3, 2, 4])}, "sorted"),
        ({"starts": np.array([0, 3, 3, 9])}, "within 8 tokens"),
        ({"groups": np.zeros(3, int)}, "each of the 4 documents"),
        ({"groups": np.full(4, 2)}, "2 group_names"),
        ({"vocab": 0}, "vocab"),
        ({"vocab": 2**31 + 1}, "vocab"),
    ],
)
def test_corpus_checks_its_fields(change, error):
    with pytest.raises((TypeError, ValueError), match=error):
        dataclasses.replace(corpus(), **change)


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(256, np.uint8), (257, np.uint16), (2**16, np.uint16), (2**17, np.uint32)]
)
def test_token_file_round_trip(tmp_path, vocab, dtype):
    documents = [[1, 2, vocab - 1], [], [4], [5, 6, 7, 8]]
    path = write_tokens(tmp_path / "sub" / "t.npy", iter(documents), vocab, groups=["b", "a", "b", "a"], name="four")
    read = read_tokens(path)
    assert isinstance(read.tokens, np.memmap) and read.tokens.dtype == dtype and read.vocab == vocab
    assert [read.document(i).tolist() for i in range(4)] == documents
    assert read.group_names == ("a", "b") and read.groups.tolist() == [1, 0, 1, 0] and read.name == "four"
    assert read.sha256 == from_documents(documents, name="x", vocab=vocab).sha256
    assert sorted(p.name for p in path.parent.iterdir()) == ["t.documents.npz", "t.npy"]
    assert np.load(path).tolist() == [i for document in documents for i in document]  # any NumPy reads it


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"document 1 must hold ids in \[0, 256\), got 3\.\.256"):
        write_tokens(tmp_path / "t.npy", [[1], [3, 256]], 256)
    with pytest.raises(ValueError, match="at least one token, got 2 documents"):
        write_tokens(tmp_path / "t.npy", [[], []], 256)
    with pytest.raises(ValueError, match="each of the 2 documents, got 1"):
        write_tokens(tmp_path / "t.npy", [[1], [2]], 256, groups=["a"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("document", [[0.5], [[1, 2]], "text"])
def test_documents_must_be_vectors_of_integers(document):
    with pytest.raises(ValueError, match="document 0 must be bytes or a 1-D sequence of integers"):
        from_documents([document], name="x")
    with pytest.raises(ValueError, match="hold no tokens"):
        from_documents([b""], name="x")


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, ">u2"])
def test_plain_npy_is_one_document(tmp_path, dtype):
    np.save(tmp_path / "t.npy", np.array([3, 1, 4, 1, 5], dtype))
    read = read_tokens(tmp_path / "t.npy")
    assert read.num_documents == 1 and read.tokens.tolist() == [3, 1, 4, 1, 5] and read.vocab == 6
    assert read_tokens(tmp_path / "t.npy", vocab=100).vocab == 100


def test_read_checks_ids_and_vocab(tmp_path):
    path = tmp_path / "t.npy"
    np.save(path, np.array([3, 9], np.int32))
    with pytest.raises(ValueError, match=r"ids in \[0, 9\), got 3\.\.9"):
        read_tokens(path, vocab=9)
    assert read_tokens(path, vocab=9, check=False).vocab == 9
    with pytest.raises(ValueError, match="vocab must be given"):
        read_tokens(path, check=False)
    np.save(path, np.array([-1, 9]))
    with pytest.raises(ValueError, match=r"got -1\.\.9"):
        read_tokens(path)
    write_tokens(path, [[3, 9]], 10)
    with pytest.raises(ValueError, match="vocab must be 10"):
        read_tokens(path, vocab=11)


def test_read_refuses_other_files(tmp_path):
    path = tmp_path / "t.npy"
    with pytest.raises(FileNotFoundError, match="write_tokens"):
        read_tokens(path)
    with pytest.raises(ValueError, match=r"must end in \.npy"):
        read_tokens(tmp_path / "t.bin")
    for array in (np.zeros(3), np.zeros((2, 2), int)):
        np.save(path, array)
        with pytest.raises(TypeError, match="1-D integer array, got an array of dtype"):
            read_tokens(path)
    np.save(path, np.zeros(0, int))
    with pytest.raises(ValueError, match="holds no tokens"):
        read_tokens(path)
    np.save(path, np.arange(1000))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"not a complete \.npy file"):
        read_tokens(path)


def test_a_sidecar_of_another_file_is_noticed(tmp_path):
    path = write_tokens(tmp_path / "t.npy", [[1, 2, 3]], 10)
    assert sidecar(path).is_file()
    np.save(path, np.array([1, 2]))
    with pytest.raises(ValueError, match="describes 3 tokens"):
        read_tokens(path)


def test_checks_look_at_every_part_of_a_long_file(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxlab.data.tokens._CHUNK", 4)
    ids = np.arange(11)
    np.save(tmp_path / "t.npy", ids)
    read = read_tokens(tmp_path / "t.npy")
    assert read.vocab == 11
    whole = Corpus(ids, np.zeros(1, int), np.zeros(1, int), ("",), "x", 11)
    digest = whole.sha256
    monkeypatch.undo()
    assert digest == dataclasses.replace(whole).sha256


@pytest.mark.parametrize("damage", ["cut", "empty", "incomplete", "array"])
def test_a_damaged_sidecar_is_named(tmp_path, damage):
    path = write_tokens(tmp_path / "t.npy", [b"abc", b"de"], 256)
    side = sidecar(path)
    if damage == "incomplete":
        np.savez(side, length=5, vocab=256)
    elif damage == "array":
        with open(side, "wb") as file:
            np.save(file, np.arange(5))
    else:
        side.write_bytes(side.read_bytes()[: 300 if damage == "cut" else 0])
    with pytest.raises(
        ValueError, match=r"t\.documents\.npz is damaged or not a sidecar .*; write the token file again"
    ):
        read_tokens(path)


def test_an_archive_is_no_token_file(tmp_path):
    np.savez(tmp_path / "a.npz", tokens=np.arange(5))
    path = (tmp_path / "a.npz").rename(tmp_path / "a.npy")
    with pytest.raises(ValueError, match=r"a\.npy is not a \.npy file of numbers: it is an \.npz archive"):
        read_tokens(path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"a\.npy is not a complete \.npy file"):
        read_tokens(path)
