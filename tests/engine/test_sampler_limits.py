"""What the sampler of vLLM's second runner has room for: the server's check and the worker's tables agree on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.server_process import TARGET

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]


def params(field: str, tokens: int) -> Any:
    """Return the parameters of a request whose `field` takes `tokens` tokens, the model's own stop token included."""
    from vllm.sampling_params import SamplingParams

    many = list(range(tokens))
    if field == "logit_bias":
        return SamplingParams(logit_bias=dict.fromkeys(many, -1.0))
    if field == "allowed_token_ids":
        return SamplingParams(allowed_token_ids=many)
    if field == "bad_words":
        made = SamplingParams()
        made._bad_words_token_ids = [many[:7], many[7:]]
        return made
    made = SamplingParams(stop_token_ids=many[:-1], min_tokens=2, max_tokens=4)
    made.update_from_generation_config({}, eos_token_id=tokens)
    return made


def tables() -> list[Any]:
    import outrider_cpu
    import torch

    outrider_cpu.install()
    from types import SimpleNamespace

    from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
    from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState

    requests = SimpleNamespace(
        prompt_len=SimpleNamespace(np=np.zeros(1, int)), max_num_reqs=1, device=torch.device("cpu")
    )
    return [LogitBiasState(None, requests), BadWordsState(None, requests)]


@pytest.mark.parametrize(
    ("field", "room"),
    [("logit_bias", 1024), ("allowed_token_ids", 1024), ("bad_words", 1024), ("stop_token_ids", 128)],
)
def test_request_that_would_crash_the_worker_is_refused(field: str, room: int) -> None:
    """Bug: one request of one client ended the engine."""
    worker = tables()  # before anything else imports the runner
    from outrider_runtime.vllm_plugin.bounded_input import check_rows
    from vllm.exceptions import VLLMValidationError

    fits, is_too_much = params(field, room), params(field, room + 1)
    check_rows(fits)
    for table in worker:
        table.add_request(0, fits)
    with pytest.raises(VLLMValidationError, match=f"{field}.* takes {room + 1} tokens, .* room for {room}") as refused:
        check_rows(is_too_much)
    assert refused.value.parameter == field
    with pytest.raises(ValueError, match="max"):
        worker[field == "bad_words"].add_request(0, is_too_much)


@pytest.fixture(scope="module")
def processor() -> Any:
    """The server's, over the real model's tokenizer, without an engine."""
    from outrider_runtime.vllm_plugin.arguments import prepare_vllm

    prepare_vllm()
    from outrider_runtime.vllm_plugin.bounded_input import BoundedInput
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers import renderer_from_config

    config = EngineArgs(model=str(TARGET), max_model_len=1024, enforce_eager=True).create_engine_config()
    return BoundedInput(config, renderer_from_config(config))


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"bad_words": ["a b " * 200]}, ""),
        ({"bad_words": ["a b " * 600]}, "bad_words"),
        ({"stop_token_ids": list(range(3, 130)), "min_tokens": 2}, ""),
        ({"stop_token_ids": list(range(3, 131)), "min_tokens": 2}, "stop_token_ids"),
        ({"stop_token_ids": list(range(3, 1000))}, ""),
    ],
)
def test_words_and_stop_tokens_take_room_of_the_sampler(processor: Any, fields: dict[str, Any], refused: str) -> None:
    """Neither is known before the request is on its way to the engine; without min_tokens the sampler knows no stop
    tokens."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    prompt = {"type": "token", "prompt_token_ids": [1, 2, 3]}
    parameters = SamplingParams(max_tokens=4, **fields)
    if not refused:
        assert processor.process_inputs("request", prompt, parameters, ("generate",)).sampling_params.max_tokens == 4
        return
    with pytest.raises(VLLMValidationError) as error:
        processor.process_inputs("request", prompt, parameters, ("generate",))
    assert error.value.parameter == refused
