"""Skip steps whose loss or gradient is not finite, or whose loss is a spike."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from training.metrics import Step

WINDOW = 100  # taken steps over which the mean loss is computed


class Skipping:
    """Decides which steps to skip. Checkpoints hold its state, so that a resumed run skips the same steps."""

    def __init__(self, spike: float | None, state: Mapping[str, Any] | None = None):
        state = state or {}
        self.spike = spike
        self.taken = deque(state.get("taken", ()), WINDOW)  # losses of the last steps that were not skipped
        self.in_a_row: int = state.get("in_a_row", 0)

    @property
    def state(self) -> dict[str, Any]:
        """State to save in a checkpoint, as JSON values."""
        return {"taken": list(self.taken), "in_a_row": self.in_a_row}

    def skip_reason(self, step: Step) -> str | None:
        """Decide whether to skip a step. Return the reason, or None if the step should be taken."""
        reason = self._reason(step)
        if reason:
            self.in_a_row += 1
        else:
            self.in_a_row = 0
            self.taken.append(step.loss)
        return reason

    def _reason(self, step: Step) -> str | None:
        bad = [f"{name} ({value})" for name, value in step.losses.items() if not math.isfinite(value)]
        if bad:
            return f"the loss of {', '.join(bad)} is not finite"
        if not math.isfinite(step.norm):
            return f"the norm of the gradient ({step.norm}) is not finite"
        mean = sum(self.taken) / len(self.taken) if len(self.taken) == WINDOW else math.inf
        if self.spike is not None and step.loss > self.spike * mean:
            return f"the loss ({step.loss:.4g}) is over {self.spike:g} times the mean of the last {WINDOW} ({mean:.4g})"
        return None


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Return the running statistics of a model's BatchNorms. The forward pass changes them, a skipped step must not."""
    norms = [norm for norm in model.modules() if getattr(norm, "track_running_stats", False)]
    return [buffer for norm in norms for buffer in norm.buffers()]
