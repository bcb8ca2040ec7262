"""Parse and print quantities with units: bytes, seconds, rates. The only place that knows 1024.

Inside the project every value is SI: bytes, seconds, bytes per second, FLOP per second. Text with
units exists only in files that people write and in tables that people read.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

BYTE_UNITS = {prefix + "B": factor for prefix, factor in (_DECIMAL | _BINARY).items()}
"""Bytes per unit: B, kB ... TB (powers of 1000), KiB ... TiB (powers of 1024)."""
BYTE_RATE_UNITS = {unit + "/s": factor for unit, factor in BYTE_UNITS.items()} | {
    prefix + "bps": factor / 8 for prefix, factor in _DECIMAL.items()
}
"""Bytes per second per unit: the byte units per second, and bits per second (Mbps, Gbps, Tbps)."""
FLOP_RATE_UNITS = {prefix + "FLOPS": factor for prefix, factor in _DECIMAL.items()}
"""FLOP per second per unit."""
TIME_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
"""Seconds per unit."""

_LONGEST = 40
"""Characters of the longest quantity that makes sense."""

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z/]*)\s*")


def _parse(value: object, units: dict[str, float], what: str, example: str) -> float:
    if not isinstance(value, str):
        shown = "a list or mapping" if isinstance(value, list | dict | tuple) else value
        raise ValueError(f"{shown} is not {what} with its unit; write it like {example}")
    match = _QUANTITY.fullmatch(value)
    if match is None or len(value) > _LONGEST:
        raise ValueError(f"{value[:_LONGEST]!r} is not {what}; write it like {example}")
    number, unit = match[1], match[2]
    if unit not in units:
        known = ", ".join(u for u in units if not u.startswith(("K", "P")) or u.startswith("Ki"))
        problem = f"has no unit that is {what}" if unit else "has no unit"
        raise ValueError(f"{value!r} {problem}; use one of {known}")
    if not 0 <= float(number) * units[unit] < math.inf:
        raise ValueError(f"{value!r} must be finite and not negative")
    # In decimals, so that 50us is the float nearest to 0.00005, as a reader expects.
    return float(Decimal(number) * Decimal(str(units[unit])))


def parse_bytes(value: object) -> int:
    """Bytes from text such as ``40GiB``. Raises ValueError with the known units."""
    return round(_parse(value, BYTE_UNITS, "a size", "40GiB"))


def parse_bytes_per_s(value: object) -> float:
    """Bytes per second from text such as ``300GB/s`` or ``25Gbps``. Raises ValueError."""
    return _parse(value, BYTE_RATE_UNITS, "a data rate", "300GB/s or 25Gbps")


def parse_flops(value: object) -> float:
    """FLOP per second from text such as ``312TFLOPS``. Raises ValueError."""
    return _parse(value, FLOP_RATE_UNITS, "a compute rate", "312TFLOPS")


def parse_seconds(value: object) -> float:
    """Seconds from text such as ``5us``. Raises ValueError."""
    return _parse(value, TIME_UNITS, "a time", "5us")


def format_bytes(num_bytes: float) -> str:
    """Bytes for people, in binary units: ``26.1 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """Seconds for people: ``3.10 ms``."""
    if seconds == 0:
        return "0 s"
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= factor:
            return f"{_three_digits(seconds / factor)} {unit}"
    return f"{_three_digits(seconds / 1e-9)} ns"


def _three_digits(value: float) -> str:
    # Trailing zeros stay, so that columns of figures are equally exact: 13.0, 1.60, 405.
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"


def format_bytes_per_s(rate: float) -> str:
    """Bytes per second for people, in decimal units as data sheets use: ``25.0 GB/s``."""
    for unit, factor in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if abs(rate) >= factor:
            return f"{rate / factor:.3g} {unit}"
    return f"{rate:.3g} B/s"
