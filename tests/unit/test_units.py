"""Quantities with units: what people write and read."""

from __future__ import annotations

import pytest

from eth_cli import units


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("40GiB", 40 * 2**30),
        ("80 GB", 80 * 10**9),
        ("1.5kB", 1500),
        ("16KiB", 16384),
        ("3MB", 3 * 10**6),
        ("2TiB", 2 * 2**40),
        ("0B", 0),
        (".5KiB", 512),
        ("1e3B", 1000),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert units.parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("300GB/s", 300e9),
        ("25Gbps", 25e9 / 8),
        ("100 Mbps", 100e6 / 8),
        ("1Tbps", 1e12 / 8),
        ("2GiB/s", 2 * 2**30),
    ],
)
def test_data_rates_are_bytes_and_bits(text: str, expected: float) -> None:
    assert units.parse_bytes_per_s(text) == pytest.approx(expected, rel=1e-12)


def test_compute_rates_and_times() -> None:
    assert units.parse_flops("312TFLOPS") == pytest.approx(312e12)
    assert units.parse_flops("20GFLOPS") == pytest.approx(20e9)
    assert units.parse_flops("1.5PFLOPS") == pytest.approx(1.5e15)
    assert units.parse_seconds("30us") == pytest.approx(3e-5)
    assert units.parse_seconds("7ns") == pytest.approx(7e-9)
    assert units.parse_seconds("2 s") == 2.0


@pytest.mark.parametrize(
    ("parse", "value", "says"),
    [
        (units.parse_bytes, "40", "has no unit"),
        (units.parse_bytes, "40GFLOPS", "GiB"),
        (units.parse_bytes, "forty GiB", "is not a size"),
        (units.parse_bytes, 40, "with its unit"),
        (units.parse_bytes, None, "with its unit"),
        (units.parse_bytes, "-1GiB", "not negative"),
        (units.parse_bytes, "1e400GiB", "finite"),
        (units.parse_bytes, "nan GiB", "is not a size"),
        (units.parse_bytes_per_s, "25Gb", "has no unit that is a data rate"),
        (units.parse_bytes_per_s, "25GB", "has no unit that is a data rate"),
        (units.parse_flops, "312TFLOP", "TFLOPS"),
        (units.parse_seconds, "5 minutes", "ms"),
    ],
)
def test_what_is_not_a_quantity_is_refused_with_the_units_to_use(
    parse: object, value: object, says: str
) -> None:
    assert callable(parse)
    with pytest.raises(ValueError, match="(?i)" + says):
        parse(value)


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (2**30, "1.0 GiB"), (28_024_000_000, "26.1 GiB")],
)
def test_sizes_for_people(num_bytes: float, expected: str) -> None:
    assert units.format_bytes(num_bytes) == expected


def test_times_and_rates_for_people() -> None:
    assert units.format_seconds(0.0031) == "3.10 ms"
    assert units.format_seconds(13.0) == "13.0 s"
    assert units.format_seconds(0.99996) == "1,000 ms"
    assert units.format_seconds(1234.5) == "1,234 s"
    assert units.format_seconds(0) == "0 s"
    assert units.format_seconds(7e-9) == "7.00 ns"
    assert units.format_bytes_per_s(25e9) == "25 GB/s"
    assert units.format_bytes_per_s(12) == "12 B/s"
