"""Steps that are left out, because what they would teach is no number or far above all before."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from training.metrics import Step

WINDOW = 100  # steps over whose mean a spike stands out


class Skipping:
    """Which steps are left out. Its state is of losses alone, so a run that goes on decides as it would have."""

    def __init__(self, spike: float | None, state: Mapping[str, Any] | None = None):
        state = state or {"taken": [], "in_a_row": 0}
        self.spike = spike
        self.taken = deque(state["taken"], WINDOW)  # losses of the last steps that were not left out
        self.in_a_row: int = state["in_a_row"]

    @property
    def state(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"taken": list(self.taken), "in_a_row": self.in_a_row}

    def why(self, step: Step) -> str | None:
        """Why this step is to be left out, or None; notes it either way."""
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


class LiveNorms:
    """The statistics of norms that learn them as they compute: a step that is left out must not stay in them."""

    def __init__(self, model: nn.Module):
        norms = [norm for norm in model.modules() if getattr(norm, "track_running_stats", False)]
        self._buffers = [buffer for norm in norms for buffer in norm.buffers()]
        self._kept: list[Tensor] = []

    def keep(self) -> None:
        """Remember them as they are."""
        self._kept = [buffer.clone() for buffer in self._buffers]

    def restore(self) -> None:
        """Make them what they were at the last `keep`."""
        for buffer, before in zip(self._buffers, self._kept, strict=True):
            buffer.copy_(before)
