"""Optimizer states in 4 and 3 bits: five optimizers in full precision, with BReD, and with other roundings.

jaxlab run bred                    five optimizers, five ways to store their states, one seed; 4 to 8 minutes on 2 cores
jaxlab run bred seeds=0,1,2        the same with paired differences and confidence intervals
jaxlab run bred:decay              Lion and SGD at decays of 0.9, 0.99 and 0.999: where roundings fall apart
jaxlab run bred:ablation           block size, type of the scale, and map
jaxlab run bred:finetune           AdamW and Muon go on from a checkpoint, on one package of the corpus
jaxlab run bred:tune               the grids that the settings below come from, in full precision
paper120m, paper1b                 sizes of the paper, for pods
"""

from ml_collections import ConfigDict, config_dict

VARIANTS = ("tiny", "decay", "ablation", "finetune", "tune", "paper120m", "paper1b")

# (optimizer, learning rates, decays): the grid of `bred:tune`.
GRIDS = (
    ("adamw", (2e-3, 4e-3, 8e-3, 1.6e-2), (0.95,)),
    ("muon", (1e-2, 2e-2, 4e-2, 8e-2), (0.95,)),
    ("lion", (1e-3, 2e-3, 4e-3), (0.99,)),
    ("sgdm", (3.2, 6.4, 12.8, 25.6), (0.9, 0.99)),
    ("ademamix", (2e-3, 4e-3, 8e-3, 1.6e-2), (0.999,)),
)


def get_config(variant: str = "tiny") -> ConfigDict:
    """The config of one variant."""
    c = ConfigDict()
    c.optimizers = ("adamw", "muon", "lion", "sgdm", "ademamix")  # what is compared, in this order
    # How states are stored: fp32, or ROUNDING and BITS (bred4, nearest4, stochastic3, ...) with options behind
    # dashes: b32 (block size), bf16 (type of the scales), zero (a map with a level at zero).
    c.storages = ("fp32", "bred4", "bred3", "nearest4", "stochastic4")  # fp32 is what the others are compared with
    c.seeds = (0,)  # one run of everything a seed: initial parameters and order of the data

    c.model = ConfigDict()
    c.model.preset = "tiny"  # sizes: a name in jaxlab.nn.transformer.PRESETS
    c.model.embedding_std = 1.0  # standard deviation of the initial embedding
    c.model.remat = "none"  # what the backward pass recomputes: none, dots or full

    c.data = ConfigDict()
    c.data.path = ""  # a text file, a folder or a .npy token file; empty for the standard library's own sources
    c.data.seq_len = 64  # tokens a training window
    c.data.eval_windows = 512  # windows of the validation and of the test part

    c.train = ConfigDict()
    c.train.steps = 400  # optimizer steps of every run
    c.train.batch = 16  # windows a step
    c.train.warmup = 0.1  # share of the steps in which the learning rate rises from 0.1 of its peak
    c.train.final_lr = 0.1  # learning rate at the end, as a share of the peak (cosine)
    c.train.weight_decay = 0.1  # decoupled, on all parameters; SGD has none
    c.train.clip = 1.0  # global norm of the gradients
    c.train.eval_every = 1  # intervals of 50 steps between evaluations on the validation part
    c.train.checkpoint_every = 4  # intervals of 50 steps between checkpoints; 0 for none
    c.train.writers = ("jsonl",)  # metric writers of a run: jsonl, csv, tb, wandb

    c.bred = ConfigDict()
    c.bred.min_size = 4096  # states with fewer elements stay in full precision
    c.bred.seed = 0  # of the dither
    c.bred.measure = True  # also run the optimizer in full precision on the same gradients, for the error of the state
    c.bred.devices = 1  # devices that share the batch and the states; 0 for all

    c.finetune = ConfigDict()
    c.finetune.checkpoint = ""  # folder of a cell to start from, such as RUN/cells/NAME; empty trains one first
    c.finetune.group = ""  # package (or folder) of the corpus that is left out of the training before, and then used
    c.finetune.steps = 200  # optimizer steps after the checkpoint
    c.finetune.lr = 0.25  # peak learning rate after the checkpoint, as a share of the one before

    # (learning rate, decay) of every optimizer: decays in common use, learning rates tuned for them in full precision
    # on the validation part with another seed. The decay is b2 of AdamW and Lion, the momentum of Muon and SGD, and b3
    # of AdEMAMix.
    c.settings = ConfigDict()
    c.settings.adamw = (8e-3, 0.95)  # b1 = 0.9
    c.settings.muon = (4e-2, 0.95)  # matrices of the layers; everything else with AdamW at `adamw`'s setting
    c.settings.lion = (2e-3, 0.99)  # b1 = 0.9
    c.settings.sgdm = (6.4, 0.9)  # the learning rate is that of plain SGD: a step is (1 - decay) times the trace
    c.settings.ademamix = (8e-3, 0.999)  # b1 = 0.9, b2 = 0.95, alpha = 5
    c.settings.decay = config_dict.placeholder(float)  # decay for all optimizers

    c.bench = ConfigDict()
    c.bench.peers = False  # `jaxlab bench bred bench.peers=true`: also the optimizers of torch, torchao, bitsandbytes

    c.sweep = ConfigDict()
    c.sweep.decays = ()  # decays to run instead of the tuned ones
    c.grid = ()  # (optimizer, learning rates, decays) each, to try instead of the settings
    if variant == "decay":
        c.optimizers = ("lion", "sgdm")
        c.sweep.decays = (0.9, 0.99, 0.999)
        c.seeds = (0, 1, 2)
    elif variant == "ablation":
        c.optimizers = ("adamw", "muon", "lion")
        c.storages = (
            "fp32", "bred4", "bred4-b64", "bred4-b32", "bred4-b16", "bred4-b32-bf16", "bred4-zero", "bred8",
        )  # fmt: skip
        c.seeds = (0, 1, 2)
    elif variant == "finetune":
        c.optimizers = ("adamw", "muon")
        c.storages = ("fp32", "bred4", "bred3")
        c.finetune.group = "asyncio"
        c.data.eval_windows = 256  # a package is small
    elif variant == "tune":
        c.storages = ("fp32",)
        c.grid = GRIDS
        c.seeds = (1000,)  # never a seed that results are reported for
    elif variant in ("paper120m", "paper1b"):
        _paper(c, variant)
    elif variant != "tiny":
        raise ValueError(f"variant must be one of {VARIANTS}, got {variant!r}")
    return c


def _paper(c: ConfigDict, variant: str) -> None:
    """The published sizes; 20 tokens a parameter, and common settings, since the paper's are not public."""
    small = variant == "paper120m"
    c.model.preset = "120m" if small else "1b"
    c.model.embedding_std = 0.02
    c.model.remat = "full"
    c.data.seq_len = 1024 if small else 2048
    c.train.batch = 256
    c.train.steps = 9200 if small else 42_000
    c.train.eval_every = c.train.checkpoint_every = 5
    c.bred.measure = False
    c.bred.devices = 0
    c.settings.adamw = (1e-3, 0.95) if small else (4e-4, 0.95)
    c.settings.muon = (2e-2, 0.95)
    c.settings.lion = (1e-4, 0.99)
    c.settings.sgdm = (1.0, 0.9)
    c.settings.ademamix = (1e-3, 0.999)
    if not small:
        c.optimizers = ("adamw", "muon")
        c.storages = ("fp32", "bred4", "bred3")
