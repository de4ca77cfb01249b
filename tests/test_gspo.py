"""GSPO's sequence ratio and loss: values and gradients, by hand and by enumeration."""

import inspect
import math

import pytest
import torch
from toy import (
    Policy,
    flat_gradient,
    gradient_of_update,
    make_batch,
    near,
    plain_logprobs,
    run_main,
)

import grpo
import gspo

NAN, INF = math.nan, math.inf
WIDE = {"clip_eps_low": 0.2, "clip_eps_high": 0.2}


def full(*shape):
    return torch.ones(shape, dtype=torch.bool)


# --------------------------------------- The sequence ratio --------------------------------------
@pytest.mark.parametrize(
    ("ratios", "mask", "expected"),
    [
        ([2.0, 0.5], [1, 1], 1.0),  # they cancel in the mean of the logs; their mean would be 1.25
        ([1.1] * 4, [1] * 4, 1.1),
        ([1.1] * 9, [1] * 9, 1.1),  # at any length: a product would be 1.1^9
        ([1.1] * 9, [1] * 2 + [0] * 7, 1.1),
        ([9.0, 1.1, 9.0], [0, 1, 0], 1.1),  # neither the prompt nor padding counts
        ([4.0, 1.0], [1, 1], 2.0),  # sqrt(4)
    ],
)
def test_the_ratio_is_the_geometric_mean(ratios, mask, expected):
    old = torch.linspace(-2, -1, len(ratios))[None]
    logprobs = old + torch.tensor([ratios]).log()
    found = gspo.sequence_ratio(logprobs, old, torch.tensor([mask]).bool())
    near(found, torch.tensor([[expected]]))


def test_the_ratio_leaves_padding_out_of_the_length():
    log_ratio = torch.tensor([[0.2, -0.1, 0.5]])
    mask = torch.tensor([[True, True, False]])
    found = gspo.sequence_ratio(log_ratio, torch.zeros(1, 3), mask)
    # exp((0.2 - 0.1) / 2) = exp(0.05)
    assert found.item() == pytest.approx(1.0513, abs=5e-5)


def test_each_row_has_a_ratio_of_its_own():
    log_ratio = torch.tensor([0.1, 0.2, 0.3])[:, None].expand(3, 5)
    ratio = gspo.sequence_ratio(log_ratio, torch.zeros(3, 5), full(3, 5))
    near(ratio, torch.tensor([[0.1], [0.2], [0.3]]).exp())  # (B, 1)
    advantages = torch.tensor([[1.0], [2.0], [3.0]])
    loss, clipped = gspo.policy_loss(log_ratio, torch.zeros(3, 5), advantages, full(3, 5), 1.0, 1.0)
    assert loss.shape == clipped.shape == (3, 5)
    near(loss, -(ratio * advantages).expand(3, 5))


def test_a_completion_without_tokens_has_the_ratio_1():
    mask = torch.zeros(1, 2, dtype=torch.bool)
    assert gspo.sequence_ratio(torch.ones(1, 2), torch.zeros(1, 2), mask).item() == 1.0


# --------------------------------------------- Loss ---------------------------------------------
def loss_and_gradient(log_ratio, advantages, mask=None, **clip):
    """(loss per token, gradient of the mean of the rows' mean loss, the clipped bool)."""
    old = torch.full_like(log_ratio, -1.0)
    logprobs = (old + log_ratio).requires_grad_()
    mask = full(*log_ratio.shape) if mask is None else mask
    loss, clipped = gspo.policy_loss(logprobs, old, advantages, mask, **clip)
    weighted = loss * gspo.loss_weights(mask, gspo.Args().loss_aggregation, 8)
    (gradient,) = torch.autograd.grad(weighted.sum(), logprobs)
    return loss.detach(), gradient, clipped


# (A, s) -> loss, its gradient with respect to log s, clipped: -min(s A, clip(s, 0.8, 1.2) A).
CASES = [
    (1.0, 0.5, -0.5, -0.5, False),
    (1.0, 1.0, -1.0, -1.0, False),
    (1.0, 1.5, -1.2, 0.0, True),
    (-1.0, 0.5, 0.8, 0.0, True),
    (-1.0, 1.0, 1.0, 1.0, False),
    (-1.0, 1.5, 1.5, 1.5, False),
    (0.0, 1.5, 0.0, 0.0, False),
    (0.0, 0.5, 0.0, 0.0, False),
]


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize(("advantage", "ratio", "loss", "gradient", "clipped"), CASES)
def test_ppo_cases_of_a_whole_completion(length, advantage, ratio, loss, gradient, clipped):
    # The tokens' log-ratios differ, and their mean is log s. log s has 1 / length of each token's.
    spread = torch.linspace(-0.5, 0.5, length) if length > 1 else torch.zeros(1)
    found = loss_and_gradient(math.log(ratio) + spread[None], torch.tensor([[advantage]]), **WIDE)
    near(found[0], torch.full((1, length), loss))
    near(found[1], torch.full((1, length), gradient / length))
    assert found[2].tolist() == [[clipped] * length]


def test_the_gradient_of_a_token_is_the_ratio_over_the_length():
    log_ratio = torch.tensor([[0.2, -0.1, 0.5]])
    mask = torch.tensor([[True, True, False]])
    _, gradient, _ = loss_and_gradient(log_ratio, torch.tensor([[2.0]]), mask, **WIDE)
    each = -2.0 * math.exp(0.05) / 2  # -A s / length
    near(gradient, torch.tensor([[each, each, 0.0]]))


def test_no_token_of_a_clipped_completion_has_a_gradient():
    # Row 0: ratios 4 and 0.5, s = sqrt(2) > 1.2. Its second token alone would not be clipped.
    # Row 1: ratios 4 and 0.25, s = 1. Its first token alone would be.
    log_ratio = torch.tensor([[4.0, 0.5], [4.0, 0.25]]).log()
    _, gradient, clipped = loss_and_gradient(log_ratio, torch.tensor([[1.0], [1.0]]), **WIDE)
    near(gradient, torch.tensor([[0.0, 0.0], [-0.25, -0.25]]))  # -1 * 1 / 2 tokens / 2 rows
    assert clipped.tolist() == [[True, True], [False, False]]


def test_the_clip_is_the_papers():
    args, signature = gspo.Args(), inspect.signature(gspo.policy_loss).parameters
    assert (args.clip_eps_low, args.clip_eps_high) == (3e-4, 4e-4)
    assert signature["clip_eps_low"].default == 3e-4
    assert signature["clip_eps_high"].default == 4e-4
    # 1.00035 is above 1 + 3e-4 and below 1 + 4e-4; 0.99965 is below 1 - 3e-4.
    ratio = torch.tensor([[1.00035], [1.00045], [0.99975], [0.99965]], dtype=torch.float64)
    advantages = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])
    loss, _, clipped = loss_and_gradient(ratio.log(), advantages)
    expected = torch.tensor([[-1.00035], [-1.0004], [0.99975], [0.9997]], dtype=torch.float64)
    near(loss, expected, atol=1e-9)
    assert clipped.tolist() == [[False], [True], [False], [True]]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["logprobs", "old_logprobs", "advantages"])
def test_what_is_masked_changes_nothing(bad, where):
    mask = torch.tensor([[True, True, False], [False, True, False]])
    inputs = {
        "logprobs": torch.tensor([[-1.0, -2.0, -0.5], [-0.3, -1.5, -2.0]]),
        "old_logprobs": torch.tensor([[-1.1, -1.8, -1.0], [-0.1, -1.6, -3.0]]),
        "advantages": torch.tensor([[1.0, 1.0, 1.0], [-2.0, -2.0, -2.0]]),
    }

    def run(values):
        logprobs = values["logprobs"].clone().requires_grad_()
        others = (values["old_logprobs"], values["advantages"])
        loss, clipped = gspo.policy_loss(logprobs, *others, mask, **WIDE)
        weighted = loss * gspo.loss_weights(mask, "sequence-mean", 3)
        (gradient,) = torch.autograd.grad(weighted.sum(), logprobs)
        return loss.detach(), gradient, clipped

    expected = run(inputs)
    found = run({**inputs, where: torch.where(mask, inputs[where], bad)})
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert (found[0][~mask] == 0).all() and (found[1][~mask] == 0).all()
    assert not found[2][~mask].any()


# -------------------------------- The estimator is the gradient ---------------------------------
@pytest.mark.parametrize("scale_by_std", [True, False])
def test_at_the_first_update_its_expected_gradient_is_grpos(scale_by_std):
    # At s = 1, ds = the mean of dlogp: GRPO's mean over tokens.
    policy = Policy()
    logprobs = policy.logprobs(padding=NAN)

    def loss_of(script):
        def loss(rows):
            rewards = policy.rewards[rows][None]
            advantages = script.group_advantages(rewards, scale_by_std).view(-1, 1)
            given = (logprobs[rows], logprobs[rows].detach(), advantages, policy.mask[rows])
            weights = script.loss_weights(policy.mask[rows], "sequence-mean", 2)
            return (script.policy_loss(*given)[0] * weights).sum()

        return loss

    expected = policy.expected_gradient(loss_of(grpo), 2)
    assert expected.norm() > 0.05
    near(policy.expected_gradient(loss_of(gspo), 2), expected)


# ------------------------------------------- In a run -------------------------------------------
def test_the_gradient_of_an_update_is_the_formulas(tiny_model, tokenizer):
    batch = make_batch(tiny_model, tokenizer)
    mask = batch["mask"]
    batch["advantages"] = torch.tensor([[1.0], [-1.0], [2.0], [0.5], [-1.5]])
    shift = torch.tensor([[0.1], [0.3], [0.3], [-0.1], [-0.3]])  # log s
    batch["old_logprobs"] = (batch["engine_logprobs"] - shift) * mask
    # -s A is left in rows 0, 1 and 3. Row 2 has s above 1.2 with A > 0, row 4 below 0.8 with A < 0.
    means = plain_logprobs(tiny_model, batch).sum(1) / mask.sum(1)
    ratio = (means - means.detach() + shift[:, 0]).exp()
    loss = -(ratio * batch["advantages"][:, 0])[[0, 1, 3]].sum() / 5
    expected = flat_gradient(tiny_model, loss)
    found = gradient_of_update(gspo, tiny_model, batch, mismatch_cap=0.0, **WIDE)
    near(found / expected.norm(), expected / expected.norm())


def test_advantages_are_grpos_of_each_prompts_rows(tmp_path, monkeypatch):
    (step,), _ = run_main(gspo, tmp_path, monkeypatch)
    groups = step.rewards.view(2, 4)
    std = groups.std(1, correction=0, keepdim=True)
    assert std.min() > 0.1
    near(step.batch["advantages"], ((groups - groups.mean(1, keepdim=True)) / std).view(-1, 1))
