"""Settings of a training run that the recipes of all models share."""

from dataclasses import dataclass

from storage.settings import check, check_choices, check_positive


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of the training loop, except those of the optimizer."""

    name: str  # recipe name
    run_name: str = ""  # name of the run, whose folder is ROOT/runs/<run>; empty: the recipe's name
    steps: int = 250_000  # total number of optimizer steps
    random_init: bool = False  # start from random weights; a run without any weights is refused unless this is true
    spike: float | None = 6.0  # skip a step whose log gradient norm is this many deviations above the mean; None: never
    most_skipped: int = 10  # abort after this many consecutive skipped steps
    log_every: int = 20  # steps between progress lines
    # receivers of each line of metrics.jsonl: tensorboard, or your own MODULE:FUNCTION (docs/trackers.md); empty: none
    trackers: tuple[str, ...] = ("tensorboard",)
    validate_every: int = 5_000  # steps between validations; the last step always validates
    save_every: int = 5_000  # steps between checkpoints; the last step always saves
    keep_checkpoints: int = 2  # number of newest checkpoints to keep, in addition to the best one by validation
    keep_every: int | None = None  # also keep the checkpoint of every step that is a multiple of this; None: none
    profile: int | None = None  # step whose trace and memory torch writes down (docs/performance.md); None: none

    def __post_init__(self):
        check_choices(self)
        every = "steps", "log_every", "validate_every", "save_every"
        check_positive(self, *every, "keep_checkpoints", "keep_every", "most_skipped", "profile")
        saved = self.keep_every is None or self.keep_every % self.save_every == 0
        check(self, saved, "keep_every", f"a multiple of save_every, {self.save_every}")
        check(self, self.spike is None or self.spike > 1, "spike", "more than 1, or None")

    @property
    def run(self) -> str:
        return self.run_name or self.name
