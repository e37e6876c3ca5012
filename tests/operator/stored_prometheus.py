"""A Prometheus that holds scrapes written beforehand, and scrapes nothing itself."""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from setup import system
from tests.operator.client import wait_for
from tests.ports import free_port


@contextmanager
def stored_prometheus(folder: Path, scrapes: Iterable[str]) -> Generator[str, None, None]:
    """Its address while the block runs; `scrapes` are lines of OpenMetrics with timestamps, without `# EOF`."""
    (folder / "scrapes.txt").write_text("\n".join((*scrapes, "# EOF\n")))
    tools = system.prometheus().parent
    create = f"{tools}/promtool tsdb create-blocks-from openmetrics {folder}/scrapes.txt {folder}/data"
    subprocess.run(create.split(), check=True, capture_output=True)
    (folder / "prometheus.yml").write_text("{}")
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [f"{tools}/prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
               f"--web.listen-address=127.0.0.1:{port}"]  # fmt: skip
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        wait_for("Prometheus", lambda: _is_ready(address))
        yield address
        process.terminate()


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/-/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
