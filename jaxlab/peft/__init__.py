"""Parameter-efficient fine-tuning of any JAX model: adapters as pure functions over kernels, chosen by path.

    spec = peft.match(params, [peft.Rule(r".*/attn/(q|v)/kernel", peft.LoRA(8, alpha=16)),
                               peft.Rule(r".*/mlp/.*/kernel", peft.CORA(16))])
    print(spec)                                             # what is adapted, and how many numbers are trained
    state = peft.init(key, params, spec)
    loss = lambda trainable: f(peft.merge(params, state.replace(trainable=trainable)), batch)
    params = peft.merge(params, state)                      # to serve with the unchanged model

`peft.adapt(f)` computes `f(merge(params, state), ...)` without forming the merged kernels: cheaper training steps.
Methods: `LoRA` (and rsLoRA, `rs=True`), `LoRAFA`, `VeRA`, `DoRA`, `PiSSA`, `MiLoRA`, `AdaLoRA`, `OFT`, `BOFT`, `CORA`,
`DiaBlo`, `SWIFT`, `SHiRA`, `Full`; and `molf`, an optimizer that chooses in each module between full fine-tuning and
one or more LoRAs. `peft.topology` measures how an update connects coordinates; `peft.nnx` and
`peft.linen` are thin views for flax modules.
"""

from jaxlab.peft import linen, nnx, topology
from jaxlab.peft.adalora import AdaLoRA, Allocator, AllocatorState, orthogonality, ranks
from jaxlab.peft.adapt import adapt
from jaxlab.peft.adapters import (
    Adapters,
    abstract,
    apply,
    combine,
    delta,
    init,
    kept,
    labels,
    merge,
    size,
    stack,
    support,
    to_lora,
    unmerge,
)
from jaxlab.peft.cora import CORA
from jaxlab.peft.lora import DoRA, LoRA, LoRAFA, VeRA
from jaxlab.peft.method import LowRank, Method
from jaxlab.peft.molf import Routing, Score, molf, routing, shares
from jaxlab.peft.molf_groups import Member, Mixture, mixture
from jaxlab.peft.oft import BOFT, OFT
from jaxlab.peft.sparse import DiaBlo, Full, SHiRA
from jaxlab.peft.spec import Rule, Spec, Target, match
from jaxlab.peft.spectral import MiLoRA, PiSSA
from jaxlab.peft.swift import SWIFT

__all__ = [
    "BOFT",
    "CORA",
    "OFT",
    "SWIFT",
    "AdaLoRA",
    "Adapters",
    "Allocator",
    "AllocatorState",
    "DiaBlo",
    "DoRA",
    "Full",
    "LoRA",
    "LoRAFA",
    "LowRank",
    "Member",
    "Method",
    "MiLoRA",
    "Mixture",
    "PiSSA",
    "Routing",
    "Rule",
    "SHiRA",
    "Score",
    "Spec",
    "Target",
    "VeRA",
    "abstract",
    "adapt",
    "apply",
    "combine",
    "delta",
    "init",
    "kept",
    "labels",
    "linen",
    "match",
    "merge",
    "mixture",
    "molf",
    "nnx",
    "orthogonality",
    "ranks",
    "routing",
    "shares",
    "size",
    "stack",
    "support",
    "to_lora",
    "topology",
    "unmerge",
]
