"""training.block_head on a tiny random target: it learns, and its blocks see what the serving engine's see."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from outrider_runtime.drafters.draft_configs import typed_config
from safetensors.torch import load_file
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from bench.record.blocks import propose_with_block_head
from setup.drafts import SHIPPED_HEAD
from tests.unit.training.tiny_target import DRAFTED, VOCABULARY, train_briefly, work
from training.block_head import learning
from training.block_head.__main__ import BLOCK_HEAD, main
from training.block_head.checkpoint import load, save
from training.block_head.head import BLOCK, MARKOV_RANK, BlockHead, looks_back, rotary
from training.block_head.learning import acceptance, compute_loss, cut_stretch, draw_compared, join_stretches, new_head
from training.target import Answer, Target


@pytest.fixture(scope="module", autouse=True)
def short_stretches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning, "STRETCH", 16)
        patch.setattr(learning, "CONTEXT", 8)
        yield


def untrained(target: Target, answers: list[Answer]) -> BlockHead:
    torch.manual_seed(0)
    return new_head(target, answers, DRAFTED)


@pytest.fixture(scope="module")
def trained(target: Target, held_out: list[Answer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return train_briefly(target, work(BLOCK_HEAD, held_out, tmp_path_factory.mktemp("head")), steps=60)


def test_training_lowers_the_loss_and_raises_acceptance(target, held_out, trained):
    """Figures for answers that it never saw; acceptance is what users compare heads by."""
    before, after = untrained(target, held_out), load(trained, target)
    batch = join_stretches([cut_stretch(answer, answer.prompt, 16, 8) for answer in held_out])
    with torch.no_grad():
        losses = [compute_loss(head, target, batch, draw_compared(head, VOCABULARY)) for head in (before, after)]
    assert losses[1] < 0.9 * losses[0]
    assert acceptance(after, target, held_out)[0] > 1.5 * acceptance(before, target, held_out)[0]


def test_the_loss_of_all_tokens_is_that_of_their_distributions(target, held_out):
    """Its short form is the cross-entropy, written out. -sum p log q, weights 1, 0.8, ... over the block's places."""
    head = untrained(target, held_out)
    torch.nn.init.normal_(head.markov_head.markov_w2.weight)
    head.compared = torch.arange(VOCABULARY)
    stretch = cut_stretch(held_out[0], held_out[0].prompt, 12, 8)
    with torch.no_grad():
        states = head(target.embed, stretch.tokens[:, :12], stretch.context, stretch.unseen)[0]
        total = 0.0
        for place in range(BLOCK):
            labelled = stretch.labelled[0, place : place + 12]
            logits = states[:, place] @ target.output.T + head.markov(stretch.tokens[0, place : place + 12])
            said = (stretch.final[0, place : place + 12] @ target.output.T).softmax(-1)
            total += 0.8**place * float(-(said * logits.log_softmax(-1)).sum(-1)[labelled].mean())
        expected = total / sum(0.8**place for place in range(BLOCK))
        assert compute_loss(head, target, stretch, draw_compared(head, VOCABULARY)) == pytest.approx(expected, rel=1e-5)


def test_tokens_drawn_stand_for_all_that_are_not_compared(target, held_out):
    """Their weights sum to the number of the others: a partition function that is right on average."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning, "SAMPLED", 10)
        compared = draw_compared(untrained(target, held_out), VOCABULARY)
    assert len(compared.tokens.unique()) == len(compared.tokens) == DRAFTED + 10
    assert compared.addend.exp().sum() == pytest.approx(VOCABULARY)


def test_a_block_sees_the_states_before_it_and_itself(target, held_out):
    """Trained among others with little context, it is what drafting from its own place with that context is. Neither
    states that come later nor other blocks show in it."""
    head, answer = untrained(target, held_out), held_out[0]
    first, blocks = answer.prompt + 3, 6
    changed = Answer(answer.tokens, answer.prompt, answer.fused.clone(), answer.final)
    changed.fused[first + 4 :] = 9.0
    stretches = [cut_stretch(text, first, blocks, 4) for text in (answer, changed)]
    alone = cut_stretch(answer, first + 4, 1, 8)
    with torch.no_grad():
        states = [
            head(target.embed, part.tokens[:, :-BLOCK], part.context, part.unseen) for part in (*stretches, alone)
        ]
    torch.testing.assert_close(states[0][0, 4], states[2][0, 0])
    torch.testing.assert_close(states[1][0, 4], states[2][0, 0])
    assert not torch.allclose(states[1][0, 5], states[0][0, 5])


def test_padding_before_a_short_text_is_not_seen(target, held_out):
    head, answer = untrained(target, held_out), held_out[0]
    whole, padded = (cut_stretch(answer, answer.prompt, 5, context) for context in (answer.prompt, 12))
    assert padded.unseen.tolist() == [12 - answer.prompt]
    with torch.no_grad():
        states = [head(target.embed, part.tokens[:, :-BLOCK], part.context, part.unseen) for part in (whole, padded)]
    torch.testing.assert_close(*states)


@pytest.mark.parametrize("distance", [1, 4])
def test_a_new_head_looks_back_as_far_as_it_is_made_to(distance):
    """Query and key meet best `distance` tokens apart, wherever they are."""
    query, key = looks_back(64, distance, 6)
    places = torch.arange(40)
    cosine, sine = (part[None] for part in rotary(places, 64))
    turned, keys = apply_rotary_pos_emb(query.expand(1, 1, 40, 64), key.expand(1, 1, 40, 64), cosine, sine)
    scores = (turned @ keys.mT)[0, 0]
    assert scores[distance:].argmax(-1).tolist() == places[: 40 - distance].tolist()


def test_the_folder_is_small_and_the_runtime_takes_it(target, trained):
    """DSpark as published. Embedding and output layer are the target's, so nothing of them is in the folder."""
    weights = load_file(trained / "model.safetensors")
    assert not [name for name in weights if "embed" in name or "lm_head" in name]
    assert weights["markov_head.markov_w1.weight"].shape == (VOCABULARY, MARKOV_RANK)
    assert weights["t2d"].sum() == DRAFTED
    config = typed_config(json.loads((trained / "config.json").read_text()), str(trained))
    assert (config.block_kind, config.block_tokens, config.samples_from_anchor) == ("DSpark", BLOCK, True)
    assert [layer + 1 for layer in config.target_layer_ids or ()] == list(target.layers[-2:])
    assert (trained / "model.safetensors").stat().st_mode & 0o044 == 0o044


def test_the_recording_has_the_proposals_that_are_judged(target, held_out, trained):
    """Proposals behind each token of an answer are as often right as validation says."""
    head, proposals = load(trained, target), list[torch.Tensor]()
    for answer in held_out:
        count = len(answer.tokens) - 1 - answer.prompt - BLOCK
        made = propose_with_block_head(head, target, answer, count)
        expected = answer.tokens[answer.prompt + 1 :].unfold(0, BLOCK, 1)[:count]
        proposals.append((made.tokens == expected).int().cumprod(1))
        assert made.confidence.shape == (count, BLOCK)
    cut = [Answer(answer.tokens[:-BLOCK], *answer[1:]) for answer in held_out]
    assert torch.cat(proposals)[:, 0].float().mean() == pytest.approx(acceptance(head, target, cut)[0], abs=1e-6)


def test_training_goes_on_from_the_head_that_is_there(target, trained, tmp_path):
    """What was written and read again is written alike."""
    save(load(trained, target), target, tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in (trained, tmp_path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("folder", "said"),
    [(Path("/nowhere"), "holds no block head"), (SHIPPED_HEAD, "proposes None tokens from the layers None")],
)
def test_other_folders_are_refused_in_a_sentence(target, capsys, folder, said):
    arguments = ["--target", target.model.config._name_or_path, "--device=cpu", "--evaluate", str(folder)]
    assert main(arguments) == 1
    assert said in capsys.readouterr().err
