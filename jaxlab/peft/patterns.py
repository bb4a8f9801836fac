"""Regular expressions on leaf paths that match whole names only.

A pattern is found in a path where it begins and ends at the border of a name: `layers.1` is found in
`layers/1/attn/q/kernel`, and not in `layers/11/attn/q/kernel`. With the plain search of `re` it would be found in
both, and an adapter would silently go to ten layers instead of one. Of several patterns the first that is found wins.
"""

import re
from collections.abc import Sequence

from jaxlab.core.errors import did_you_mean

_START = r"(?:(?<![^/])|(?=/))"
_END = r"(?:(?![^/])|(?<=/))"


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A pattern that is found at borders of names only.

    Args:
      pattern: regular expression; `.` is any character, so `layers.1` and `layers/1` say the same.

    Returns:
      To be used with `search`.

    Raises:
      TypeError: when it is no string.
      ValueError: when it is empty, begins with global flags such as (?i), or is no regular expression.

    >>> paths = ["layers/1/q/kernel", "layers/11/q/kernel"]
    >>> [bool(compile_pattern("layers.1").search(path)) for path in paths]
    [True, False]
    >>> [bool(compile_pattern(".*/(q|v)/kernel$").search(path)) for path in paths]
    [True, True]
    """
    if not isinstance(pattern, str):
        raise TypeError(f"pattern must be a regular expression, got {pattern!r}")
    if not pattern:
        raise ValueError("pattern must not be empty")
    try:
        re.compile(pattern)
        if re.match(r"\(\?[aiLmsux]+\)", pattern):
            raise ValueError(f"pattern {pattern!r} must not begin with flags for all of it; write (?i:...) instead")
        return re.compile(f"{_START}(?:{pattern}){_END}")
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression ({error})") from error


def assign(paths: Sequence[str], patterns: Sequence[str]) -> list[int | None]:
    """Which pattern decides for each path: the index of the first that is found in it, or None.

    Args:
      paths: of the leaves.
      patterns: ordered.

    Returns:
      An index or None for each path.

    Raises:
      ValueError: when a pattern decides for no path, because it is found in none (the message has the nearest path),
        or only where earlier ones are.

    >>> assign(["a/kernel", "a/bias"], ["kernel"])
    [0, None]
    """
    compiled = [compile_pattern(pattern) for pattern in patterns]
    found = [next((i for i, p in enumerate(compiled) if p.search(path)), None) for path in paths]
    for i, pattern in enumerate(patterns):
        if i in found:
            continue
        hits = [j for path, j in zip(paths, found, strict=True) if compiled[i].search(path)]
        if hits:
            earlier = ", ".join(repr(patterns[j]) for j in sorted({j for j in hits if j is not None}))
            raise ValueError(f"rule {pattern!r} decides for no path: {earlier} before it took all that it matches")
        raise ValueError(f"rule {pattern!r} matches no path{_near(pattern, paths)} (names match whole, from / to /)")
    return found


def _near(pattern: str, paths: Sequence[str]) -> str:
    """What to say about paths like the pattern."""
    plain = re.sub(r"[\\^$?+*()\[\]]|\.\*", "", pattern)
    if len(paths) > 12:
        # Whole paths that hold the longest name of the pattern help more than paths of a like length.
        names = sorted(re.findall(r"\w+", plain), key=len, reverse=True)
        some = [path for name in names for path in paths if name in path][:3] or list(paths[:3])
        return f"; paths such as {', '.join(some)}, {len(paths)} in all"
    return did_you_mean(plain, paths) if paths else "; there are none"
