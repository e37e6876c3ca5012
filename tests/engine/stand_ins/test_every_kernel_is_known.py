"""vLLM's kernels and those that we know of are the same: a new one would be interpreted without a word, and a step take
half a second."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path

import outrider_cpu
import pytest
import torch

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
LAUNCH = re.compile(r"\b(\w+_kernel)\[")


def runner_folder() -> Path:
    import vllm.v1.worker.gpu as runner

    return Path(next(iter(runner.__path__)))


def launched() -> set[tuple[str, str]]:
    """(module, kernel) of every launch in the second runner's source."""
    folder = runner_folder()
    return {
        (".".join(file.relative_to(folder).with_suffix("").parts), kernel)
        for file in folder.rglob("*.py")
        for kernel in LAUNCH.findall(file.read_text())
    }


def test_every_kernel_has_a_stand_in_or_a_reason() -> None:
    """Promise: nothing is interpreted in a serving step."""
    os.environ.update(outrider_cpu.ENVIRONMENT)
    outrider_cpu.install()
    from outrider_cpu.replaced import LEFT_INTERPRETED, REPLACEMENTS

    replaced = {(replacement.module, replacement.attribute) for replacement in REPLACEMENTS}
    unknown = {replacement for replacement in launched() - replaced if replacement[0] not in LEFT_INTERPRETED}
    assert not unknown
    there = {module for module in LEFT_INTERPRETED if (runner_folder() / f"{module.replace('.', '/')}.py").exists()}
    assert there <= {module for module, _ in launched() - replaced}, "a reason for nothing"


def test_stand_ins_replace_every_use_of_their_kernel() -> None:
    """Bug: `from module import function` keeps vLLM's own in the module that calls it."""
    os.environ.update(outrider_cpu.ENVIRONMENT)
    outrider_cpu.install()
    from outrider_cpu import sampling, verification
    from vllm.v1.worker.gpu.sample import sampler
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    assert sampler.gumbel_sample is sampling.gumbel_sample
    assert rejection_sampler.rejection_sample is verification.rejection_sample


def test_functions_of_ours_take_what_vllms_take() -> None:
    """Kernels are compared by name where they are replaced; functions are called by vLLM with what it has."""
    os.environ.update(outrider_cpu.ENVIRONMENT)
    outrider_cpu.install()
    from outrider_cpu import sampling, verification

    for ours, theirs in (
        (sampling.gumbel_sample, sampling.interpreted_gumbel_sample),
        (verification.rejection_sample, verification.interpreted_rejection_sample),
    ):
        mine, theirs_parameters = list(inspect.signature(ours).parameters), list(inspect.signature(theirs).parameters)
        named = [name for name in mine if name != "more"]  # the rest is handed on
        assert named == theirs_parameters[: len(named)]


def test_a_kernel_that_lost_a_parameter_is_named() -> None:
    """A new release of vLLM says at once which stand-in is out of date."""
    import triton
    from outrider_cpu.stand_in import KernelChangedError, StandIn

    @triton.jit
    def _kernel(pos_ptr, BLOCK_SIZE):  # noqa: N803
        pass

    def ours(pos, seq_lens):
        return pos, seq_lens

    with pytest.raises(KernelChangedError, match="_kernel has no parameter seq_lens"):
        StandIn(_kernel, ours)


def test_every_stand_in_is_compared_with_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that no case of this folder reaches could be anything."""
    os.environ.update(outrider_cpu.ENVIRONMENT)
    outrider_cpu.install()
    from outrider_cpu.replaced import REPLACEMENTS
    from outrider_cpu.stand_in import StandIn

    from tests.engine.stand_ins import test_batches_are_prepared_alike as batches
    from tests.engine.stand_ins import test_block_drafts_are_prepared_alike as block_drafts
    from tests.engine.stand_ins import test_logits_are_reshaped_alike as logits
    from tests.engine.stand_ins import test_tokens_are_chosen_alike as tokens

    used, launch = list[object](), StandIn.__getitem__

    def noted(stand_in, grid):
        used.append(stand_in.function)
        return launch(stand_in, grid)

    monkeypatch.setattr(StandIn, "__getitem__", noted)
    for case in (*batches.CASES, *block_drafts.CASES, *logits.CASES, *tokens.CASES):
        case(torch.Generator().manual_seed(0))
    assert {
        replacement.attribute for replacement in REPLACEMENTS if replacement.is_kernel and replacement.ours not in used
    } == set()
