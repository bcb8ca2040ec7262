"""GPU types with their data-sheet figures; data only.

Memory is the marketed size, in binary units as the chips are built; what the driver leaves of it is
some percent less. Peaks are dense (no structured sparsity) tensor-core figures with fp32
accumulation where the type has them, fp32 the plain (non-TF32) rate, at boost clock. A dtype that
is absent has no hardware support (or, fp16 on cards of 2016 other than the P100, a 64th of the fp32
rate). Where sheets give a rate "with sparsity" only, the dense one is half of it. Links are NVLink
where the type has it built in, else PCIe, since a bridge is optional and joins two cards only;
sheets sum both directions, here is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from eth_cli import units


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuType:
    """Data-sheet figures of one GPU type."""

    memory_bytes: int
    """Memory [bytes]."""
    peak_flops: MappingProxyType[str, float]
    """Dense peak by dtype [FLOP/s]."""
    memory_bandwidth_bytes_per_s: float
    """Memory bandwidth [bytes/s]."""
    intra_node_bytes_per_s: float
    """NVLink or PCIe to another GPU of the node, one direction [bytes/s]."""
    compute_capability: float
    """CUDA compute capability."""
    source: str
    """Title of the data sheet or white paper the figures are from."""


DTYPES: Final = ("bf16", "fp16", "fp32")
"""The number formats that a plan may train in."""

INTRA_NODE_LATENCY_S: Final = 5e-6
"""Latency assumed of a link inside a node whose bandwidth comes from this catalogue [s]."""

_PCIE3, _PCIE4, _PCIE5 = 16, 32, 64
"""Sixteen lanes of each generation, one direction [GB/s], rounded as on the data sheets."""

_BF16_CAPABILITY = 8.0
"""The first compute capability whose tensor cores take bf16, at the rate of fp16."""


def _gpu(
    memory: str,
    fp32_tflops: float,
    fp16_tflops: float | None,
    memory_gb_per_s: float,
    link_gb_per_s: float,
    compute_capability: float,
    source: str,
) -> GpuType:
    """A type from figures in the units of data sheets."""
    peak = {"fp32": fp32_tflops * 1e12}
    if fp16_tflops is not None:
        peak["fp16"] = fp16_tflops * 1e12
        if compute_capability >= _BF16_CAPABILITY:
            peak["bf16"] = fp16_tflops * 1e12
    return GpuType(
        memory_bytes=units.parse_bytes(memory),
        peak_flops=MappingProxyType(peak),
        memory_bandwidth_bytes_per_s=memory_gb_per_s * 1e9,
        intra_node_bytes_per_s=link_gb_per_s * 1e9,
        compute_capability=compute_capability,
        source=f"NVIDIA {source}",
    )


_TURING = "Turing architecture white paper"
_GA102 = "Ampere GA102 architecture white paper"
_ADA = "Ada architecture white paper"
_BLACKWELL = "RTX Blackwell architecture white paper"
_GH200 = "GH200 Grace Hopper data sheet"

# Aligned as a table, to be compared with the sheets.
# fmt: off
GPU_TYPES: Final = MappingProxyType({
    # name             memory   fp32   fp16    memory link    compute
    #                           TFLOPS TFLOPS  GB/s   GB/s    capability, source
    "GTX-1080-Ti": _gpu("11GiB", 11.3,  None,   484,   _PCIE3, 6.1,  "GTX 1080 Ti product page"),
    "P40":         _gpu("24GiB", 12,    None,   346,   _PCIE3, 6.1,  "P40 data sheet"),
    "P100-16":     _gpu("16GiB", 10.6,  21.2,   732,   80,     6.0,  "P100 data sheet (SXM2)"),
    "V100-16":     _gpu("16GiB", 15.7,  125,    900,   150,    7.0,  "V100 data sheet (SXM2)"),
    "V100-32":     _gpu("32GiB", 15.7,  125,    900,   150,    7.0,  "V100 data sheet (SXM2)"),
    "V100-16-PCIe":_gpu("16GiB", 14,    112,    900,   _PCIE3, 7.0,  "V100 data sheet (PCIe)"),
    "V100-32-PCIe":_gpu("32GiB", 14,    112,    900,   _PCIE3, 7.0,  "V100 data sheet (PCIe)"),
    "T4":          _gpu("16GiB", 8.1,   65,     320,   _PCIE3, 7.5,  f"{_TURING}, T4"),
    "RTX-2080":    _gpu("8GiB",  10.6,  42.4,   448,   _PCIE3, 7.5,  f"{_TURING}, 2080 FE"),
    "RTX-2080-Ti": _gpu("11GiB", 14.2,  56.9,   616,   _PCIE3, 7.5,  f"{_TURING}, 2080 Ti FE"),
    "Titan-RTX":   _gpu("24GiB", 16.3,  130.5,  672,   _PCIE3, 7.5,  "Titan RTX data sheet"),
    "RTX-6000":    _gpu("24GiB", 16.3,  130.5,  672,   _PCIE3, 7.5,  f"{_TURING}, RTX 6000"),
    "A100-40":     _gpu("40GiB", 19.5,  312,    1555,  300,    8.0,  "A100 data sheet (40GB SXM)"),
    "A100-80":     _gpu("80GiB", 19.5,  312,    2039,  300,    8.0,  "A100 data sheet (80GB SXM)"),
    "A100-40-PCIe":_gpu("40GiB", 19.5,  312,    1555,  _PCIE4, 8.0,  "A100 data sheet (40GB PCIe)"),
    "A100-80-PCIe":_gpu("80GiB", 19.5,  312,    1935,  _PCIE4, 8.0,  "A100 data sheet (80GB PCIe)"),
    "A800":        _gpu("80GiB", 19.5,  312,    2039,  200,    8.0,  "A800 data sheet (SXM 80)"),
    "A30":         _gpu("24GiB", 10.3,  165,    933,   _PCIE4, 8.0,  "A30 data sheet"),
    "A2":          _gpu("16GiB", 4.5,   18,     200,   16,     8.6,  "A2 data sheet (PCIe x8)"),
    "A10":         _gpu("24GiB", 31.2,  125,    600,   _PCIE4, 8.6,  "A10 data sheet"),
    "A10G":        _gpu("24GiB", 35,    70,     600,   _PCIE4, 8.6,  "A10G data sheet"),
    "A40":         _gpu("48GiB", 37.4,  149.7,  696,   _PCIE4, 8.6,  "A40 data sheet"),
    "RTX-3080":    _gpu("10GiB", 29.8,  59.5,   760,   _PCIE4, 8.6,  _GA102),
    "RTX-3090":    _gpu("24GiB", 35.6,  71,     936,   _PCIE4, 8.6,  _GA102),
    "RTX-A4000":   _gpu("16GiB", 19.2,  76.7,   448,   _PCIE4, 8.6,  "RTX A4000 data sheet"),
    "RTX-A5000":   _gpu("24GiB", 27.8,  111.1,  768,   _PCIE4, 8.6,  "RTX A5000 data sheet"),
    "RTX-A6000":   _gpu("48GiB", 38.7,  154.8,  768,   _PCIE4, 8.6,  "RTX A6000 data sheet"),
    "L4":          _gpu("24GiB", 30.3,  121,    300,   _PCIE4, 8.9,  "L4 data sheet"),
    "L20":         _gpu("48GiB", 59.8,  119.5,  864,   _PCIE4, 8.9,  "L20 specification"),
    "L40":         _gpu("48GiB", 90.5,  181.05, 864,   _PCIE4, 8.9,  "L40 data sheet"),
    "L40S":        _gpu("48GiB", 91.6,  362.05, 864,   _PCIE4, 8.9,  "L40S data sheet"),
    "RTX-4080":    _gpu("16GiB", 48.7,  97.5,   716.8, _PCIE4, 8.9,  _ADA),
    "RTX-4090":    _gpu("24GiB", 82.6,  165.2,  1008,  _PCIE4, 8.9,  _ADA),
    "RTX-6000-Ada":_gpu("48GiB", 91.1,  364.2,  960,   _PCIE4, 8.9,  "RTX 6000 Ada data sheet"),
    "H100":        _gpu("80GiB", 67,    989.5,  3350,  450,    9.0,  "H100 data sheet (SXM)"),
    "H100-PCIe":   _gpu("80GiB", 51,    756.5,  2000,  _PCIE5, 9.0,  "H100 data sheet (PCIe)"),
    "H100-NVL":    _gpu("94GiB", 60,    835.5,  3900,  _PCIE5, 9.0,  "H100 data sheet (NVL)"),
    "H800":        _gpu("80GiB", 67,    989.5,  3350,  200,    9.0,  "H800 data sheet (SXM)"),
    "H20":         _gpu("96GiB", 44,    148,    4000,  450,    9.0,  "H20 data sheet"),
    "H200":        _gpu("141GiB", 67,    989.5,  4800,  450,    9.0,  "H200 data sheet (SXM)"),
    "GH-96":       _gpu("96GiB", 67,    990,    4000,  450,    9.0,  f"{_GH200} (96GB)"),
    "GH-144":      _gpu("144GiB", 67,    990,    4900,  450,    9.0,  f"{_GH200} (144GB)"),
    "B200":        _gpu("180GiB", 75,    2250,   8000,  900,    10.0, "DGX B200 data sheet"),
    "RTX-5090":    _gpu("32GiB", 104.8, 209.5,  1792,  _PCIE5, 12.0, _BLACKWELL),
})
# fmt: on
"""Known GPU types by name."""
