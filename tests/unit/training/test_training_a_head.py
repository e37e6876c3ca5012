"""training.eagle3 on a tiny random target: it learns, and writes what vLLM's loader reads."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from setup.drafts import SHIPPED_HEAD
from tests.unit.training.tiny_target import DRAFTED, VOCABULARY, prompts, train_briefly, work
from training.budget import Budget, Progress
from training.eagle3.__main__ import EAGLE3, main
from training.eagle3.checkpoint import load
from training.eagle3.head import Head
from training.eagle3.learning import UNROLL, acceptance, collate, compute_loss, new_head
from training.prompts import DEMO_PROMPTS, split_prompts
from training.rounds import draw_alike, train
from training.target import Answer, Target, fused_layers, sample


@pytest.fixture(scope="module")
def trained(target: Target, held_out: list[Answer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a head of 48 steps."""
    torch.manual_seed(0)
    return train_briefly(target, work(EAGLE3, held_out, tmp_path_factory.mktemp("head")), steps=48)


def untrained(target: Target, answers: list[Answer]) -> Head:
    torch.manual_seed(0)
    return new_head(target, answers, DRAFTED)


def test_training_raises_acceptance_on_held_out_answers(target, held_out, trained):
    """The promise of the whole script, on the figure that users compare heads by."""
    before, after, batch = untrained(target, held_out), load(trained, target), collate(held_out)
    with torch.no_grad():
        assert compute_loss(after, target, batch) < 0.9 * compute_loss(before, target, batch)
    assert acceptance(after, target, held_out)[0] > 1.5 * acceptance(before, target, held_out)[0]


def test_the_folder_has_what_vllm_loads(trained):
    """Names, types and shapes as in the shipped head, which vLLM loads; each size is the target's own."""
    ours, shipped = load_file(trained / "model.safetensors"), load_file(SHIPPED_HEAD / "model.safetensors")
    sizes = {
        576: 64, 1152: 128, 1728: 192, 1536: 128, 192: 32, 8192: DRAFTED, 49152: VOCABULARY
    }  # fmt: skip
    assert {name: (*tensor.shape,) for name, tensor in ours.items()} == {
        name: tuple(sizes[size] for size in tensor.shape) for name, tensor in shipped.items()
    }
    assert (ours["d2t"].dtype, ours["t2d"].dtype) == (shipped["d2t"].dtype, shipped["t2d"].dtype)
    assert ours["t2d"].nonzero().flatten().tolist() == (ours["d2t"] + torch.arange(DRAFTED)).tolist()
    config, expected = (json.loads((folder / "config.json").read_text()) for folder in (trained, SHIPPED_HEAD))
    assert config["architectures"] == expected["architectures"]
    assert (config["num_hidden_layers"], config["draft_vocab_size"], config["vocab_size"]) == (1, DRAFTED, VOCABULARY)
    assert (trained / "model.safetensors").stat().st_mode & 0o044 == 0o044


def test_reading_an_answer_is_drafting_it(target, held_out, trained):
    """Unrolled over a whole text, each position's chain is what drafting from there alone would propose.

    That is what vLLM does: keys of the text up to a position from the target's states, then the head's own.
    """
    head, batch = load(trained, target), collate(held_out[:1])
    place = 5
    cut = (batch.tokens[:, : place + UNROLL + 2], batch.fused[:, : place + 1])
    with torch.no_grad():
        whole = [states[:, place] for states in head.unroll(target.embed, batch.tokens, batch.fused, UNROLL)]
        alone = [states[:, -1] for states in head.unroll(target.embed, *cut, UNROLL)]
        changed = batch.fused.clone()
        changed[:, place + 1 :] = 9.0  # what comes later must not show
        later = [states[:, place] for states in head.unroll(target.embed, batch.tokens, changed, UNROLL)]
    for in_one_batch, by_itself, in_another in zip(whole, alone, later, strict=True):
        torch.testing.assert_close(in_one_batch, by_itself)
        torch.testing.assert_close(in_one_batch, in_another)


def test_round_has_prompts_of_like_length_and_all_get_a_turn():
    """A batch is as long as its longest prompt: padding took more time than the answers."""
    lengths, chooser = list(range(1, 65)), random.Random(0)
    rounds = [[len(text) for text in draw_alike([[5] * length for length in lengths], 8, chooser)] for _ in range(200)]
    assert {len(sizes) for sizes in rounds} == {8}
    assert sum(max(sizes) - min(sizes) for sizes in rounds) / len(rounds) < 64 / 4
    assert {length for sizes in rounds for length in sizes} == set(lengths)


def test_states_kept_while_answering_are_those_of_one_pass(target):
    """Neither padding of a shorter prompt nor the cache may change what the head learns from."""
    short, long = [5, 6], [7, 8, 9, 10, 11]
    for answer in target.write([short, long], 8, 0.0):
        with torch.no_grad():
            out = target.model(answer.tokens[None, :-1], output_hidden_states=True)
        torch.testing.assert_close(answer.fused, torch.cat([out.hidden_states[i][0] for i in target.layers], -1))
        assert (answer.final @ target.output.T).argmax(-1)[answer.prompt - 1 :].tolist() == answer.tokens[
            answer.prompt :
        ].tolist()


def test_an_answer_ends_where_the_target_ended_it(target):
    """What a row of the batch says after its end is not learned."""
    target.ends, before = torch.arange(100), target.ends
    try:
        answers = target.write(prompts(5, 8), 24, 0.0)
    finally:
        target.ends = before
    assert min(len(answer.tokens) for answer in answers) < 26
    for answer in answers:
        ended = [token < 100 for token in answer.tokens[answer.prompt :].tolist()]
        assert not any(ended[:-1])
        assert len(answer.fused) == len(answer.final) == len(answer.tokens) - 1


def test_training_goes_on_from_the_head_that_is_there(target, held_out, trained):
    """Resumed with nothing left to do, it writes back what it read."""
    before = load_file(trained / "model.safetensors")
    train(target, work(EAGLE3, held_out, trained), Progress(Budget(steps=1), steps=1), load(trained, target))
    after = load_file(trained / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_interrupted_training_writes_what_it_has(target, held_out, tmp_path):
    """Ctrl-C after an hour must not cost the hour."""

    class Interrupted(Progress):
        def tick(self) -> None:
            if self.steps == 3:
                raise KeyboardInterrupt

    progress = Interrupted(Budget(steps=1000))
    train(target, work(EAGLE3, held_out, tmp_path), progress, untrained(target, held_out))
    assert progress.steps == 3
    assert load(tmp_path, target).lm_head.weight.shape == (DRAFTED, 64)


def test_the_fused_states_are_those_that_vllm_takes_by_default():
    """vLLM's default, (2, L/2, L - 3), is three different layers from seven on."""
    assert fused_layers(30) == (2, 15, 27)
    assert fused_layers(7) == (2, 3, 4)
    assert all(len(set(fused_layers(layers))) == 3 and max(fused_layers(layers)) < layers for layers in range(4, 64))


def test_held_out_prompts_are_never_trained_on():
    """Otherwise the figure would praise what the head has memorised."""
    lines = [f"prompt {number}" for number in range(240)] + ["prompt 0"]
    learned, held_out = split_prompts(lines)
    assert set(learned).isdisjoint(held_out)
    assert set(learned) | set(held_out) == set(lines)
    assert len(held_out) <= 32
    assert len(split_prompts(DEMO_PROMPTS.read_text().splitlines())[1]) == 3
    assert [len(part) for part in split_prompts(["one", "two"])] == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "{tmp}/none"], "no config.json there"),
        (["--target", "{tmp}/other"], "is a gpt2 model"),
        (["--target", "{target}", "--prompts", "{tmp}/empty"], "has 0 prompts"),
        (["--target", "{target}", "--prompts", "{tmp}/broken"], "broken:2: a JSON line needs the prompt"),
        (["--target", "{target}", "--output", "{tmp}/empty"], "cannot be written"),
        (["--target", "{target}", "--evaluate", "{tmp}"], "holds no EAGLE-3 head"),
        (["--target", "{target}", "--evaluate", str(SHIPPED_HEAD)], "is for another target"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(target, tmp_path, capsys, arguments, said):
    """The refusal comes before an hour is spent, and without a traceback."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "broken").write_text('{"turns": ["fine"]}\n{"turns": []}\n')
    filled = [part.format(tmp=tmp_path, target=target.model.config._name_or_path) for part in arguments]
    rest = [] if "--output" in filled or "--evaluate" in filled else ["--output", str(tmp_path / "head")]
    assert main([*filled, *rest]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_training_learns_from_as_few_answers_as_requested(target, held_out, tmp_path):
    """`--answers 40`, more than one batch and less than two, once wrote them and ended before the first step."""
    progress = Progress(Budget(answers=40))
    train(target, work(EAGLE3, held_out, tmp_path), progress)
    assert progress.answers == 40
    assert progress.steps == 40 * EAGLE3.passes / 8, "eight answers a step"


@pytest.mark.slow
def test_a_head_is_evaluated_on_the_answers_it_was_validated_on(target, tmp_path, capsys):
    """The figure at the end of training and that of `--evaluate` are one figure; training on starts from it."""
    (tmp_path / "prompts").write_text("\n".join(f"w{number} w{number + 9} w3" for number in range(5, 45)))
    common = ["--target", target.model.config._name_or_path, "--prompts", str(tmp_path / "prompts"), "--device=cpu"]
    sizes = ["--batch=8", "--length=12", "--draft-vocabulary=64"]
    assert main([*common, *sizes, "--answers=16", f"--output={tmp_path / 'head'}"]) == 0
    trained = capsys.readouterr().out.splitlines()[-1]
    assert main([*common, *sizes, f"--evaluate={tmp_path / 'head'}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == trained
    assert main([*common, *sizes, "--steps=1", f"--output={tmp_path / 'head'}"]) == 0
    assert "training goes on from it" in capsys.readouterr().out


def test_answers_are_sampled_at_the_temperature_of_their_own_row():
    """None is greedy; at one, tokens come as often as the target says."""
    logits = torch.tensor([[0.0, 1.0, 2.0]]).log_softmax(-1)
    torch.manual_seed(0)
    rows = logits.expand(20_000, 3)
    cold, warm = sample(rows, 0.0), sample(rows, torch.tensor([0.0, 1.0]).repeat(10_000))
    assert (cold == 2).all()
    assert (warm[::2] == 2).all()
    shares = torch.bincount(warm[1::2, 0], minlength=3) / 10_000
    assert (shares - logits[0].exp()).abs().max() < 0.03
