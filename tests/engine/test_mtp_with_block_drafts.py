"""MTP in one engine with block drafters of both published formats, on a Qwen3-Next with planted weights.

Apart from other engines: vLLM makes the process group of a mixture of experts only where no engine runs yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import outrider_cpu
import pytest

from tests.engine import planted_models
from tests.engine.engines import block, lookup, mtp
from tests.engine.ordered import OrderedBench, ordered
from tests.engine.planted_models import COUNTING_SIZES
from tests.engine.test_block_drafts import IN_CHUNKS, assert_grammars_hold, assert_members_serve, everything, strays

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def engine_of_qwen(folder: Path) -> Iterator[OrderedBench]:
    """A target that hands out hidden states and brings an MTP layer along."""
    pool = [
        lookup(),
        block(planted_models.dflash2(folder / "dflash2", **COUNTING_SIZES), "dflash2"),
        mtp(),
        block(planted_models.in_speculators_format(folder / "speculators", **COUNTING_SIZES), "dflash"),
        block(planted_models.dflash2(folder / "second", **COUNTING_SIZES), "second"),
    ]
    target = planted_models.qwen3_next(folder / "qwen3-next", **COUNTING_SIZES)
    with selectors_tagged() as tags, ordered(pool, target=target, extra=IN_CHUNKS) as engine:
        engine.tags = tags
        yield engine


@contextmanager
def selectors_tagged() -> Iterator[list[str]]:
    """Tags by which vLLM keeps the compiled code of each DFlash2 draft's selector."""
    outrider_cpu.install()  # before vLLM's kernels are imported
    from vllm.compilation import backends
    from vllm.model_executor.models import qwen3_dflash2

    tags, make = list[str](), qwen3_dflash2.CandidateSelector.__init__

    def made(*arguments: Any, **keywords: Any) -> None:
        tags.append(backends.model_tag)
        make(*arguments, **keywords)

    with mock.patch.object(qwen3_dflash2.CandidateSelector, "__init__", made):
        yield tags


def test_mtp_and_blocks_of_both_formats_are_lossless(engine_of_qwen: OrderedBench) -> None:
    assert_members_serve(engine_of_qwen)
    assert strays(engine_of_qwen, everything) == []


def test_grammars_hold_in_a_batch_with_free_requests(engine_of_qwen: OrderedBench) -> None:
    assert_grammars_hold(engine_of_qwen)


def test_dflash2_drafts_share_no_compiled_code(engine_of_qwen: OrderedBench) -> None:
    """Bug: vLLM tags every selector alike, and takes compiled code of one tag for that of one model."""
    assert len({*engine_of_qwen.tags}) == 2
