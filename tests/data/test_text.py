"""The embedded corpus and local files."""

import hashlib
import sys
import time
import zipfile

import numpy as np
import pytest

from jaxlab.data import text


@pytest.fixture(scope="module")
def stdlib():
    return text.stdlib_corpus()


def fake_stdlib(root):
    files = {
        "os.py": b"import abc\n",
        "json/__init__.py": b"loads = 1\n",
        "json/tests/test_it.py": b"assert False\n",
        "test/test_os.py": b"assert False\n",
        "encodings/cp037.py": b"table = 1\n",
        "asyncio/__init__.py": b"",
        "site-packages/numpy/__init__.py": b"not ours\n",
        "json/__pycache__/x.py": b"not ours\n",
        "stranger.py": b"not ours\n",
        "abc.txt": b"not python\n",
    }
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return b"loads = 1\nimport abc\n"


def test_stdlib_is_the_sources_of_this_python(stdlib):
    assert stdlib.vocab == 256 and stdlib.tokens.dtype == np.uint8
    assert 5_000_000 < len(stdlib) < 20_000_000
    assert stdlib.name.endswith(f"{sys.version_info.major}.{sys.version_info.minor}")
    with open(hashlib.__file__, "rb") as file:
        source = file.read()
    group = stdlib.group_names.index("hashlib")
    (document,) = np.flatnonzero(stdlib.groups == group)
    assert stdlib.document(document).tobytes() == source


def test_stdlib_groups_are_top_level_modules_in_order(stdlib):
    assert set(stdlib.group_names) <= set(sys.stdlib_module_names)
    assert not {"test", "idlelib", "encodings", "turtledemo"} & set(stdlib.group_names)
    assert {"asyncio", "json", "typing"} <= set(stdlib.group_names)
    assert (stdlib.sizes > 0).all()


def test_stdlib_is_the_same_every_time_and_quick(stdlib):
    begin = time.perf_counter()
    again = text.stdlib_corpus()
    assert time.perf_counter() - begin < 10  # 0.06 s alone; the limit only catches a change of kind
    assert again.sha256 == stdlib.sha256


def test_stdlib_selection_from_a_folder_and_from_a_zip(tmp_path):
    folder = tmp_path / "lib"
    expected = fake_stdlib(folder)
    corpus = text.stdlib_corpus(folder)
    assert corpus.tokens.tobytes() == expected
    assert corpus.group_names == ("json", "os")
    with zipfile.ZipFile(tmp_path / "lib.zip", "w") as archive:
        for file in sorted(folder.rglob("*"), reverse=True):
            archive.write(file, file.relative_to(folder))
    assert text.stdlib_corpus(tmp_path / "lib.zip").sha256 == corpus.sha256


def test_stdlib_in_a_zip_on_the_path_is_found(tmp_path, monkeypatch):
    expected = fake_stdlib(tmp_path / "lib")
    with zipfile.ZipFile(tmp_path / "python.zip", "w") as archive:
        for file in (tmp_path / "lib").rglob("*.py"):
            archive.write(file, file.relative_to(tmp_path / "lib"))
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path / "absent"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "python.zip"), *sys.path])
    assert text.stdlib_corpus().tokens.tobytes() == expected


def test_stdlib_without_sources_says_what_to_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(FileNotFoundError, match="read_files"):
        text.stdlib_corpus()


def test_read_one_file(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes("d\u00e9j\u00e0".encode() + b"\x00\xff")
    corpus = text.read_files(file)
    assert corpus.tokens.tobytes() == file.read_bytes()
    assert corpus.num_documents == 1 and corpus.name == "a.txt"


def test_a_large_file_is_memory_mapped(tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    file.write_bytes(b"0123456789")
    monkeypatch.setattr(text, "_MAP_ABOVE", 9)
    corpus = text.read_files(file)
    assert isinstance(corpus.tokens, np.memmap)
    assert corpus.tokens.tobytes() == b"0123456789"


def test_read_folder_groups_by_first_sub_folder(tmp_path):
    for name in ("z.txt", "b/2.txt", "b/deep/1.txt", "a/1.txt", "a/1.md", ".git/x.txt", "a/.hidden.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "a/empty.txt").write_text("")
    corpus = text.read_files(tmp_path, "*.txt")
    documents = [corpus.document(i).tobytes().decode() for i in range(corpus.num_documents)]
    assert documents == ["a/1.txt", "b/2.txt", "b/deep/1.txt", "z.txt"]
    assert [corpus.group_names[g] for g in corpus.groups] == ["a", "b", "b", "."]
    assert corpus.name == tmp_path.name


def test_read_errors_name_the_path(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        text.read_files(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"'\*\.txt' matches no file"):
        text.read_files(tmp_path, "*.txt")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"empty\.txt is empty"):
        text.read_files(tmp_path / "empty.txt")
    with pytest.raises(ValueError, match="all 1 files"):
        text.read_files(tmp_path)
