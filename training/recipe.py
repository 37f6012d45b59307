"""The settings of a run that every recipe has, whatever is trained."""

from dataclasses import dataclass

from storage.settings import check, check_choices, check_positive


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What the loop reads of a recipe, beside its optimizer."""

    name: str  # of the recipe
    run_name: str = ""  # of the run: its folder is ROOT/runs/<run>; empty: the recipe's name
    steps: int = 250_000  # optimizer steps in all
    random_init: bool = False  # start from random weights; a run without a start is refused unless this is true
    spike: float | None = 5.0  # skip a step whose loss is so many times the mean of the last 100; None: never
    most_skipped: int = 10  # abort after this many consecutive skipped steps
    log_every: int = 20  # steps between progress lines
    # What gets each line of metrics.jsonl, beside that file: tensorboard, or MODULE:FUNCTION of your own
    # (docs/trackers.md); empty: nothing
    trackers: tuple[str, ...] = ("tensorboard",)
    validate_every: int = 5_000  # steps between validations; the last step always validates
    save_every: int = 5_000  # steps between checkpoints; the last step always saves
    keep_checkpoints: int = 2  # the newest so many are kept, and the one that validated best

    def __post_init__(self):
        check_choices(self)
        every = "steps", "log_every", "validate_every", "save_every"
        check_positive(self, *every, "keep_checkpoints", "most_skipped")
        check(self, self.spike is None or self.spike > 1, "spike", "more than 1, or none")

    @property
    def run(self) -> str:
        return self.run_name or self.name
