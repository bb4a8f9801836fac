"""A package with one tiny method, laid out as this one, for tests of what finds, configures and runs methods."""

import textwrap
from pathlib import Path

_FILES = {
    "__init__.py": "",
    "configs/__init__.py": "",
    "experiments/__init__.py": "",
    "experiments/bench/__init__.py": "",
    "configs/_shared.py": "raise RuntimeError('not a method')",
    "configs/toy.py": '''
        """Toy method: halves a number.

        More words.
        """

        from ml_collections import ConfigDict
        from ml_collections.config_dict import placeholder

        VARIANTS = ("tiny", "large")


        def get_config(variant="tiny"):
            return ConfigDict({
                "seed": 0,
                "steps": 3 if variant == "tiny" else 30,
                "fail": "no",
                "limit": placeholder(int),
                "optim": {"lr": 0.5, "betas": (0.9, 0.95), "nesterov": True, "name": "sgd"},
                "model": {"layers": (1, 2), "name": "mlp"},
            })
    ''',
    "configs/toys.py": '''
        """Second toy method."""

        from ml_collections import ConfigDict

        VARIANTS = ("wide", "deep")


        def get_config(variant="deep"):
            return ConfigDict({"seeds": (0, 1, 2), "depth": 2})
    ''',
    "experiments/toy.py": """
        import os
        import signal

        from jaxlab.core.errors import ConfigError, NonFiniteError
        from jaxlab.core.report import Result, Row
        from jaxlab.core.run import add_env, app


        def describe(config):
            return {"parameters": 160_000, "FLOPs a step": 1.5e9}


        def main(config, workdir):
            add_env(workdir, {"corpus_sha256": "abc"})
            if config.fail == "nan":
                raise NonFiniteError(7, "loss", float("nan"))
            if config.fail == "config":
                raise ConfigError("optim.lr must be positive")
            if config.fail == "interrupt":
                raise KeyboardInterrupt
            if config.fail == "stopped":
                raise SystemExit(0)
            if config.fail == "bug":
                raise IndexError("a bug")
            with open(workdir / "calls.txt", "a") as file:
                file.write(f"{config.seed} {config.optim.lr}\\n")
            rows = [Row({"lr": config.optim.lr}, config.seed, {"loss": 1.0 + config.seed})]
            return Result(title="Toy", summary={"loss": 1.25, "steps": config.steps}, rows=rows)


        if __name__ == "__main__":
            app(main, "toy", package="fakelab")
    """,
    "experiments/bench/toy.py": """
        from jaxlab.core.report import Table


        def main(config):
            return [Table("Speed", ["round", "ms"], [["ours", config.steps]])]
    """,
}


def make(folder: Path) -> Path:
    """Writes the package `fakelab` below `folder`, which then is what `sys.path` needs."""
    for name, text in _FILES.items():
        path = folder / "fakelab" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder
