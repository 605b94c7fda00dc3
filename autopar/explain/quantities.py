"""Quantities in words: bytes, seconds, counts, percentages."""

from __future__ import annotations

GIB = 2.0**30


def bytes_text(n: float) -> str:
    """``1536`` -> ``1.5 KiB``.

    >>> bytes_text(1023), bytes_text(5 << 30)
    ('1023 B', '5.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def seconds_text(seconds: float) -> str:
    """Three digits, in the unit that suits.

    >>> seconds_text(9.3456), seconds_text(0.0456), seconds_text(2.5e-6), seconds_text(0), seconds_text(126.2)
    ('9.35 s', '45.6 ms', '2.50 us', '0 s', '126 s')
    """
    if seconds == 0:
        return "0 s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if seconds >= size or unit == "ns":
            return f"{_three(seconds / size)} {unit}"
    raise AssertionError


def count_text(n: float) -> str:
    """Three digits, thousands apart.

    >>> count_text(123456), count_text(12.345), count_text(989e12)
    ('123,000', '12.3', '9.89e+14')
    """
    if n >= 1e9:
        return f"{n:.3g}"
    return f"{float(f'{n:.3g}'):,.0f}" if n >= 100 else _three(n)


def percent(part: float, whole: float) -> str:
    """``part`` of ``whole``; nothing where there is no whole.

    >>> percent(1, 3), percent(1, 0)
    ('33.3 %', '')
    """
    return f"{100 * part / whole:.1f} %" if whole else ""


def difference(value: float, other: float) -> str:
    """How much ``value`` is above ``other``, in percent.

    >>> difference(1.1, 1.0), difference(0.5, 1.0)
    ('+10.0 %', '-50.0 %')
    """
    return f"{100 * (value / other - 1):+.1f} %" if other else ""


def several(n: int, what: str) -> str:
    """``1 node``, ``2 nodes``.

    >>> several(1, "node"), several(2, "microbatch"), several(1024, "rank"), several(3, "axis")
    ('1 node', '2 microbatches', '1,024 ranks', '3 axes')
    """
    if n != 1:
        what = f"{what[:-2]}es" if what.endswith("is") else f"{what}{'es' if what.endswith(('ch', 'ss')) else 's'}"
    return f"{n:,} {what}"


def _three(value: float) -> str:
    """Three digits without an exponent.

    >>> _three(0.999), _three(45.67), _three(456.7)
    ('0.999', '45.7', '457')
    """
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"
