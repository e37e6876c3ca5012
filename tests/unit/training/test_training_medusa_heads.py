"""training.medusa on a tiny random target: it learns, and the Torch backend proposes what it trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from outrider_runtime.torch_engine.drafts import medusa_drafter
from outrider_runtime.torch_engine.model_runner import CachedModel
from outrider_runtime.torch_engine.token_sampling import Row
from safetensors.torch import load_file

from tests.unit.torch_engine.engines import CPU, GREEDY
from tests.unit.training.tiny_target import DRAFTED, train_briefly, work
from training.medusa.__main__ import MEDUSA, figure
from training.medusa.checkpoint import load
from training.medusa.heads import Heads
from training.medusa.learning import (
    DEPTH,
    answer_states,
    compute_loss,
    count_accepted,
    figures,
    linear_guess,
    new_heads,
    rank_proposals,
    tree,
)
from training.target import Answer, Target


def at_random(target: Target, answers: list[Answer]) -> Heads:
    """New heads say the token again that the target says next, which is often right of a random target."""
    torch.manual_seed(0)
    heads = new_heads(target, answers, DRAFTED)
    with torch.no_grad():
        for name, weight in heads.named_parameters():
            if "project" in name:
                weight.normal_(std=weight.shape[0] ** -0.5)
    return heads


@pytest.fixture(scope="module")
def trained(target: Target, held_out: list[Answer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    job = work(MEDUSA, held_out, tmp_path_factory.mktemp("heads"))
    return train_briefly(target, job, 60, at_random(target, held_out))


def test_heads_begin_with_the_best_linear_guess(target, held_out):
    """They propose better than the target's own answer again, before they are trained; where no answer is long enough
    for a depth, its head begins with that."""
    own = Heads(target.config.hidden_size, DEPTH, new_heads(target, held_out, DRAFTED).vocabulary)
    said = answer_states(held_out)
    with torch.no_grad():
        assert compute_loss(new_heads(target, held_out, DRAFTED), target, said) < compute_loss(own, target, said)
    turn = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(1))).Q
    states = torch.randn(500, 6, generator=torch.Generator().manual_seed(2))
    assert (linear_guess(states, states @ turn.T) - turn).abs().max() < 0.05
    assert torch.equal(linear_guess(states[:0], states[:0]), torch.eye(6))


def test_medusa_training_finds_tokens_of_held_out_answers(target, held_out, trained):
    before, after = at_random(target, held_out), load(trained, target)
    with torch.no_grad():
        assert compute_loss(after, target, answer_states(held_out)) < 0.9 * compute_loss(
            before, target, answer_states(held_out)
        )
    depths, gained = figures(after, target, held_out)
    assert depths[0][0] > 1.5 * figures(before, target, held_out)[0][0][0]
    assert len(depths) == DEPTH
    assert all(first <= among for first, among in depths)
    assert gained > figures(before, target, held_out)[1]
    assert "at rank 1" in figure(after, target, held_out)


def test_the_backend_proposes_what_was_trained(target, held_out, trained):
    """Ranks and probabilities of every depth, from the folder that training wrote."""
    model = CachedModel(Path(target.model.config._name_or_path), 0, dtype=torch.float32, device=CPU)
    heads, answer = medusa_drafter.MedusaWeights(trained, model), held_out[0]
    proposed, _, _ = next(rank_proposals(load(trained, target), target, [answer]))
    before_the_norm: list[torch.Tensor] = []
    hook = target.model.model.norm.register_forward_pre_hook(lambda _module, args: before_the_norm.append(args[0][0]))
    with torch.inference_mode():
        target.model(answer.tokens[None, :-1])
        hook.remove()
        states = heads.states(before_the_norm[0])
    rows = [Row(GREEDY, 0)] * len(proposed)
    for depth, state in enumerate(states):
        nodes = heads.likeliest(state[answer.prompt - 1 :][: len(proposed)], rows, 4)
        assert torch.equal(nodes.tokens, proposed[:, depth, :4])


def test_the_weights_are_a_file_that_any_user_may_read(trained):
    """float16, without the output layer, which is the target's."""
    tensors = load_file(trained / "model.safetensors")
    assert {name for name in tensors if name.startswith("heads.0.")} == {
        "heads.0.block.weight", "heads.0.block.bias", "heads.0.project.weight",
    }  # fmt: skip
    assert {tensor.dtype for name, tensor in tensors.items() if name != "vocabulary"} == {torch.float16}
    assert tensors["vocabulary"].shape == (DRAFTED,)
    assert (trained / "model.safetensors").stat().st_mode & 0o044 == 0o044


def test_a_tree_holds_the_most_probable_paths_and_their_parents():
    """Paths are ranked by the product of the heads' probabilities; the target's tokens are followed as far as the tree
    goes."""
    chosen = tree([[0.5, 0.3, 0.1], [0.6, 0.2, 0.1]], 4)
    assert chosen == {(0,), (1,), (0, 0), (1, 0)}
    assert count_accepted([[False, True, False], [True, False, False]], chosen) == 2
    assert count_accepted([[False, False, True], [True, False, False]], chosen) == 0
    assert count_accepted([[True, False, False], [False, True, False]], chosen) == 1
