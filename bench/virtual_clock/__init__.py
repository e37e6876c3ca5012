"""vLLM's real engine core, stock and with the loop in its scheduler, on the replay's device and its virtual clock."""

import os

from outrider_runtime.vllm_plugin import cpu

os.environ.update(cpu.ENVIRONMENT)  # before anything imports Triton
