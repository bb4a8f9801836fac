"""Sets up every test process: eight CPU devices, checked signatures, a compilation cache."""

import hashlib
import os
import platform
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# NumPy's own threads would compete with the test processes; it reads this when it is first imported.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MPLBACKEND"] = "Agg"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import pytest
from jaxtyping import install_import_hook

# Before anything imports the package: every signature in it is checked at run time from here on.
install_import_hook("jaxlab", "beartype.beartype")

jax.config.update("jax_num_cpu_devices", 8)

# A shell starts what it runs in the background with interrupts ignored, which would be handed on to every test.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _cache_folder() -> Path:
    """A folder a processor type: compiled code may use instructions that another machine's processor lacks."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = [line for line in lines if line.startswith(("flags", "Features"))][:1]
    kind = hashlib.sha256(f"{platform.machine()} {flags}".encode()).hexdigest()[:12]
    return Path(__file__).parents[1] / ".cache" / "jax" / kind


# Tests spend most of their time compiling. Processes side by side share the folder: entries are compressed with a
# checksum, so that one which another process is still writing is compiled again, with a warning, and never used.
jax.config.update("jax_compilation_cache_dir", str(_cache_folder()))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture
def fakelab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An importable package `fakelab` with the methods `toy` and `toys`; the test runs in its parent folder."""
    from tests.common.fakelab import make

    monkeypatch.syspath_prepend(make(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "fakelab"]:
        del sys.modules[name]
