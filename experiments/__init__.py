"""Experiments, one file a method: `main(config, workdir)` wires the library together."""
