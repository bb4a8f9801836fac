"""The run of test_resume.py, also as a process to be killed: resume_worker.py FOLDER STEP, which waits after STEP."""

import sys
import types
from pathlib import Path

import jax
import optax

from jaxlab import lowcomm
from jaxlab.core.checkpoint import Checkpointer
from jaxlab.core.mesh import make_mesh
from jaxlab.core.train import call_every, checkpoint, fit
from tests.lowcomm import small

H, EVERY = 5, 4  # checkpoints after 4, 8 and 12 steps: all but none of them at the end of a round


def algorithm(*, feedback=True):
    """DiLoCo with every kind of state: momentum, AdamW states, and what int8 has not sent yet."""
    compress = lowcomm.Compression("int8", block_size=8) if feedback else None
    inner = optax.adamw(optax.cosine_decay_schedule(0.03, 20))
    return lowcomm.LowComm(inner, lowcomm.diloco(0.7, 0.9), H, compress=compress)


def run(folder, *, until, devices=1, feedback=True, hooks=(), every=EVERY, progress=None):
    """Continues the run in `folder` up to a step; returns `fit`'s result and the step it began with."""
    algo, mesh = algorithm(feedback=feedback), None if devices == 1 else make_mesh({"worker": devices})
    call = jax.jit(algo.step(noisy_loss, mesh=mesh), donate_argnums=0)
    with Checkpointer(folder, keep=2) as saver:
        state, start = algo.init(small.params(), small.WORKERS, mesh=mesh), 0
        if (restored := saver.restore(state)) is not None:
            state, start = restored.state, restored.step
        result = fit(
            state, lambda state, batch, key: call(state, batch, jax.random.key(3)),
            lambda i: small.place(small.batch(i), mesh, "worker"), steps=until, start=start, key=jax.random.key(3),
            log_every=1, hooks=[checkpoint(saver, every), *hooks], progress=progress, resume_command="the same again",
        )  # fmt: skip
    return result, start


def noisy_loss(params, batch, key):
    """A loss that uses its key, as dropout does."""
    noise = 0.1 * jax.random.normal(key, batch["x"].shape)
    return small.loss_fn(params, {"x": batch["x"] + noise, "y": batch["y"]}, key)


def main(folder, step):
    def wait(loop):
        if loop.step == step:
            print("reached", flush=True)
            sys.stdin.readline()

    screen = types.SimpleNamespace(line=lambda text: print(text, flush=True), update=lambda done, fields: None)
    run(Path(folder), until=15, hooks=[call_every(wait, 1)], progress=screen)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main(sys.argv[1], int(sys.argv[2]))
