"""Where things lie that tests read."""

from pathlib import Path

PROJECT = Path(__file__).parents[1]
DATA = PROJECT / "tests" / "data"
SHARED = PROJECT.parent / "shared"  # figures of the published programs, photographs, papers; not part of the project
