"""Random-access data: a corpus of tokens, disjoint worker shards, and one integer as the position. NumPy only."""

from jaxlab.data.shards import Shards, eval_windows, make_shards, per_worker_batch, split
from jaxlab.data.tokens import Corpus

__all__ = ["Corpus", "Shards", "eval_windows", "make_shards", "per_worker_batch", "split"]
