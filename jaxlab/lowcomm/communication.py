"""What a compiled program really sends: the collectives in its HLO, counted.

The formulas of `LowComm.bytes_per_round` are checked against this.
"""

import dataclasses
import math
import re

_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128}
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
_OP = re.compile(rf"= (?P<shape>\(.*?\)|\S+) (?P<kind>{'|'.join(_KINDS)})(?P<start>-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled program.

    Attributes:
      kind: "all-reduce", "all-gather", ...
      nbytes: size of its result on each device, in bytes; for an all-reduce, the size of what each device contributes.
      in_loop: it stands in a computation other than the entry (a loop body or a conditional branch).
      dtypes: element types it moves.
    """

    kind: str
    nbytes: int
    in_loop: bool
    dtypes: tuple[str, ...]


def collectives(hlo: str) -> list[Collective]:
    """Lists the collectives in the text of a compiled program, `jitted.lower(...).compile().as_text()`.

    Args:
      hlo: optimised HLO text.

    Returns:
      One entry an operation; an asynchronous pair counts once, by its start.

    Example:
      >>> text = "ENTRY %main () -> f32[4] {\\n  %r = f32[4]{0} all-reduce(f32[4]{0} %x), to_apply=%add\\n}"
      >>> collectives(text)
      [Collective(kind='all-reduce', nbytes=16, in_loop=False, dtypes=('f32',))]
    """
    found, entry = [], False
    for line in hlo.splitlines():
        if line.rstrip().endswith("{") and "->" in line:
            entry = line.lstrip().startswith("ENTRY")
        match = _OP.search(line)
        if match is None:
            continue
        arrays = _ARRAY.findall(match["shape"])
        if match["start"]:
            arrays = _results(match["kind"], arrays)
        nbytes = sum(_bits(dtype) * math.prod(int(n) for n in dims.split(",") if n) // 8 for dtype, dims in arrays)
        found.append(Collective(match["kind"], nbytes, not entry, tuple(dict.fromkeys(d for d, _ in arrays))))
    return found


def _results(kind: str, arrays: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those of the arrays an asynchronous start returns that are results: the others are operands and bookkeeping."""
    if kind == "all-reduce" or len(arrays) < 2:  # an all-reduce works in place and returns results only
        return arrays
    if kind == "collective-permute" and len(arrays) >= 4 and arrays[-2:] == [("u32", "")] * 2:
        arrays = arrays[:-2]
    return arrays[len(arrays) // 2 :]


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.match(r"[a-z]+(\d+)", dtype)
    if digits is None:
        raise ValueError(f"unknown element type {dtype!r} in HLO")
    return int(digits.group(1))
