"""tensorflow-datasets without TensorFlow: a tiny data set is prepared in one process and read in another."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap

import pytest

from jaxlab.core.errors import MissingExtraError
from jaxlab.data import tfds

HAVE = importlib.util.find_spec("tensorflow_datasets") is not None
needs_tfds = pytest.mark.skipif(not HAVE, reason="tensorflow-datasets is not installed (extra: data)")

PREPARE = """
    import sys
    import numpy as np
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()

    class JaxlabTiny(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.FeaturesDict({
                "text": tfds.features.Text(),
                "label": tfds.features.ClassLabel(names=["a", "b"]),
                "ids": tfds.features.Tensor(shape=(3,), dtype=np.int32),
            })
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, manager):
            return {"train": self._generate_examples(12), "test": self._generate_examples(4)}

        def _generate_examples(self, count):
            for i in range(count):
                yield i, {"text": f"d\\u00e9j\\u00e0 {i}", "label": i % 2, "ids": np.array([i, i + 1, 400], np.int32)}

    JaxlabTiny(data_dir=sys.argv[1], file_format="array_record").download_and_prepare()
"""

READ = """
    import json, sys
    from jaxlab.data import tfds, tokens

    def corpus(split="train", **options):
        return tfds.data_source("jaxlab_tiny", split, data_dir=sys.argv[1], **options)

    def error(*args, **options):
        try:
            corpus(*args, **options)
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"

    whole = corpus(group_key="label")
    words = corpus(tokenizer=lambda text: [len(word) for word in text.split()], vocab=16)
    stream = tfds.documents("jaxlab_tiny", "train", data_dir=sys.argv[1])
    file = tokens.write_tokens(sys.argv[1] + "/t.npy", stream, 256)
    print("RESULT" + json.dumps({
        "texts": sorted(bytes(whole.document(i)).decode() for i in range(whole.num_documents)),
        "groups": [whole.group_names, [int(g) for g in whole.groups]],
        "labels": [bytes(whole.document(i)).decode() for i in range(whole.num_documents)],
        "slice": corpus("test[:50%]").num_documents,
        "words": [words.vocab, words.document(0).tolist()],
        "ids": corpus(text_key="ids", vocab=512).tokens.dtype.name,
        "streamed": tokens.read_tokens(file).tokens.tobytes() == whole.tokens.tobytes(),
        "bad_key": error(text_key="txet"),
        "bad_split": error("valid"),
        "bad_vocab": error(text_key="ids"),
        "not_text": error(text_key="label"),
        "tensorflow": "tensorflow" in sys.modules,
        "jax": "jax" in sys.modules,
    }))
"""


def run(code, *args):
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    run(PREPARE, folder)
    return json.loads(run(READ, folder).split("RESULT")[1])


@needs_tfds
def test_text_becomes_utf8_documents(result):
    assert result["texts"] == sorted(f"d\u00e9j\u00e0 {i}" for i in range(12))
    assert result["slice"] == 2
    assert result["streamed"]


@needs_tfds
def test_group_key_follows_the_documents(result):
    names, index = result["groups"]
    assert names == ["0", "1"]
    assert [int(text.split()[1]) % 2 for text in result["labels"]] == index


@needs_tfds
def test_tokenizer_and_ready_made_ids(result):
    assert result["words"][0] == 16 and result["words"][1][0] == len("d\u00e9j\u00e0")
    assert result["ids"] == "uint16"


@needs_tfds
def test_errors_name_the_argument(result):
    assert "text_key='txet'" in result["bad_key"] and "did you mean 'text'" in result["bad_key"]
    assert "valid" in result["bad_split"]
    assert "ids in [0, 256)" in result["bad_vocab"]
    assert "text_key='label'" in result["not_text"]


@needs_tfds
def test_tensorflow_is_not_imported(result):
    assert result["tensorflow"] is False
    assert result["jax"] is False


@needs_tfds
def test_a_folder_without_array_record_says_what_to_do(tmp_path):
    with pytest.raises(RuntimeError, match="array_record"):
        tfds.data_source("ag_news_subset", "train", data_dir=tmp_path, download=False)


@pytest.mark.skipif(HAVE, reason="tensorflow-datasets is installed")
def test_without_the_package_the_extra_is_named():
    with pytest.raises(MissingExtraError, match=r"jaxlab\[data\]"):
        tfds.data_source("ag_news_subset", "train")


def test_tokenizer_needs_vocab():
    with pytest.raises(ValueError, match="vocab must be given"):
        tfds.data_source("ag_news_subset", "train", tokenizer=str.split)
