"""The catalogue of GPU types: spot values from the sheets, and what must hold of every type."""

from __future__ import annotations

import pytest

from eth_cli.catalogue import GPU_TYPES, GpuType

GIB = 2**30

WANTED = {
    "A100-40",
    "A100-80",
    "V100-16",
    "V100-32",
    "T4",
    "L4",
    "L40S",
    "A10",
    "A10G",
    "A30",
    "A40",
    "H100",
    "H100-PCIe",
    "H200",
    "B200",
    "GH-96",
    "RTX-3090",
    "RTX-4090",
    "RTX-2080",
    "RTX-2080-Ti",
    "Titan-RTX",
    "RTX-A6000",
    "RTX-6000-Ada",
    "P100-16",
    "P40",
    "GTX-1080-Ti",
    "L20",
    "H800",
    "A800",
}


@pytest.mark.parametrize(
    ("name", "memory_gib", "bf16", "fp16", "fp32", "memory_rate", "capability"),
    [
        ("A100-40", 40, 312e12, 312e12, 19.5e12, 1555e9, 8.0),
        ("A100-80", 80, 312e12, 312e12, 19.5e12, 2039e9, 8.0),
        ("V100-16", 16, None, 125e12, 15.7e12, 900e9, 7.0),
        ("T4", 16, None, 65e12, 8.1e12, 320e9, 7.5),
        ("L4", 24, 121e12, 121e12, 30.3e12, 300e9, 8.9),
        ("H100", 80, 989.5e12, 989.5e12, 67e12, 3350e9, 9.0),
        ("RTX-3090", 24, 71e12, 71e12, 35.6e12, 936e9, 8.6),
        ("RTX-2080", 8, None, 42.4e12, 10.6e12, 448e9, 7.5),
        ("P40", 24, None, None, 12e12, 346e9, 6.1),
        ("GH-96", 96, 990e12, 990e12, 67e12, 4000e9, 9.0),
    ],
)
def test_figures_of_the_sheets(
    name: str,
    memory_gib: int,
    bf16: float | None,
    fp16: float | None,
    fp32: float,
    memory_rate: float,
    capability: float,
) -> None:
    gpu = GPU_TYPES[name]
    assert gpu.memory_bytes == memory_gib * GIB
    assert gpu.peak_flops.get("bf16") == (None if bf16 is None else pytest.approx(bf16))
    assert gpu.peak_flops.get("fp16") == (None if fp16 is None else pytest.approx(fp16))
    assert gpu.peak_flops["fp32"] == pytest.approx(fp32)
    assert gpu.memory_bandwidth_bytes_per_s == pytest.approx(memory_rate)
    assert gpu.compute_capability == capability


def test_the_types_that_users_ask_for_are_there() -> None:
    assert sorted(WANTED - set(GPU_TYPES)) == []
    assert len(GPU_TYPES) >= 25


@pytest.mark.parametrize(("name", "gpu"), GPU_TYPES.items())
def test_every_type_is_plausible(name: str, gpu: GpuType) -> None:
    assert set(gpu.peak_flops) <= {"bf16", "fp16", "fp32"}
    # Case 32: bf16 came with compute capability 8.0 and has the rate of fp16.
    assert ("bf16" in gpu.peak_flops) == (gpu.compute_capability >= 8.0)
    if "bf16" in gpu.peak_flops:
        assert gpu.peak_flops["bf16"] == gpu.peak_flops["fp16"]
    # Tensor cores beat plain fp32 by 2 (GeForce) to 30 times; sparse figures would exceed this.
    if "fp16" in gpu.peak_flops:
        assert 1.9 <= gpu.peak_flops["fp16"] / gpu.peak_flops["fp32"] <= 30
    assert 4e12 < gpu.peak_flops["fp32"] < 2e14
    assert 8 * GIB <= gpu.memory_bytes <= 200 * GIB
    assert gpu.memory_bytes % GIB == 0
    assert 1e11 < gpu.memory_bandwidth_bytes_per_s < 1e13
    assert 1e10 < gpu.intra_node_bytes_per_s < gpu.memory_bandwidth_bytes_per_s
    assert gpu.source.startswith("NVIDIA ")
    assert len(gpu.source) > len("NVIDIA L4")


def test_the_catalogue_cannot_be_changed_by_accident() -> None:
    with pytest.raises(TypeError):
        GPU_TYPES["T4"].peak_flops["bf16"] = 1.0  # type: ignore[index] # what is tested
