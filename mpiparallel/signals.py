"""Signals that ask a run to stop: it finishes its step, saves, and ends well.

Batch systems send SIGTERM or SIGUSR1 before the time limit, a person sends SIGINT with Ctrl-C. Any
rank may get it; the ranks agree on it in the all-reduce that ends every step.
"""

from __future__ import annotations

import signal
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """While it is entered, the first such signal is noted; a second SIGINT ends the process."""

    def __init__(self) -> None:
        self.name = ""

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._note) for number in STOPPING}
        return self

    def __exit__(self, *_exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
