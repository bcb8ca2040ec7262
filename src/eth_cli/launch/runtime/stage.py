"""One rank's stage: its blocks, or its part of them where several devices share the stage.

Shapes: B micro-batch size, S sequence length, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from eth_cli.launch.runtime.layout import Layout
from eth_cli.launch.runtime.loss import cross_entropy, projected_loss
from eth_cli.launch.runtime.tensor_parallel import (
    TensorGroup,
    layout_of,
    local_spec,
    parallelise,
)
from eth_cli.model import HEAD, ModelSpec
from eth_cli.models import build
from eth_cli.models.init import initial_value


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedParameter:
    """One parameter that a rank holds, or its part of it."""

    name: str
    """Its name in the whole model, see `eth_cli.models.build.canonical_name`."""
    block: int
    """The block whose backward completes its gradient: the lowest of the stage that uses it."""
    parameter: nn.Parameter
    layout: Layout
    """Which part of the whole parameter this is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOptions:
    """How a stage computes."""

    seed: int
    device: torch.device
    recompute: bool = False
    """Whether activations inside blocks are computed again in the backward."""
    dtype: torch.dtype = torch.float32
    """Of weights and activations."""
    boundary: torch.dtype = torch.float32
    """Of what is handed from stage to stage."""
    loss_chunk: int = 0
    """Tokens whose logits exist at a time; 0: those of a whole micro-batch."""
    tensor: TensorGroup = field(default_factory=TensorGroup)


class StageModule(nn.Module):
    """The blocks ``[start, stop)`` of a model, one after the other."""

    def __init__(self, spec: ModelSpec, blocks: tuple[int, int], options: StageOptions) -> None:
        super().__init__()
        self._spec = spec
        self._start = blocks[0]
        self._options = options
        tensor = options.tensor
        self._vocab_first = tensor.index * spec.vocab_size // tensor.width
        self._local = local_spec(spec, width=tensor.width, index=tensor.index)
        self._masters: dict[nn.Parameter, torch.Tensor] = {}
        self.blocks = nn.ModuleList(self._build(index) for index in range(*blocks))
        if spec.tied and blocks == (0, spec.num_blocks):
            build.tie(self.blocks[0], self.blocks[-1])
        for parameter in self.parameters():
            # Gradients of many micro-batches are added up; 16 bits would lose the small ones.
            parameter.grad_dtype = torch.float32

    def _build(self, index: int) -> nn.Module:
        """One block with its initial weights: this rank's part of the values of whole ones."""
        options = self._options
        block = build.build_block(self._local, index, dtype=options.dtype, device=options.device)
        parallelise(block, options.tensor, vocab_first=self._vocab_first)
        for local_name, parameter in block.named_parameters():
            layout = self._layout(index, local_name, parameter)
            name = build.canonical_name(self._spec, index, local_name)
            shape = torch.Size(layout.shape)
            full = initial_value(self._spec, seed=options.seed, name=name, shape=shape)
            value = layout.take(full)
            with torch.no_grad():
                parameter.copy_(value)
            if options.dtype != torch.float32:
                self._masters[parameter] = value.to(options.device).contiguous()
        return block

    def take_masters(self) -> dict[nn.Parameter, torch.Tensor]:
        """The fp32 initial weights of parameters that have fewer bits; they are the caller's."""
        masters, self._masters = self._masters, {}
        return masters

    def _layout(self, index: int, local_name: str, parameter: nn.Parameter) -> Layout:
        tensor = self._options.tensor
        shape = tuple(parameter.shape)
        if tensor.width > 1:
            shape = self._spec.parameter_shapes(index)[local_name]
        return layout_of(self._spec, local_name, shape, width=tensor.width, index=tensor.index)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S) int64 or (B, S, H) -> (B, S, H); of the last stage, what `loss` takes."""
        if x.is_floating_point():
            x = x.to(self._options.dtype)
        for index, block in enumerate(self.blocks, start=self._start):
            if self._spec.block_kind(index) == HEAD:
                return self._before_projection(block, x)
            if self._options.recompute:
                # No block draws random numbers, so there is no generator state to restore.
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        return x.to(self._options.boundary)

    def _before_projection(self, head: nn.Module, x: torch.Tensor) -> torch.Tensor:
        hidden = getattr(head, "hidden", head)  # a head of one's own may have no such part
        if self._options.recompute:
            return checkpoint(hidden, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return] # torch's has no types
        return hidden(x)  # type: ignore[no-any-return] # Module.__call__ has no type

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Sum of token losses, fp32: what the last stage's `forward` gave, (B, S) -> scalar."""
        options, head = self._options, self.blocks[-1]
        x, labels = x.flatten(0, 1), labels.flatten()
        if not hasattr(head, "hidden"):
            return cross_entropy(x, labels, options.tensor, vocab_first=self._vocab_first)
        return projected_loss(
            x,
            head.get_parameter("weight"),
            labels,
            options.tensor,
            vocab_first=self._vocab_first,
            chunk=options.loss_chunk,
        )

    def owned_parameters(self) -> Iterator[OwnedParameter]:
        """Every parameter once, by ascending block."""
        seen: set[nn.Parameter] = set()
        for index, block in enumerate(self.blocks, start=self._start):
            for local_name, parameter in block.named_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    yield OwnedParameter(
                        name=build.canonical_name(self._spec, index, local_name),
                        block=index,
                        parameter=parameter,
                        layout=self._layout(index, local_name, parameter),
                    )
