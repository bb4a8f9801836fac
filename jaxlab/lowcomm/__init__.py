"""Training with little communication: DiLoCo, IsoLoCo, local SGD, and model merging as outer aggregation."""

from jaxlab.lowcomm import merging
from jaxlab.lowcomm.communication import Collective, collectives
from jaxlab.lowcomm.compression import Compression
from jaxlab.lowcomm.data_parallel import DataParallel, DataParallelState
from jaxlab.lowcomm.diloco import diloco, local_sgd
from jaxlab.lowcomm.isoloco import isoloco
from jaxlab.lowcomm.isotropize import MatrixSpec, isotropize, nuclear_norm, polar, resolve_specs
from jaxlab.lowcomm.lookahead import LookaheadState, lookahead
from jaxlab.lowcomm.lowcomm import LowComm, LowCommState
from jaxlab.lowcomm.streaming import Fragments, Schedule
from jaxlab.lowcomm.workers import check_metrics, check_weights, resize

__all__ = [
    "Collective",
    "Compression",
    "DataParallel",
    "DataParallelState",
    "Fragments",
    "LookaheadState",
    "LowComm",
    "LowCommState",
    "MatrixSpec",
    "Schedule",
    "check_metrics",
    "check_weights",
    "collectives",
    "diloco",
    "isoloco",
    "isotropize",
    "local_sgd",
    "lookahead",
    "merging",
    "nuclear_norm",
    "polar",
    "resize",
    "resolve_specs",
]
