"""Weights in 4 bits with corrections of sign bits: BiLoCo against rounding, GPTQ, AWQ and SVDQuant at the same bytes.

jaxlab run biloco                                 trains a small language model, quantises it with every method
jaxlab run biloco weights=model.safetensors       the matrices of any checkpoint, one after the other; saves the result
jaxlab run biloco format=mxfp4 rounding=gptq      another base
"""

from ml_collections import ConfigDict

VARIANTS = ("tiny", "small")


def get_config(variant: str = "tiny") -> ConfigDict:
    """The config of one variant."""
    c = ConfigDict()
    c.methods = ("bf16", "rtn", "gptq", "awq", "svdquant", "svdquant_whitened", "biloco")  # in this order
    c.ranks = (2, 4, 8)  # rank of the bfloat16 correction of SVDQuant; BiLoCo gets as many terms as take its bytes
    c.format = "nvfp4"  # of the base: nvfp4 or mxfp4
    c.rounding = "nearest"  # of the base under a correction: nearest or gptq
    c.hessian = "full"  # what BiLoCo sees of the inputs' second moments: none, diag or full
    c.seeds = (0,)  # of the model and its training
    c.decode = 15  # timed steps of decoding with the weights of each method; 0 for none

    c.weights = ""  # a .safetensors file to quantise instead of a model that is trained here
    c.select = "weight$|kernel$"  # regular expression: names of the matrices in that file
    c.layout = "out_in"  # of these matrices: out_in (PyTorch) or in_out (Flax)
    c.save = "biloco"  # method whose result is saved as safetensors, at the largest rank; empty for none

    c.model = ConfigDict()
    c.model.preset = "tiny"  # sizes: a name in jaxlab.nn.transformer.PRESETS
    c.model.embedding_std = 1.0  # standard deviation of the initial embedding
    c.model.remat = "none"  # must stay none: calibration looks into the layers

    c.data = ConfigDict()
    c.data.path = ""  # a text file, a folder or a .npy token file; empty for the standard library's own sources
    c.data.seq_len = 64  # tokens a training window
    c.data.eval_windows = 512  # windows of the validation and of the test part
    c.data.calibration = 256  # windows of the training part for the second moments

    c.train = ConfigDict()
    c.train.steps = 400  # optimizer steps
    c.train.batch = 16  # windows a step
    c.train.lr = 8e-3  # peak of AdamW, after a warm-up of a tenth, cosine to a tenth
    c.train.eval_every = 2  # intervals of 50 steps between evaluations
    c.train.checkpoint_every = 2  # intervals of 50 steps between checkpoints, at least 1
    c.train.writers = ("jsonl",)  # metric writers of the training: jsonl, csv, tb, wandb
    if variant == "small":
        c.model.preset = "small"
        c.train.lr = 2e-3
        c.ranks = (2, 8, 32)
    elif variant != "tiny":
        raise ValueError(f"variant must be one of {VARIANTS}, got {variant!r}")
    return c
