"""A training of a small network that runs in milliseconds."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, make_dataclass
from typing import Any

import torch
from torch import nn

from storage.object_store import ObjectStore
from training.checkpoint import Writer
from training.distributed import ALONE
from training.loop import Run, train_steps
from training.optimizer import OptimizerConfig


class Network(nn.Module):
    """With a norm that learns its statistics, as the demo's detector has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, rows: torch.Tensor) -> dict[str, tuple[torch.Tensor, int]]:
        y = self.layers(rows[:, :3])
        return {"size": ((rows[:, 3:] * y**2).sum(), len(y)), "positive": ((y > 0).sum(), len(y))}


def parts_of(number: int, bad: Iterable[int] = (), wild: Iterable[int] = ()) -> list[torch.Tensor]:
    """Two parts of a step; in the steps of `bad` the second holds a value that is no number; `wild`: a huge loss."""
    parts = list(torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(number)))
    for part in parts:
        part[:, 3] = 1e4 if number in wild else 1.0
    if number in bad:
        parts[1][2, 1] = torch.nan
    return parts


@dataclass(eq=False, kw_only=True)
class SmallRun(Run):
    """A run that is told what it trains on and what it does between steps."""

    batches: Callable[[], list[list[torch.Tensor]]] | None = None
    validate: Callable[[], tuple[dict[str, float], list[dict]]] | None = None
    save: Callable[[int, dict, dict], None] | None = None
    samples_per_step = 10

    def prepare(self, step: int) -> None:
        pass  # the rate stays as it is

    def losses(self, model: nn.Module, part: torch.Tensor) -> dict[str, tuple[torch.Tensor, int]]:
        return model(part)

    def keys(self, part: torch.Tensor) -> list[str]:
        return [f"{float(row[0]):.3f}" for row in part]


def run_small(
    store: ObjectStore,
    steps: Sequence[int],
    bad: Iterable[int] = (),
    wild: Iterable[int] = (),
    validate: Callable[[], tuple[dict[str, float], list[dict]]] | None = None,
    save: Callable[[Writer, int, dict], None] = lambda writer, done, state: None,
    **changes: Any,
) -> tuple[Network, torch.optim.Optimizer]:
    """Network after steps with these numbers, those of `bad` poisoned."""
    settings = {"steps": len(steps), "log_every": 2, "validate_every": 100, "save_every": 100, "spike": None}
    settings |= {"most_skipped": 2, "optimizer": OptimizerConfig(max_grad_norm=1.0), "trackers": (), "run": "run"}
    settings |= {"profile": None} | changes
    network = Network()
    optimizer = torch.optim.AdamW([{"params": network.parameters(), "name": "rest"}], lr=0.1)
    with Writer(store) as writer:
        run = SmallRun(
            recipe=make_dataclass("SmallRecipe", settings)(**settings),
            world=ALONE,
            model=network,
            optimizer=optimizer,
            writer=writer,
            batches=lambda: [parts_of(number, bad, wild) for number in steps],
            validate=validate,
            save=lambda done, validation, state: save(writer, done, state),
        )
        train_steps(run)
    return network, optimizer
