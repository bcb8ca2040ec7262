"""What the runtime must equal: the same training in one process, written plainly.

Uses the model's blocks, and nothing of the runtime but its sample order and learning rates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 # the name that everyone knows it by

from eth_cli.launch.config import RunOptions
from eth_cli.launch.order import SampleOrder
from eth_cli.launch.runtime.optim import learning_rate
from eth_cli.model import ModelSpec
from eth_cli.models.build import build_block, canonical_name, initialise_block


@dataclass
class Reference:
    """Loss and gradient norm of each step; weights after, and gradients of, the last one."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def train_in_one_process(
    spec: ModelSpec,
    options: RunOptions,
    source: Any,
    *,
    global_batch_size: int,
) -> Reference:
    """Whole batches, plain autograd, torch's AdamW, no hooks, no buckets."""
    blocks = [build_block(spec, i, dtype=torch.float32) for i in range(spec.num_blocks)]
    for i, block in enumerate(blocks):
        initialise_block(block, spec, i, seed=options.seed)
    if spec.tied:
        blocks[-1].weight = blocks[0].token.weight  # type: ignore[union-attr] # one parameter
    weights = {
        canonical_name(spec, i, name): parameter
        for i, block in enumerate(blocks)
        for name, parameter in block.named_parameters()
    }
    groups: list[dict[str, Any]] = [
        {"params": [p for p in weights.values() if p.dim() > 1]},
        {"params": [p for p in weights.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        betas=(options.beta1, options.beta2),
        eps=options.epsilon,
        weight_decay=options.weight_decay,
        fused=False,
        foreach=False,
    )
    order = SampleOrder(
        num_samples=source.num_samples, global_batch_size=global_batch_size, seed=options.seed
    )
    reference = Reference()
    for step in range(options.steps):
        pairs = [source.sample(sample) for sample in order.batch(step)]
        x = torch.stack([torch.from_numpy(tokens) for tokens, _ in pairs])
        labels = torch.stack([torch.from_numpy(labels) for _, labels in pairs])
        for block in blocks:
            x = block(x)
        total = F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = total / max(1, int((labels != -100).sum()))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call] # torch's has no types
        clip = float("inf") if options.clip is None else options.clip
        norm = torch.nn.utils.clip_grad_norm_(list(weights.values()), clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, step)
        optimizer.step()
        reference.losses.append(loss.item())
        reference.grad_norms.append(norm.item())
    for name, parameter in weights.items():
        assert parameter.grad is not None
        reference.gradients[name] = parameter.grad.clone()
    reference.weights = {name: parameter.detach() for name, parameter in weights.items()}
    return reference
