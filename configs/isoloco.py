"""IsoLoCo against data-parallel AdamW, DiLoCo, DiLoCo-SGD and DiLoCo-SGD + Iso-C on a small byte-level language model.

jaxlab run isoloco                 five methods, 8 workers, one seed; 1 to 3 minutes on 2 CPU cores
jaxlab run isoloco seeds=0,1,2     the same with confidence intervals
jaxlab run isoloco:workers         the gap to DiLoCo at 1, 2, 4, 8 and 16 workers
jaxlab run isoloco:inner_steps     the gap to DiLoCo at 5, 15 and 30 inner steps
jaxlab run isoloco:tune            the grids that the settings below come from
paper178m, paper512m               the published sizes and settings (arXiv 2607.03011), for pods
"""

from ml_collections import ConfigDict, config_dict

VARIANTS = ("tiny", "workers", "inner_steps", "tune", "paper178m", "paper512m")

LRS = (5.7e-3, 8e-3, 1.13e-2)  # neighbours differ by a factor of sqrt(2), as in the paper
GRIDS = (
    ("dp", (1e-3, 1.4e-3, 2e-3, 2.8e-3, 4e-3, *LRS, 1.6e-2, 2.26e-2, 3.2e-2, 4.5e-2), (1.0,), (0.0,)),
    ("diloco", LRS, (0.7, 1.0), (0.3, 0.6)),
    ("diloco_sgd", LRS, (0.7, 1.0, 1.3, 1.6), (0.0,)),
    ("diloco_sgd_isoc", LRS, (1.8, 2.5, 3.6, 5.0), (0.0,)),
    ("isoloco", LRS, (1.8, 2.5), (0.6, 0.8)),
)


def get_config(variant: str = "tiny") -> ConfigDict:
    """The config of one variant."""
    c = ConfigDict()
    c.methods = ("dp", "diloco", "diloco_sgd", "diloco_sgd_isoc", "isoloco")  # what is compared, in this order
    c.seeds = (0,)  # one run of every method a seed: initial parameters and order of the data

    c.model = ConfigDict()
    c.model.preset = "tiny"  # sizes: a name in jaxlab.nn.transformer.PRESETS
    c.model.embedding_std = 1.0  # standard deviation of the initial embedding
    c.model.remat = "none"  # what the backward pass recomputes: none, dots or full

    c.data = ConfigDict()
    c.data.path = ""  # a text file, a folder or a .npy token file; empty for the standard library's own sources
    c.data.split = "contiguous"  # a worker's data: iid, contiguous (a stretch of the corpus) or group (packages)
    c.data.seq_len = 64  # tokens a training window
    c.data.eval_windows = 512  # windows of the validation and of the test part

    c.train = ConfigDict()
    c.train.steps = 900  # inner optimizer steps of every run
    c.train.global_batch = 16  # windows a step, over all workers
    c.train.warmup = 0.1  # share of the steps in which the learning rate rises from 0.1 of its peak
    c.train.final_lr = 0.1  # learning rate at the end, as a share of the peak (cosine)
    c.train.weight_decay = 0.1  # AdamW, on all parameters
    c.train.clip = 1.0  # global norm of the gradients, in every method
    c.train.unit = "round"  # what one call of the compiled program does: a round, or a single inner step
    c.train.eval_every = 10  # rounds between evaluations on the validation part
    c.train.checkpoint_every = 10  # rounds between checkpoints; 0 for none
    c.train.writers = ("jsonl",)  # metric writers of a run: jsonl, csv, tb, wandb

    c.lowcomm = ConfigDict()
    c.lowcomm.workers = 8  # K
    c.lowcomm.inner_steps = 15  # H, inner steps between synchronisations
    c.lowcomm.aggregate = "mean"  # how pseudo-gradients are merged: mean, ties, dare, tsv_m, iso_c, iso_cts, ...
    c.lowcomm.fragments = 1  # P, parts of the model that synchronise one after the other
    c.lowcomm.overlap = 0  # V, inner steps between a fragment's synchronisation and its application
    c.lowcomm.mix = 0.0  # share of the local parameters kept at the application
    c.lowcomm.compress = "none"  # how pseudo-gradients are sent: none, int8, int4 or e3m0
    c.lowcomm.isotropize = "svd"  # how Iso-C is computed: svd, newton_schulz (accelerators) or qdwh
    c.lowcomm.state_bits = 32  # bits of the inner optimizer's averages: 32, or 8, 4 or 3 with block replay dithering
    c.lowcomm.devices = 0  # devices on the worker axis of the mesh; 0 takes as many as divide K

    c.sweep = ConfigDict()
    c.sweep.workers = ()  # values of K to run instead of lowcomm.workers
    c.sweep.inner_steps = ()  # values of H to run instead of lowcomm.inner_steps

    # Tuned settings, (K, H, inner learning rate, outer learning rate, outer momentum), one tuple a K and H that was
    # tuned; the nearest is taken for others, and the report says so. The second group overrides them for all methods.
    c.settings = ConfigDict()
    c.settings.dp = ((8, 15, 8e-3, 1.0, 0.0),)  # data-parallel AdamW; K, H and the outer settings do not matter
    c.settings.diloco = (  # DiLoCo, outer Nesterov
        (1, 15, 1.13e-2, 0.5, 0.6),
        (2, 15, 1.13e-2, 0.5, 0.6),
        (4, 15, 5.7e-3, 0.7, 0.6),
        (8, 5, 1.13e-2, 0.7, 0.6),
        (8, 15, 5.7e-3, 1.0, 0.6),
        (8, 30, 5.7e-3, 1.0, 0.6),
        (16, 15, 8e-3, 1.0, 0.6),
    )
    c.settings.diloco_sgd = (  # DiLoCo without outer momentum
        (1, 15, 1.13e-2, 0.7, 0.0),
        (2, 15, 8e-3, 1.0, 0.0),
        (4, 15, 8e-3, 1.3, 0.0),
        (8, 5, 1.6e-2, 1.0, 0.0),
        (8, 15, 8e-3, 1.3, 0.0),
        (8, 30, 5.7e-3, 1.6, 0.0),
        (16, 15, 8e-3, 1.3, 0.0),
    )
    c.settings.diloco_sgd_isoc = (  # the same with Iso-C
        (1, 15, 1.6e-2, 1.25, 0.0),
        (2, 15, 8e-3, 2.5, 0.0),
        (4, 15, 8e-3, 3.6, 0.0),
        (8, 5, 1.13e-2, 3.6, 0.0),
        (8, 15, 8e-3, 3.6, 0.0),
        (8, 30, 4e-3, 5.0, 0.0),
        (16, 15, 4e-3, 7.0, 0.0),
    )
    c.settings.isoloco = (  # IsoLoCo
        (1, 15, 5.7e-3, 1.8, 0.6),
        (2, 15, 1.13e-2, 1.25, 0.6),
        (4, 15, 8e-3, 1.8, 0.6),
        (8, 5, 1.13e-2, 1.8, 0.6),
        (8, 15, 5.7e-3, 2.5, 0.6),
        (8, 30, 4e-3, 2.5, 0.6),
        (16, 15, 5.7e-3, 2.5, 0.8),
    )
    c.settings.lr = config_dict.placeholder(float)  # inner learning rate for all methods
    c.settings.outer_lr = config_dict.placeholder(float)  # outer learning rate for all methods
    c.settings.outer_momentum = config_dict.placeholder(float)  # outer momentum for all methods

    # Grids to try instead of the settings: (method, inner learning rates, outer learning rates, outer momenta) each.
    c.grid = ()
    if variant == "workers":
        c.sweep.workers = (1, 2, 4, 8, 16)
        c.seeds = (0, 1, 2)
    elif variant == "inner_steps":
        c.sweep.inner_steps = (5, 15, 30)
        c.seeds = (0, 1, 2)
    elif variant == "tune":
        c.grid = GRIDS
        c.seeds = (1000,)  # never a seed that results are reported for
        c.train.eval_every = 30
    elif variant in ("paper178m", "paper512m"):
        _paper(c, variant)
    elif variant != "tiny":
        raise ValueError(f"variant must be one of {VARIANTS}, got {variant!r}")
    return c


def _paper(c: ConfigDict, variant: str) -> None:
    """The published settings: 20 tokens a parameter, sequences of 2048, 8 workers, 30 inner steps."""
    small = variant == "paper178m"
    c.model.preset = "178m" if small else "512m"
    c.model.embedding_std = 0.02
    c.model.remat = "full"
    c.data.seq_len = 2048
    c.data.eval_windows = 128
    c.train.global_batch = 256 if small else 1024
    c.train.steps = 6750 if small else 4890
    c.train.eval_every = c.train.checkpoint_every = 15
    c.lowcomm.inner_steps = 30
    c.lowcomm.isotropize = "newton_schulz"
    if small:
        c.settings.dp = ((8, 30, 1.95e-3, 1.0, 0.0),)
        c.settings.diloco = ((8, 30, 1.38e-3, 0.7, 0.9),)
        c.settings.diloco_sgd = ((8, 30, 1.38e-3, 1.6, 0.0),)
        c.settings.diloco_sgd_isoc = ((8, 30, 3.91e-3, 2.1, 0.0),)
        c.settings.isoloco = ((8, 30, 1.38e-3, 1.8, 0.8),)
    else:
        c.methods = ("dp", "diloco", "isoloco")
        c.settings.dp = ((8, 30, 2.76e-3, 1.0, 0.0),)
        c.settings.diloco = ((8, 30, 6.91e-4, 0.7, 0.9),)
        c.settings.isoloco = ((8, 30, 1.38e-3, 1.8, 0.8),)
