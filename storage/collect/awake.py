"""A clock that leaves out the time in which this process did not run."""

import asyncio
from collections.abc import Callable

_TICK = 0.05  # seconds between two ticks


class AwakeClock:
    """The event loop's clock without the time by which the clock's own timer was late.

    A paused virtual machine, a frozen cgroup or an overloaded machine stops the loop. What servers sent meanwhile is
    read late, so that time is no fault of theirs.
    """

    def __init__(self, on_tick: Callable[[], None]):
        """Start the clock. Call this from the event loop. `on_tick` is called at every tick."""
        self._loop, self._late, self._on_tick = asyncio.get_running_loop(), 0.0, on_tick
        self._due = self._loop.time()
        self._tick()

    def stop(self) -> None:
        """Stop the clock's timer."""
        self._timer.cancel()

    @property
    def late(self) -> float:
        """Seconds since the start in which the loop did not run."""
        return self._late + max(0.0, self._loop.time() - self._due)

    def time(self) -> float:
        """Return the event loop's time minus `late`, in seconds."""
        return self._loop.time() - self.late

    def _tick(self) -> None:
        self._late = self.late
        self._due = self._loop.time() + _TICK
        self._timer = self._loop.call_at(self._due, self._tick)
        self._on_tick()
