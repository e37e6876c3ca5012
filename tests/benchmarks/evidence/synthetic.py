"""Controlled acceptance: vLLM's synthetic rejection sampling on a CPU, for the benchmark only.

vLLM accepts each proposal with a given probability when `RejectionSampler.synthetic_mode` is on; its CPU kernel does
not know that mode. A plugin of vLLM's (`vllm.general_plugins`) that lives in a folder of the run switches it on in
every system alike, registers a kernel that knows it, and reads the probability from a file, so that one start of an
engine serves them all. This module is imported in vLLM's processes, so it imports nothing of the harness.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

PLUGIN = "outrider_benchmark_acceptance"
FILE_VARIABLE = "OUTRIDER_BENCHMARK_ACCEPTANCE"
KERNEL = "vllm.v1.sample.rejection_sampler.rejection_greedy_sample_kernel"
STARTING_ACCEPTANCE = 0.5
REPOSITORY = Path(__file__).parents[3]


def plugin_environment(folder: Path) -> dict[str, str]:
    """What an engine's environment needs beside its own; the plugin's metadata is written into `folder`."""
    metadata = folder / f"{PLUGIN}-1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{PLUGIN} = {__name__}:activate\n")
    set_acceptance(folder, STARTING_ACCEPTANCE)
    paths = [str(folder), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {
        "VLLM_PLUGINS": PLUGIN,
        FILE_VARIABLE: str(folder / "acceptance"),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }


def set_acceptance(folder: Path, acceptance: float) -> None:
    """For the steps from now on."""
    part = folder / "acceptance.part"
    part.write_text(str(acceptance))
    part.replace(folder / "acceptance")


def activate() -> None:
    """The plugin: vLLM calls it in each of its processes."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    if getattr(RejectionSampler, "outrider_controlled", False):
        return
    start = RejectionSampler.__init__

    def controlled(self: Any, *args: Any, **kwargs: Any) -> None:
        import torch
        from vllm.triton_utils.dispatcher import register_kernels

        start(self, *args, **kwargs)
        register_kernels({KERNEL: accept_by_chance})  # here, because the platform registers its own before
        self.synthetic_conditional_rates = torch.zeros(1)
        self.synthetic_mode = True

    RejectionSampler.__init__ = controlled
    RejectionSampler.outrider_controlled = True


def accept_by_chance(
    output_token_ids_ptr: Any,  # (batch, max_spec_len + 1), filled with -1
    cu_num_draft_tokens_ptr: Any,  # (batch,)
    draft_token_ids_ptr: Any,  # (num_tokens,)
    target_argmax_ptr: Any,  # (num_tokens,)
    bonus_token_ids_ptr: Any,  # (batch, 1)
    is_greedy_ptr: Any,  # (batch,) or None: all are
    max_spec_len: int,  # noqa: ARG001  the kernel's own parameters, by name
    uniform_probs_ptr: Any,  # (num_tokens,)
    synthetic_conditional_rates_ptr: Any,  # noqa: ARG001
    SYNTHETIC_MODE: bool,  # noqa: N803, ARG001
) -> None:
    """Writes each greedy request's accepted proposals, then the target's token, into its row of the output."""
    acceptance = float(Path(os.environ[FILE_VARIABLE]).read_text())
    drafts, targets = draft_token_ids_ptr.tolist(), target_argmax_ptr.tolist()
    chances, bonus = uniform_probs_ptr.tolist(), bonus_token_ids_ptr.flatten().tolist()
    start = 0
    for row, end in enumerate(cu_num_draft_tokens_ptr.tolist()):
        if is_greedy_ptr is None or bool(is_greedy_ptr[row]):
            tokens = emitted(drafts[start:end], [*targets[start:end], bonus[row]], chances[start:end], acceptance)
            output_token_ids_ptr[row, : len(tokens)] = output_token_ids_ptr.new_tensor(tokens)
        start = end


def emitted(drafts: list[int], targets: list[int], chances: list[float], acceptance: float) -> list[int]:
    """The proposals up to the first that chance rejects, and the target's token in its place; -1 is padding."""
    for position, (draft, chance) in enumerate(zip(drafts, chances, strict=True)):
        if draft < 0 or chance >= acceptance:
            return [*drafts[:position], targets[position]]
    return [*drafts, targets[-1]]
