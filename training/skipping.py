"""Skip steps whose loss or gradient is not finite, or whose gradient is a spike."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from training.metrics import Step

WINDOW = 100  # taken steps that a gradient is compared with
LEAST_SPIKE = 4.0  # a gradient below this multiple of the usual one is never a spike, however steady the others were


class Skipping:
    """Decides which steps to skip. Checkpoints hold its state, so that a resumed run skips the same steps."""

    def __init__(self, spike: float | None, state: Mapping[str, Any] | None = None):
        state = state or {}
        self.spike = spike
        self.log_norms = deque(state.get("log_norms", ()), WINDOW)  # of the last steps that were not skipped
        self.in_a_row: int = state.get("in_a_row", 0)

    @property
    def state(self) -> dict[str, Any]:
        """State to save in a checkpoint, as JSON values."""
        return {"log_norms": list(self.log_norms), "in_a_row": self.in_a_row}

    def skip_reason(self, step: Step) -> str | None:
        """Decide whether to skip a step. Return the reason, or None if the step should be taken."""
        reason = self._reason(step)
        if reason:
            self.in_a_row += 1
        else:
            self.in_a_row = 0
            self.log_norms += [math.log(step.norm)] if step.norm else []
        return reason

    def _reason(self, step: Step) -> str | None:
        bad = [f"{name} ({value})" for name, value in step.losses.items() if not math.isfinite(value)]
        if bad:
            return f"the loss of {', '.join(bad)} is not finite"
        if not math.isfinite(step.norm):
            return f"the norm of the gradient ({step.norm}) is not finite"
        if self.spike is None or not step.norm or len(self.log_norms) < WINDOW:
            return None
        height = math.log(step.norm) - np.mean(self.log_norms)
        if height <= max(math.log(LEAST_SPIKE), self.spike * np.std(self.log_norms)):
            return None
        return (
            f"the norm of the gradient ({step.norm:.4g}) is {math.exp(height):.3g} times the usual one, and its "
            f"logarithm {self.spike:g} standard deviations above the mean of the last {WINDOW} steps"
        )


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Return the running statistics of a model's BatchNorms. The forward pass changes them, a skipped step must not."""
    norms = [norm for norm in model.modules() if getattr(norm, "track_running_stats", False)]
    return [buffer for norm in norms for buffer in norm.buffers()]
