"""The scale of the loss in fp16: gradients below 6e-8 would be zero (Micikevicius et al. 2018,
"Mixed Precision Training", section 3.2).

It falls by half with each step that is not finite, which is skipped, and doubles after so many that
were. All ranks see the same agreed norm and so keep the same scale without telling each other.
"""

from __future__ import annotations

FIRST_SCALE = 65536.0
"""Of a new run (as `torch.amp.GradScaler`)."""
GROWTH_STEPS = 2000
"""Finite steps in a row after which the scale doubles (as `torch.amp.GradScaler`)."""
SMALLEST_SCALE = 1.0
LARGEST_SCALE = 2.0**40


class LossScale:
    """What the loss is multiplied by, and the gradients divided by."""

    def __init__(self, *, is_used: bool, growth_steps: int = GROWTH_STEPS) -> None:
        self.is_used = is_used
        self.value = FIRST_SCALE if is_used else 1.0
        self.num_finite = 0
        """Finite steps since the scale has changed."""
        self._growth_steps = growth_steps

    def restore(self, value: float | None, num_finite: int) -> None:
        """Go on as a checkpoint says; None: it was trained without."""
        if self.is_used and value is not None:
            self.value, self.num_finite = value, num_finite

    def update(self, *, is_finite: bool) -> None:
        """Take note of a step: the same on all ranks."""
        if not self.is_used:
            return
        if not is_finite:
            self.value = max(SMALLEST_SCALE, self.value / 2)
            self.num_finite = 0
            return
        self.num_finite += 1
        if self.num_finite >= self._growth_steps:
            self.value = min(LARGEST_SCALE, self.value * 2)
            self.num_finite = 0
