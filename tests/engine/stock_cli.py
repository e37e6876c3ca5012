"""Starts vLLM's own command line as a user does, with or without Outrider."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from outrider_runtime.identity import engine_version

from tests.engine.server_process import TARGET, Server, client_of
from tests.ports import free_port

FLAGS = ("--enforce-eager", "--max-model-len=1024", "--max-num-seqs=4", "--dtype=float32")


class StockServer(Server):
    """`vllm serve` in a process of its own. Its one port has the API, the metrics and Outrider's pages."""

    def __init__(self, folder: Path, *flags: str, environment: dict[str, str]) -> None:
        self.log = folder / "vllm.log"
        self.model = TARGET.name
        self.port = self.admin_port = free_port()
        command = [str(Path(sys.executable).with_name("vllm")), "serve", str(TARGET)]
        address = (f"--served-model-name={self.model}", f"--port={self.port}", "--host=127.0.0.1")
        paths = [str(named_vllm(folder)), environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
        own = {name: value for name, value in os.environ.items() if name not in ENGINE_VARIABLES}
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, *FLAGS, *address, *flags],
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={**own, **CPU, **environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )  # fmt: skip
        self.api, self.admin = client_of(self.port), client_of(self.port)

    def page(self, path: str) -> str:
        return self.api.get(path).text


CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
ENGINE_VARIABLES = ("TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER")
"""Variables that tests set for engines of their own process."""


def named_vllm(folder: Path) -> Path:
    """Make a folder for PYTHONPATH in which vLLM has its usual name: its command line asks for the version of `vllm`,
    and the build for CPUs is called vllm-cpu."""
    number = f"{engine_version().removesuffix('+cpu')}+cpu"
    metadata = folder / "names" / f"vllm-{number}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    metadata.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n")
    return metadata.parent
