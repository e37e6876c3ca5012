"""`make bench`: every benchmark, one after the other; each writes a JSON and a plot into results/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Each in a process of its own: one engine's memory and threads must not weigh on the next."""
    failed = []
    for module in sorted(Path(__file__).parent.glob("[!_]*.py")):
        print(f"== {module.stem}", flush=True)
        if subprocess.run([sys.executable, "-m", f"tests.benchmarks.{module.stem}"], check=False).returncode != 0:
            failed.append(module.stem)
    print(f"failed: {', '.join(failed)}" if failed else "all done; see tests/benchmarks/results")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
