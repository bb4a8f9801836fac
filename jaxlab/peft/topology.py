"""How an adapter's update connects the coordinates of a layer: islands, scattering, spectral gap, small worlds.

Graphs are symmetric boolean matrices without loops, made from

    factor_graph(perm, N)   SWIFT's words as a graph: cliques of the blocks ("local interactions") and an edge from each
                            coordinate to the one it is routed to ("sparse long-range shortcuts")
    support_graph(mask)     which entries of the update can differ from zero. A square mask is about one set of
                            coordinates, those of a residual stream: i and j are joined where either can move the other.
                            Any other is bipartite: n inputs, then m outputs.

For the eigenvalue lambda_2 of the normalised Laplacian I - D^-1/2 A D^-1/2 and the edge expansion (conductance)
h = min over S of cut(S) / min(vol(S), vol(rest)), Cheeger's bounds are lambda_2 / 2 <= h <= sqrt(2 lambda_2), and both
are 0 exactly where there is more than one island. All is NumPy, for graphs of some thousands of nodes.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Integer

Graph = Bool[np.ndarray, "v v"]


class Scattering(NamedTuple):
    """How a permutation spreads blocks.

    Attributes:
      tau: the least number of blocks that the coordinates of one block come to.
      load: the most coordinates of one block that come to one block.
      hits: [N, N], coordinates of block i (row) that come to block j (column).
    """

    tau: int
    load: int
    hits: np.ndarray


class SmallWorld(NamedTuple):
    """Watts' and Strogatz' measures.

    Attributes:
      clustering: mean over nodes of the share of pairs of neighbours that are neighbours; 0 with fewer than two.
      path: mean length of the shortest path between two joined nodes; NaN without edges.
      clustering_random, path_random: of random graphs with as many nodes and edges.
      sigma: (clustering / clustering_random) / (path / path_random); above 1, clearly so, for a small world.
    """

    clustering: float
    path: float
    clustering_random: float
    path_random: float
    sigma: float


def scattering(perm: Integer[np.ndarray, " d"], blocks: int) -> Scattering:
    """Over how many blocks a permutation spreads each block.

    Args:
      perm: coordinate j receives coordinate `perm[j]`.
      blocks: N, each of ceil(d / N) coordinates, the last fewer where N does not divide.

    Returns:
      tau, the largest load and all counts.

    Raises:
      ValueError: when perm is no permutation or blocks is not from 1 to d.

    >>> scattering(np.arange(16).reshape(4, 4).T.ravel(), 4).tau, scattering(np.arange(16), 4).tau
    (4, 1)
    """
    perm = np.asarray(perm)
    if not np.array_equal(np.sort(perm, axis=None), np.arange(perm.size)):
        raise ValueError(f"perm must be a permutation, got {perm.size} numbers that are none")
    if not 1 <= blocks <= perm.size:
        raise ValueError(f"blocks must be from 1 to {perm.size}, got {blocks}")
    size = -(-perm.size // blocks)
    hits = np.zeros((blocks, blocks), int)
    np.add.at(hits, (perm // size, np.arange(perm.size) // size), 1)
    used = hits[hits.sum(1) > 0]
    return Scattering(int((used > 0).sum(1).min()), int(hits.max()), hits)


def factor_graph(perm: Integer[np.ndarray, " d"], blocks: int) -> Graph:
    """Cliques of the blocks, and an edge from each coordinate to where it is routed.

    >>> islands(factor_graph(np.arange(8), 4)), islands(factor_graph(np.roll(np.arange(8), 1), 4))
    (4, 1)
    """
    scattering(perm, blocks)
    d = perm.size
    group = np.arange(d) // -(-d // blocks)
    graph = group[:, None] == group[None, :]
    graph[np.arange(d), perm] = True
    return _symmetric(graph)


def support_graph(mask: Bool[np.ndarray, "n m"]) -> Graph:
    """The graph of an update's mask; see the module's head.

    >>> islands(support_graph(np.eye(4, dtype=bool))), islands(support_graph(np.ones((2, 3), bool)))
    (4, 1)
    """
    n, m = mask.shape
    if n == m:
        return _symmetric(mask.copy())
    graph = np.zeros((n + m, n + m), bool)
    graph[:n, n:] = mask
    return _symmetric(graph)


def _symmetric(graph: Graph) -> Graph:
    graph = graph | graph.T
    np.fill_diagonal(graph, False)
    return graph


def _check(graph: Graph) -> None:
    if graph.ndim != 2 or graph.shape[0] != graph.shape[1] or not np.array_equal(graph, graph.T) or graph.trace():
        raise ValueError(f"graph must be symmetric without loops, got a matrix of {graph.shape} that is not")


def islands(graph: Graph) -> int:
    """Number of connected components; a node without edges is one.

    Raises:
      ValueError: when the graph is not symmetric or has loops.

    >>> islands(support_graph(np.kron(np.eye(3), np.ones((2, 2))).astype(bool)))
    3
    """
    _check(graph)
    left, count = np.ones(len(graph), bool), 0
    while left.any():
        reached = np.zeros(len(graph), bool)
        front = np.eye(1, len(graph), int(np.argmax(left)), dtype=bool)[0]
        while front.any():
            reached |= front
            front = graph[front].any(0) & ~reached
        left &= ~reached
        count += 1
    return count


def spectral_gap(graph: Graph) -> float:
    """lambda_2 of the normalised Laplacian: 0 for several islands, d / (d - 1) for the complete graph of d nodes.

    Raises:
      ValueError: for fewer than two nodes, or as `islands`.

    >>> round(spectral_gap(support_graph(np.ones((5, 5), bool))), 6)
    1.25
    """
    _check(graph)
    if len(graph) < 2:
        raise ValueError(f"graph must have at least 2 nodes, got {len(graph)}")
    degree = graph.sum(1).astype(float)
    root = np.where(degree > 0, degree, np.inf) ** -0.5
    # A node without edges is an island: its row of the Laplacian is 0.
    laplacian = np.diag((degree > 0).astype(float)) - root[:, None] * graph * root[None, :]
    return float(max(0.0, np.linalg.eigvalsh(laplacian)[1]))


def edge_expansion(graph: Graph) -> float:
    """The conductance h, by trying all sets of nodes.

    Raises:
      ValueError: for more than 20 nodes (take `cheeger`), fewer than two, no edges, or as `islands`.

    >>> edge_expansion(support_graph(np.ones((4, 4), bool))).__round__(4)
    0.6667
    """
    _check(graph)
    v = len(graph)
    if not 2 <= v <= 20 or not graph.any():
        raise ValueError(f"graph must have from 2 to 20 nodes and an edge, got {v} nodes and {int(graph.sum()) // 2}")
    best, degree = np.inf, graph.sum(1)
    weights, edges = graph.astype(np.float32), degree.sum()
    for start in range(1, 2 ** (v - 1), 2**14):
        # Half of all sets: the other half are their complements.
        sets = (np.arange(start, min(start + 2**14, 2 ** (v - 1)))[:, None] >> np.arange(v)) & 1
        volume = sets @ degree
        cut = volume - ((sets.astype(np.float32) @ weights) * sets).sum(1)
        smaller = np.minimum(volume, edges - volume)
        # A set of nodes without edges is an island, and nothing leaves it.
        best = min(best, float(np.min(np.where(smaller > 0, cut / np.maximum(smaller, 1), 0))))
    return best


def cheeger(graph: Graph) -> tuple[float, float]:
    """Bounds of the edge expansion from the spectrum: `lambda_2 / 2 <= h <= sqrt(2 lambda_2)`.

    >>> [round(x, 3) for x in cheeger(support_graph(np.ones((4, 4), bool)))]
    [0.667, 1.633]
    """
    gap = spectral_gap(graph)
    return gap / 2, float(np.sqrt(2 * gap))


def _clustering(graph: Graph) -> float:
    a = graph.astype(np.float32)
    degree = a.sum(1)
    triangles = ((a @ a) * a).sum(1)
    return float(np.mean(triangles / np.maximum(degree * (degree - 1), 1)))


def _mean_path(graph: Graph) -> float:
    a, v = graph.astype(np.float32), len(graph)
    reached = front = np.eye(v, dtype=bool)
    total, pairs, length = 0, 0, 0
    while front.any():
        length += 1
        front = (front.astype(np.float32) @ a > 0) & ~reached
        reached = reached | front
        total, pairs = total + length * int(front.sum()), pairs + int(front.sum())
    return total / pairs if pairs else float("nan")


def small_world(graph: Graph, *, seed: int = 0, samples: int = 3) -> SmallWorld:
    """Clustering and path length, against random graphs with as many edges.

    Args:
      graph: symmetric.
      seed: of the random graphs.
      samples: how many of these to average.

    Returns:
      The measures; `sigma` is NaN where a random graph of this size has no triangle.

    Raises:
      ValueError: for a graph without edges, `samples < 1`, or as `islands`.

    >>> small_world(factor_graph(np.arange(64).reshape(8, 8).T.ravel(), 8)).sigma > 2
    True
    """
    _check(graph)
    edges = int(graph.sum()) // 2
    if not edges or samples < 1:
        raise ValueError(f"graph must have edges and samples must be >= 1, got {edges} edges and samples={samples}")
    rng, found = np.random.default_rng(seed), []
    rows, cols = np.triu_indices(len(graph), 1)
    for _ in range(samples):
        chosen = rng.permutation(rows.size)[:edges]
        other = np.zeros_like(graph)
        other[rows[chosen], cols[chosen]] = True
        other = _symmetric(other)
        found.append((_clustering(other), _mean_path(other)))
    c, p = _clustering(graph), _mean_path(graph)
    cr, pr = (float(x) for x in np.mean(found, axis=0))
    return SmallWorld(c, p, cr, pr, (c / cr) / (p / pr) if cr > 0 else float("nan"))


def mixing_depth(mask: Bool[np.ndarray, "d d"]) -> int | None:
    """How many layers `x + x D` with such a D it takes until every output can depend on every input; None for never.

    Raises:
      ValueError: when the mask is not square.

    >>> mixing_depth(np.eye(4, dtype=bool)), mixing_depth(np.ones((4, 4), bool))
    (None, 1)
    """
    if mask.shape[0] != mask.shape[1]:
        raise ValueError(f"mask must be square, got {mask.shape}")
    step = (mask | np.eye(len(mask), dtype=bool)).astype(np.float32)
    reached, depth = step > 0, 1
    while not reached.all():
        further = reached.astype(np.float32) @ step > 0
        if np.array_equal(further, reached):
            return None
        reached, depth = further, depth + 1
    return depth
