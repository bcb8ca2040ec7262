"""What a block saves, computes and moves for one micro-batch, found without any hardware.

The block runs forward and backward under FakeTensorMode: tensors have shapes and storages but no
data, so a layer of any size takes milliseconds. Three things are watched: what autograd saves, the
matrix FLOPs of each operation, and the bytes that each moves.

What counts as a saved activation, so that the sum over a stage's blocks is the stage's:

* every storage that autograd holds for the backward pass counts once and in full, however many
  saved tensors (views) share it;
* parameters do not count, they are there anyway;
* the block's input counts (each kind of block saves it), its output does not: the output is the
  next block's input, and the last one's goes into the boundary buffer of the next stage;
* the head counts its loss too: the saved fp32 log-softmax, and the largest moment of its backward,
  when logits and two fp32 gradients of their size (of the log-softmax, of the logits) are alive.
  The last stage has one micro-batch in flight, so that moment is its peak;
* RoPE tables, and masks where there are any, count like all else.

With recomputation a block keeps its input only.

Kernels are those that GPUs run: fused attention (no S x S matrix) and fused RMSNorm, which torch
has on GPUs only; on a CPU the unfused RMSNorm saves more, which `profile.compute` measures there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812 # the name that everyone knows it by
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from eth_cli.model import EMBEDDING, HEAD, ModelSpec
from eth_cli.models.build import TORCH_DTYPES, build_block
from eth_cli.profile.roofline import BlockTrace, OpCost

aten = torch.ops.aten


def block_input(
    spec: ModelSpec,
    index: int,
    *,
    dtype: torch.dtype,
    micro_batch_size: int,
    seq_len: int,
    device: torch.device | str,
) -> torch.Tensor:
    """A block's input: token ids (B, S) for the embedding, else activations (B, S, H)."""
    if spec.block_kind(index) == EMBEDDING:
        return torch.zeros(micro_batch_size, seq_len, dtype=torch.int64, device=device)
    shape = (micro_batch_size, seq_len, spec.hidden_size)
    return torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)


def head_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """What training computes from the head: the summed loss, in fp32; (B, S, V), (B, S) -> ()."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


class SavedActivations:
    """Counts what autograd saves while `recording` is active."""

    def __init__(self, excluded: Iterable[torch.Tensor]) -> None:
        self._excluded = {_storage_key(tensor) for tensor in excluded}
        # Holding the tensors keeps their storages alive, and so the keys distinct.
        self._saved: dict[int, torch.Tensor] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Count what is saved meanwhile."""

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            key = _storage_key(tensor)
            if key not in self._excluded:
                self._saved[key] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def num_bytes(self, *, output: torch.Tensor) -> int:
        """Bytes of all storages saved, without the block's output."""
        own = _storage_key(output)
        return sum(
            tensor.untyped_storage().nbytes() for key, tensor in self._saved.items() if key != own
        )


def _storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def head_peak_bytes(logits: torch.Tensor) -> int:
    """What is alive beside the saved tensors at the peak of the head's backward: see the module."""
    return logits.nbytes + 2 * logits.numel() * torch.float32.itemsize


def trace_block(
    spec: ModelSpec,
    index: int,
    *,
    dtype: str,
    micro_batch_size: int,
    seq_len: int,
    kernels: Literal["gpu", "cpu"] = "gpu",
) -> BlockTrace:
    """Everything that one block costs for one micro-batch; needs no memory and no hardware."""
    torch_dtype = TORCH_DTYPES[dtype]
    with FakeTensorMode():
        block = build_block(spec, index, dtype=torch_dtype)
        if kernels == "gpu":
            _use_fused_norms(block)
        for parameter in block.parameters():
            # All micro-batches but the first add to the gradients that are there.
            parameter.grad = torch.empty_like(parameter)
        x = block_input(
            spec,
            index,
            dtype=torch_dtype,
            micro_batch_size=micro_batch_size,
            seq_len=seq_len,
            device="cpu",
        )
        targets = torch.zeros(micro_batch_size, seq_len, dtype=torch.int64)
        is_head = spec.block_kind(index) == HEAD
        saved = SavedActivations(block.parameters())
        forward, backward = _OpRecorder(), _OpRecorder()
        with forward, saved.recording():
            output = block(x)
            result = head_loss(output, targets) if is_head else output
        gradient = torch.empty_like(result)
        with backward:
            result.backward(gradient)
        activation_bytes = saved.num_bytes(output=output)
        if is_head:
            activation_bytes += head_peak_bytes(output)
        return BlockTrace(
            forward=tuple(forward.ops),
            backward=tuple(backward.ops),
            activation_bytes=activation_bytes,
            recompute_activation_bytes=x.nbytes,
        )


# --- Costs of single operations -------------------------------------------------------------------


def _attention_flops(query: torch.Tensor, key: torch.Tensor, *, num_products: int) -> int:
    """Of ``num_products`` products of the size of the score matrix, (B, N, S, D) x (B, K, S, D)."""
    num_samples, num_heads, query_len, head_dim = query.shape
    return num_products * 2 * num_samples * num_heads * query_len * key.shape[2] * head_dim


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
    # The registry knows the fused attention of GPUs but not the CPU's, which stands for it here.
    # Forward: scores, then values. Backward: those gradients twice, and the scores once more.
    if func is aten._scaled_dot_product_flash_attention_for_cpu.default:
        return _attention_flops(args[0], args[1], num_products=2)
    if func is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return _attention_flops(args[1], args[2], num_products=5)
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=output))


def _moved_bytes(func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    if func is aten.embedding.default:
        # Of the table only the rows that are looked up are read.
        inputs = [*inputs[1:], *outputs]
    # A broadcast input is read once; views of one storage by what they show.
    read = sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in inputs)
    return read + sum(tensor.nbytes for tensor in outputs)


class _OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch has no types here
    """Notes the cost of every operation that does something: not views, not allocations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # nor here
        self.ops: list[OpCost] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        outputs = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
        if outputs and not func.is_view and func not in _FREE:
            self.ops.append(
                OpCost(
                    flops=_flops(func, args, kwargs, output),
                    num_elements=sum(tensor.numel() for tensor in outputs),
                    num_bytes=_moved_bytes(func, inputs, outputs),
                )
            )
        return output


_FREE = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.new_empty.default,
        aten._unsafe_view.default,
    }
)
"""Operations that touch no data, beside those that torch knows as views."""


# --- RMSNorm as GPUs run it -----------------------------------------------------------------------


class _FusedRmsNorm(torch.autograd.Function):
    """Stands for torch's fused RMSNorm: saves and moves the same bytes, computes nothing of use.

    Forward reads x and writes the result; saved are x, the weight and one fp32 number a row.
    Backward reads x and the gradient and writes the gradients of x and of the weight.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        return x + gradients[0], torch.empty_like(weight)


def _use_fused_norms(block: nn.Module) -> None:
    for module in block.modules():
        if isinstance(module, nn.RMSNorm):
            module.forward = partial(_fused_rms_norm, module.weight)  # type: ignore[method-assign]


def _fused_rms_norm(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _FusedRmsNorm.apply(x, weight)  # type: ignore[no-untyped-call]
    return result
