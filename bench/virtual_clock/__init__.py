"""vLLM's real engine core, stock and with the loop in its scheduler, on the replay's device and its virtual clock."""

import os

import outrider_cpu

os.environ.update(outrider_cpu.ENVIRONMENT)  # before anything imports Triton
