"""What training loses with states in few bits: the claims of the paper at a small size. Slow: every cell is a run."""

import statistics

import pytest

from jaxlab import cli
from jaxlab.core.report import read_result


def shifts(folder):
    """(optimizer, decay, storage) -> the differences from full precision, one a seed."""
    loss = {}
    for row in read_result(folder).rows:
        key = row.labels["optimizer"], row.labels["decay"], row.labels["storage"]
        loss.setdefault(key, {})[row.seed] = row.values["loss"]
    exact = {key[:2]: by_seed for key, by_seed in loss.items() if key[2] == "fp32"}
    return {
        key: [by_seed[seed] - exact[key[:2]][seed] for seed in sorted(by_seed)]
        for key, by_seed in loss.items()
        if key[2] != "fp32"
    }


def means(folder):
    """(optimizer, storage) -> mean shift."""
    return {(key[0], key[2]): statistics.mean(values) for key, values in shifts(folder).items()}


@pytest.mark.slow
def test_four_bits_end_where_full_precision_ends(tmp_path):
    """Three paired seeds. 4 bits within 0.03 nats for AdamW and SGD, 0.05 for the others; 3 bits within 0.10."""
    assert cli.main(["run", "bred", "seeds=0,1,2", f"--workdir={tmp_path / 'run'}"]) == 0
    found = means(tmp_path / "run")
    for name, bound in (("adamw", 0.03), ("sgdm", 0.03), ("lion", 0.05), ("muon", 0.05), ("ademamix", 0.05)):
        assert found[name, "bred4"] <= bound, name
        assert found[name, "bred3"] <= 0.10, name
    for name in ("lion", "muon", "ademamix"):
        assert found[name, "bred4"] < min(found[name, "nearest4"], found[name, "stochastic4"]), name
    every = shifts(tmp_path / "run")
    for ours, stochastic, nearest in zip(
        *(every["lion", 0.99, how] for how in ("bred4", "stochastic4", "nearest4")), strict=True
    ):
        assert ours < stochastic < nearest  # in every seed


@pytest.mark.slow
def test_other_roundings_fall_apart_where_the_decay_is_close_to_one(tmp_path):
    """SGD and Lion at decays of 0.99 and 0.999: nearest rounding loses a tenth of a nat and more, BReD nothing."""
    assert cli.main(["run", "bred:decay", "sweep.decays=0.99,0.999", f"--workdir={tmp_path / 'run'}"]) == 0
    found = {key: statistics.mean(values) for key, values in shifts(tmp_path / "run").items()}
    for name in ("lion", "sgdm"):
        for decay in (0.99, 0.999):
            ours, others = found[name, decay, "bred4"], [found[name, decay, f"{r}4"] for r in ("nearest", "stochastic")]
            assert ours <= 0.03 and ours < min(others), (name, decay)
    assert found["sgdm", 0.999, "nearest4"] > 0.2 and found["lion", 0.99, "nearest4"] > 0.05
