"""What the demo prints: numbered steps with the time since the start, and lines that change."""

from __future__ import annotations

import time


class Console:
    """Prints to stdout; `started` is the zero of the times shown."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._step = 0

    def step(self, title: str) -> None:
        self._step += 1
        print(f"\n\033[1m{self._clock()}  {self._step}. {title}\033[0m", flush=True)

    def say(self, line: str) -> None:
        print(f"{self._clock()}     {line}", flush=True)

    def block(self, text: str) -> None:
        """An output shown as it is, such as a table of kubectl."""
        for line in text.rstrip().splitlines():
            print(f"             {line}", flush=True)

    def _clock(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        return f"[{minutes:2d}:{seconds:02d}]"
