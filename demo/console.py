"""The demo's output: numbered steps and lines, with the time since the start."""

from __future__ import annotations

import time


class Console:
    """Prints to stdout. Times count from its creation."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._step = 0

    def step(self, title: str) -> None:
        self._step += 1
        print(f"\n\033[1m{self._clock()}  {self._step}. {title}\033[0m", flush=True)

    def say(self, line: str) -> None:
        print(f"{self._clock()}     {line}", flush=True)

    def block(self, text: str) -> None:
        """Print an output as it is, such as a table of kubectl."""
        for line in text.rstrip().splitlines():
            print(f"             {line}", flush=True)

    def _clock(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        return f"[{minutes:2d}:{seconds:02d}]"
