"""PPO's rewards, advantages and losses, its critic and its penalty: values and gradients."""

import math

import pytest
import torch
from conftest import TINY
from toy import (
    Policy,
    Recorder,
    flat_gradient,
    initial_model,
    make_batch,
    near,
    plain_logprobs,
    run_main,
)
from transformers import AutoConfig, AutoModelForTokenClassification, LlamaForSequenceClassification

import common
import ppo

NAN, INF = math.nan, math.inf
CPU = torch.device("cpu")


def row(*values):
    return torch.tensor([values])


def real(*mask):
    return torch.tensor([mask]).bool()


# ------------------------------------------- Rewards --------------------------------------------
def test_the_score_stands_on_the_last_token():
    # Not on the slot after it, and not in the last column; prompt columns may come first.
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 1, 1]]).bool()
    found = ppo.shaped_rewards(torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3, 5), mask, 0.1)
    expected = [[0, 0, 1, 0, 0], [0, 2, 0, 0, 0], [0, 0, 0, 0, 3]]
    near(found, torch.tensor(expected, dtype=torch.float32))


def test_the_kl_is_taken_from_every_token_and_from_no_other():
    kl = row(9.0, 0.5, -1.0, 2.0, NAN)
    found = ppo.shaped_rewards(torch.tensor([1.0]), kl, real(0, 1, 1, 1, 0), 0.1)
    near(found, row(0.0, -0.05, 0.1, 1 - 0.2, 0.0))


# --------------------------------------------- GAE ----------------------------------------------
@pytest.mark.parametrize(
    ("rewards", "values", "mask", "gamma", "lam", "advantages"),
    [
        # Deltas .2, .2, 1 - .6 = .4: A = .4, .2 + .95 * .4 = .58, .2 + .95 * .58 = .751.
        ([0, 0, 1], [0.2, 0.4, 0.6], [1, 1, 1], 1.0, 0.95, [0.751, 0.58, 0.4]),
        # Deltas .9 * .4 - .2 = .16, .9 * .6 - .4 = .14, .4; each .45 of the next one's A.
        ([0, 0, 1], [0.2, 0.4, 0.6], [1, 1, 1], 0.9, 0.5, [0.304, 0.32, 0.4]),
        # The value at padding is nobody's future: A = 1 - 0, then 0 + .95 * 1.
        ([0, 1, 0], [0, 0, 100], [1, 1, 0], 1.0, 0.95, [0.95, 1.0, 0.0]),
        # The prompt's columns are 0, and what is there changes nothing.
        ([7, 0, 1], [5, 0.4, 0.6], [0, 1, 1], 1.0, 0.95, [0.0, 0.58, 0.4]),
        # lam 0 is the TD residual r + gamma V' - V.
        ([1, 0, 2], [0.5, 1.0, 3.0], [1, 1, 1], 1.0, 0.0, [1.5, 2.0, -1.0]),
        ([1, 0, 2], [0.5, 1.0, 3.0], [1, 1, 1], 0.5, 0.0, [1.0, 0.5, -1.0]),
        # lam 1 is G - V, with G = 3, 2, 2, or 1 + 0 + 2 / 4, 2 / 2, 2 at gamma 1/2.
        ([1, 0, 2], [0.5, 1.0, 3.0], [1, 1, 1], 1.0, 1.0, [2.5, 1.0, -1.0]),
        ([1, 0, 2], [0.5, 1.0, 3.0], [1, 1, 1], 0.5, 1.0, [1.0, 0.0, -1.0]),
        ([0, 0, 1], [0, 0, 0], [1, 1, 1], 1.0, 1.0, [1.0, 1.0, 1.0]),  # returns, not rewards
        # A critic that says .6 everywhere: what came beyond it.
        ([0, 0, 1], [0.6, 0.6, 0.6], [1, 1, 1], 1.0, 1.0, [0.4, 0.4, 0.4]),
        ([0, 0, 0], [0.6, 0.6, 0.6], [1, 1, 1], 1.0, 1.0, [-0.6, -0.6, -0.6]),
    ],
)
def test_gae(rewards, values, mask, gamma, lam, advantages):
    rewards, values, mask = row(*rewards).float(), row(*values).float(), real(*mask)
    found, returns = ppo.gae(rewards, values, mask, gamma, lam)
    near(found, row(*advantages))
    near(returns, torch.where(mask, found + values, 0.0))  # what the critic is fitted to


def test_the_critics_targets_at_lam_1_are_the_returns():
    rewards, values = row(0.0, 0.0, 3.0), row(0.2, -7.0, 0.6)
    _, returns = ppo.gae(rewards, values, real(1, 1, 1), 1.0, 1.0)
    near(returns, row(3.0, 3.0, 3.0))  # whatever the critic says


def test_gae_has_the_papers_defaults():
    given = row(0.0, 0.0, 1.0), row(0.2, 0.4, 0.6), real(1, 1, 1)
    near(ppo.gae(*given)[0], row(0.751, 0.58, 0.4))
    assert (ppo.Args().gamma, ppo.Args().lam) == (1.0, 0.95)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("mask", [[1, 1, 0], [0, 1, 1]])
def test_what_is_masked_is_nothing_to_gae(bad, mask):
    mask = real(*mask)
    rewards = torch.where(mask, row(0.0, 0.5, 1.0), bad)
    values = torch.where(mask, row(0.2, 0.4, 0.6), bad)
    clean = [torch.where(mask, tensor, 0.0) for tensor in (rewards, values)]
    expected = ppo.gae(*clean, mask)
    for a, b in zip(ppo.gae(rewards, values, mask), expected, strict=True):
        assert torch.equal(a, b) and (a[~mask] == 0).all() and (a[mask] != 0).all()


# ------------------------------------------ Whitening -------------------------------------------
def test_whitening_leaves_padding_out():
    # Mean 2 and population std 1 of the two tokens.
    near(ppo.whiten(row(1.0, 3.0, 0.0, 0.0), real(1, 1, 0, 0)), row(-1.0, 1.0, 0.0, 0.0))
    near(ppo.whiten(row(1.0, 3.0, NAN, 50.0), real(1, 1, 0, 0)), row(-1.0, 1.0, 0.0, 0.0))


def test_whitening_is_over_all_rows():
    # 0, 2, 4: mean 2, variance 8 / 3.
    mask = torch.tensor([[1, 1], [1, 0]]).bool()
    found = ppo.whiten(torch.tensor([[0.0, 2.0], [4.0, 0.0]]), mask)
    near(found, torch.tensor([[-2.0, 0.0], [2.0, 0.0]]) / (8 / 3) ** 0.5)


@pytest.mark.parametrize("value", [0.0, 0.1, 0.7])
def test_equal_advantages_are_whitened_to_nothing(value):
    # Like a uniform group: the rounding of a mean must not be blown up by its own tiny std.
    found = ppo.whiten(torch.full((2, 5), value), torch.ones(2, 5, dtype=torch.bool))
    near(found, torch.zeros(2, 5))


# ------------------------------------------ The critic ------------------------------------------
@pytest.mark.parametrize(
    ("value", "target", "clip_eps", "loss", "gradient"),
    [
        # The old value is 0, so 0.5 is clipped to 0.2.
        (0.5, 1.0, 0.2, 0.32, 0.0),  # max(.25, .64) / 2: the clipped one, a constant
        (0.5, 0.1, 0.2, 0.08, 0.4),  # max(.16, .01) / 2: V - G
        (0.1, 1.0, 0.2, 0.405, -0.9),  # inside, nothing is clipped
        (-0.5, -1.0, 0.2, 0.32, 0.0),
        (0.5, 1.0, None, 0.125, -0.5),
        (0.5, 1.0, 0.0, 0.125, -0.5),  # 0: never
    ],
)
def test_value_loss(value, target, clip_eps, loss, gradient):
    values = row(value).requires_grad_()
    found = ppo.value_loss(values, row(0.0), row(target), clip_eps)
    found.sum().backward()
    assert found.shape == (1, 1)
    assert found.item() == pytest.approx(loss, abs=1e-6)
    assert values.grad.item() == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize(
    ("values", "returns", "explained"),
    [
        ([0.0, 2.0, 1.0], [0.0, 2.0, 1.0], 1.0),
        ([1.0, 1.0, 1.0], [0.0, 2.0, 1.0], 0.0),  # the mean explains nothing
        ([5.0, 5.0, 5.0], [0.0, 2.0, 1.0], 0.0),  # a shift is no matter of variance
        ([0.0, 1.0], [0.0, 2.0], 0.75),  # residuals 0, 1: variance 1/4 of 1
        ([2.0, 0.0], [0.0, 2.0], -3.0),  # residuals -2, 2: variance 4
        ([0.3, 0.5, 0.9], [1.0, 1.0, 1.0], None),
        ([0.3] * 10, [0.1] * 10, None),  # though their float32 mean is not 0.1
    ],
)
def test_explained_variance(values, returns, explained):
    found = ppo.explained_variance(torch.tensor(values), torch.tensor(returns))
    assert found == (None if explained is None else pytest.approx(explained, abs=1e-6))


# ------------------------------------------ The penalty -----------------------------------------
@pytest.mark.parametrize(
    ("kl", "beta"),
    [
        (0.0, 1.0),
        (0.019, 1.0),
        (0.021, 2.0),  # 0.03 / 1.5 = 0.02
        (0.03, 2.0),
        (0.044, 2.0),
        (0.046, 4.0),  # 0.03 * 1.5 = 0.045
        (9.0, 4.0),
    ],
)
def test_beta_follows_the_kl(kl, beta):
    assert ppo.update_beta(2.0, kl, 0.03) == beta


def test_penalty_loss():
    # rho 1.5, A 2: k3 = .5 - ln 1.5, so -3 + .1 (.5 - ln 1.5), with gradient .1 (rho - 1) - rho A.
    # rho 0.5, A -1: .5 + .1 (-.5 + ln 2), gradient .1 * -.5 + .5. Nothing is clipped.
    old = row(-1.0, -2.0)
    logprobs = (old + row(1.5, 0.5).log()).requires_grad_()
    loss = ppo.penalty_loss(logprobs, old, row(2.0, -1.0), real(1, 1), 0.1)
    loss.sum().backward()
    near(loss.detach(), row(-3 + 0.1 * (0.5 - math.log(1.5)), 0.5 + 0.1 * (math.log(2) - 0.5)))
    near(logprobs.grad, row(-2.95, 0.45))


def test_the_penaltys_expectation_is_the_kl_in_value_and_gradient():
    # The samples are the old policy's: E_old[rho - 1 - log rho] = KL(old || new).
    policy, old = Policy(), Policy(seed=1)
    logprobs, old_logprobs = policy.logprobs(padding=NAN), old.logprobs().detach()
    sampled = old_logprobs.sum(1).exp()
    losses = ppo.penalty_loss(logprobs, old_logprobs, torch.zeros(7, 1), policy.mask, 1.0)
    found = (sampled * losses.sum(1)).sum()
    exact = (sampled * (old_logprobs.sum(1) - policy.logprobs().sum(1))).sum()
    assert exact > 0.05
    near(found, exact)
    near(policy.gradient(found), policy.gradient(exact))


# ------------------------------------------- The clip -------------------------------------------
# (A, rho) -> loss, gradient, clipped: -min(rho A, clip(rho, 0.8, 1.2) A). Where rho A is chosen
# d(-rho A)/dlogp = -rho A; where the clip is, it is a constant.
CASES = [
    (1.0, 0.5, -0.5, -0.5, False),
    (1.0, 1.0, -1.0, -1.0, False),
    (1.0, 1.5, -1.2, 0.0, True),
    (-1.0, 0.5, 0.8, 0.0, True),
    (-1.0, 1.0, 1.0, 1.0, False),
    (-1.0, 1.5, 1.5, 1.5, False),
    (0.0, 1.5, 0.0, 0.0, False),
]


def test_policy_loss_has_an_advantage_for_each_token():
    advantages, ratios, losses, gradients, clipped = zip(*CASES, strict=True)
    old = torch.full((1, len(CASES)), -1.0)
    logprobs = (old + row(*ratios).log()).requires_grad_()
    found = ppo.policy_loss(logprobs, old, row(*advantages), torch.ones_like(old).bool())
    found[0].sum().backward()
    near(found[0].detach(), row(*losses))
    near(logprobs.grad, row(*gradients))
    assert found[1].tolist() == [list(clipped)]


def test_each_clip_flag_is_a_distance_from_1_on_its_own_side():
    ratios, old = row(1.4, 1.6, 0.95, 0.85), torch.zeros(1, 4)  # clipped to [0.9, 1.5]
    mask = torch.ones(1, 4, dtype=torch.bool)
    loss, clipped = ppo.policy_loss(ratios.log(), old, row(1.0), mask, 0.1, 0.5)
    near(loss, row(-1.4, -1.5, -0.95, -0.85))
    assert clipped.tolist() == [[False, True, False, False]]
    loss, clipped = ppo.policy_loss(ratios.log(), old, row(-1.0), mask, 0.1, 0.5)
    near(loss, row(1.4, 1.6, 0.95, 0.9))
    assert clipped.tolist() == [[False, False, False, True]]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["logprobs", "old_logprobs", "advantages"])
@pytest.mark.parametrize("kind", ["clip", "penalty"])
def test_what_is_masked_changes_no_policy_loss(kind, where, bad):
    mask = torch.tensor([[True, True, False], [False, True, False]])
    inputs = {
        "logprobs": torch.tensor([[-1.0, -2.0, -0.5], [-0.3, -1.5, -2.0]]),
        "old_logprobs": torch.tensor([[-1.1, -1.8, -1.0], [-0.1, -1.6, -3.0]]),
        "advantages": torch.tensor([[1.0, -1.0, 2.0], [0.5, -2.0, 1.0]]),
    }

    def run(values):
        logprobs = values["logprobs"].clone().requires_grad_()
        given = (logprobs, values["old_logprobs"], values["advantages"], mask)
        loss = ppo.policy_loss(*given)[0] if kind == "clip" else ppo.penalty_loss(*given, 0.5)
        weighted = loss * ppo.loss_weights(mask, "sequence-mean", 3)
        (gradient,) = torch.autograd.grad(weighted.sum(), logprobs)
        return loss.detach(), gradient

    expected = run(inputs)
    found = run({**inputs, where: torch.where(mask, inputs[where], bad)})
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) and (a[~mask] == 0).all() and (a[mask] != 0).all()


# -------------------------------- The estimator is the gradient ---------------------------------
def exact_values(policy):
    """The expected reward of each state (completions, 2): before a token, given those before it."""
    probabilities = policy.probabilities().detach()
    firsts = torch.tensor([c[0] for c in policy.completions])
    values = torch.zeros(len(firsts), 2, dtype=torch.float64)
    values[:, 0] = (probabilities * policy.rewards).sum()
    for first in range(3):
        rows = firsts == first
        mean = (probabilities * policy.rewards)[rows].sum() / probabilities[rows].sum()
        values[rows, 1] = mean
    return torch.where(policy.mask, values, 0.0)


def expected_gradient(policy, values, lam):
    """PPO's at the first update of a batch, with a critic that says `values`."""
    logprobs, mask = policy.logprobs(padding=NAN), policy.mask
    last = torch.stack([~mask[:, 1], mask[:, 1]], 1)
    rewards = torch.where(last, policy.rewards[:, None], 0.0)
    advantages, _ = ppo.gae(rewards, values, mask, 1.0, lam)

    def loss(rows):
        given = (logprobs[rows], logprobs[rows].detach(), advantages[rows], mask[rows])
        weights = ppo.loss_weights(mask[rows], "sequence-sum", 2)
        return (ppo.policy_loss(*given)[0] * weights).sum()

    return policy.expected_gradient(loss, 1)


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_with_the_exact_critic_the_expected_gradient_is_exact(lam):
    policy = Policy()
    found = expected_gradient(policy, exact_values(policy), lam)
    near(found, policy.exact_gradient())


def test_at_lam_1_a_wrong_critic_is_only_noise():
    policy = Policy()
    wrong = torch.where(policy.mask, torch.tensor([2.0, 0.0], dtype=torch.float64), 0.0)
    wrong[:, 1] += torch.tensor([[1.0, -3.0, 5.0][c[0]] for c in policy.completions])
    near(expected_gradient(policy, wrong, 1.0), policy.exact_gradient())


def test_at_lam_0_a_wrong_critic_biases_the_gradient():
    # V = 0: a token is credited with its own reward alone, so of the first tokens only the one that
    # stops earns anything. Its logits' gradient is p (c - sum p c) with c = (R(stop), 0, 0).
    policy = Policy()
    found = expected_gradient(policy, torch.zeros(7, 2, dtype=torch.float64), 0.0)
    exact = policy.exact_gradient()
    p = policy.tables[0].detach().softmax(0)
    c = torch.stack([policy.rewards[0], *torch.zeros(2, dtype=torch.float64)])
    near(found[:3], p * (c - (p * c).sum()))
    assert (found[:3] - exact[:3]).norm() > 0.1
    near(found[3:], exact[3:])  # the last tokens lack nothing


# -------------------------------------------- Updates -------------------------------------------
def load_critic(name=TINY / "model"):
    torch.manual_seed(0)
    return common.load_model(AutoModelForTokenClassification, name, CPU, num_labels=1)


def make_ppo_batch(model, critic, tokenizer, lam=1.0):
    """make_batch's rows with scores, this critic's values and their advantages."""
    batch = make_batch(model, tokenizer)
    with torch.no_grad():
        values = critic(input_ids=batch["input_ids"]).logits[:, :-1, 0]
    scores = torch.tensor([1.0, 0.0, 0.5, -1.0, 2.0])
    rewards = ppo.shaped_rewards(scores, torch.zeros(()), batch["mask"], 0.0)
    batch["old_values"] = torch.where(batch["mask"], values, 0.0)
    batch["advantages"], batch["returns"] = ppo.gae(rewards, values, batch["mask"], 1.0, lam)
    return batch, scores


def run_update(model, critic, optimizers, batch, kl_penalty=1.0, **flags):
    """ppo.update on all rows, in micro-batches of two or so; returns its Totals."""
    size = {"tokens_per_micro_batch": 60, "max_completion_tokens": 32, "max_grad_norm": 1e9}
    args, totals = ppo.Args(**{**size, **flags}), common.Totals()
    autocast, rows = common.precision("float32", CPU)[1], torch.arange(len(batch["mask"]))
    ppo.update(model, critic, optimizers, dict(batch), rows, args, autocast, totals, kl_penalty)
    return totals


def mean_of_means(losses, mask):
    return ((losses * mask).sum(1) / mask.sum(1)).mean()


@pytest.mark.parametrize("objective", ["clip", "kl-penalty"])
def test_at_lam_1_an_update_is_actor_critic(tiny_model, tokenizer, objective):
    # Policy: -(G - V) logp. Critic: (V - G)^2 / 2. Neither of the two has a share of the other's.
    critic = load_critic()
    batch, scores = make_ppo_batch(tiny_model, critic, tokenizer)
    mask = batch["mask"]
    advantages = scores[:, None] - batch["old_values"]
    losses = -advantages * plain_logprobs(tiny_model, batch)
    expected = flat_gradient(tiny_model, mean_of_means(losses, mask))
    values = critic(input_ids=batch["input_ids"]).logits[:, :-1, 0]
    value_loss = mean_of_means((values - scores[:, None]) ** 2 / 2, mask)
    expected_of_critic = flat_gradient(critic, value_loss)

    recorders = (Recorder(tiny_model), Recorder(critic))
    totals = run_update(tiny_model, critic, recorders, batch, objective=objective)
    for recorder, right in zip(recorders, (expected, expected_of_critic), strict=True):
        assert right.norm() > 0.01
        near(recorder.gradients[0] / right.norm(), right / right.norm())
    assert totals.metrics()["loss/value"] == pytest.approx(value_loss.item(), rel=1e-5)


def test_the_value_clip_flag_takes_gradients_away(tiny_model, tokenizer):
    critic = load_critic()
    batch, _ = make_ppo_batch(tiny_model, critic, tokenizer)
    # All values are 1 above the old ones and 1 below their targets: clipped, and constant.
    batch["old_values"] = batch["old_values"] - 1
    batch["returns"] = batch["old_values"] + 2
    moved = []
    for eps in (0.0, 0.5):
        recorders = (Recorder(tiny_model), Recorder(critic))
        run_update(tiny_model, critic, recorders, batch, value_clip_eps=eps)
        moved.append(recorders[1].gradients[0].norm().item())
    assert moved[0] > 0.1 and moved[1] == 0.0


def test_a_step_on_the_entropy_bonus_alone_raises_the_entropy(tiny_model, tokenizer):
    critic = load_critic()
    batch, _ = make_ppo_batch(tiny_model, critic, tokenizer)
    batch["advantages"] = torch.zeros_like(batch["advantages"])

    def entropies():  # H = -sum p log p of each token's distribution
        logprobs = tiny_model(input_ids=batch["input_ids"]).logits[:, :-1].log_softmax(-1)
        return -(logprobs.exp() * logprobs).sum(-1)

    before = mean_of_means(entropies(), batch["mask"])
    expected = flat_gradient(tiny_model, -0.5 * before)
    recorders = (Recorder(tiny_model), Recorder(critic))
    run_update(tiny_model, critic, recorders, batch, entropy_coef=0.5)
    near(recorders[0].gradients[0], expected, atol=1e-5)
    optimizers = (torch.optim.SGD(tiny_model.parameters(), lr=0.01), Recorder(critic))
    run_update(tiny_model, critic, optimizers, batch, entropy_coef=0.5)
    with torch.no_grad():
        assert mean_of_means(entropies(), batch["mask"]) > before + 1e-3


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_critic_has_no_dropout(checkpointing):
    # With it the values that GAE reads and those that are fitted would be two random ones.
    kind = AutoModelForTokenClassification
    critic = common.load_model(kind, TINY / "model", CPU, checkpointing, num_labels=1)
    ids = torch.arange(10)[None]
    first, second = (critic(input_ids=ids, use_cache=False).logits for _ in range(2))
    assert torch.equal(first, second)


# ------------------------------------------- In a run -------------------------------------------
def plain_values(critic, batch):
    with torch.no_grad():
        values = critic(input_ids=batch["input_ids"]).logits[:, :-1, 0]
    return torch.where(batch["mask"], values, 0.0)


@pytest.mark.parametrize("whiten", [False, True])
def test_the_advantages_of_a_run(tmp_path, monkeypatch, whiten):
    # The second step, whose policy differs from the reference, with G - V for lam 1.
    flags = {"steps": 2, "beta": 0.5, "lam": 1.0, "value_warmup_steps": 0, "whiten": whiten}
    steps, rows = run_main(ppo, tmp_path, monkeypatch, learning_rate=3e-3, **flags)
    batch, mask = steps[1].batch, steps[1].batch["mask"]
    policy, critic = steps[1].models
    with torch.no_grad():
        k1 = plain_logprobs(policy, batch) - plain_logprobs(initial_model(), batch)
    assert k1.abs().mean() > 1e-3
    returns = (steps[1].rewards[:, None] - 0.5 * k1.flip(1).cumsum(1).flip(1)) * mask
    values = plain_values(critic, batch)
    near(batch["old_values"], values, atol=1e-4)
    near(batch["returns"], returns, atol=1e-4)  # whitened or not
    advantages = returns - values
    if whiten:
        mean, std = advantages[mask].mean(), advantages[mask].std(correction=0)
        advantages = (advantages - mean) / std * mask
    near(batch["advantages"], advantages, atol=2e-4)
    variance = (returns - values)[mask].var() / returns[mask].var()
    found = rows[-1]["critic/explained_variance"]
    assert found == pytest.approx(1 - variance.item(), abs=1e-3)


def has_moved(step, which):
    """Whether a run's policy (0) or critic (1) has other weights than before its update."""
    pairs = zip(step.models[which].parameters(), step.live[which].parameters(), strict=True)
    return any(not torch.equal(before, after) for before, after in pairs)


def test_value_warm_up_trains_the_critic_alone(tmp_path, monkeypatch):
    flags = {"value_warmup_steps": 1, "weight_decay": 0.1}
    (step,), _ = run_main(ppo, tmp_path, monkeypatch, **flags)
    assert not has_moved(step, 0)
    assert has_moved(step, 1)


def test_after_the_value_warm_up_both_are_trained(tmp_path, monkeypatch):
    flags = {"value_warmup_steps": 1, "steps": 2}
    (_, step), _ = run_main(ppo, tmp_path, monkeypatch, **flags)
    assert has_moved(step, 0)
    assert has_moved(step, 1)


def test_the_critic_begins_as_the_policy_with_a_head_of_zeros(tmp_path, monkeypatch):
    # A head of noise is worse than none: with SmolLM2 its explained variance began at -7.
    (step,), _ = run_main(ppo, tmp_path, monkeypatch)
    assert not any(weight.any() for weight in step.models[1].score.parameters())
    policy = initial_model().base_model.state_dict()
    for name, weight in step.models[1].base_model.state_dict().items():
        assert torch.equal(weight, policy[name])


def test_a_head_that_the_value_model_lacks_is_the_seeds(tmp_path, monkeypatch):
    found = []
    for number, seed in enumerate([3, 3, 4]):
        torch.manual_seed(100 + number)  # what was drawn before is no matter
        folder = tmp_path / str(number)
        folder.mkdir()
        value_model = str(TINY / "model")
        (step,), _ = run_main(ppo, folder, monkeypatch, seed=seed, value_model=value_model)
        found.append(step.models[1])
    assert torch.equal(found[0].score.weight, found[1].score.weight)
    assert not torch.equal(found[0].score.weight, found[2].score.weight)


@pytest.mark.parametrize("flag", ["reward_model", "value_model"])
def test_the_critic_begins_as_the_classifier(tmp_path, monkeypatch, tokenizer, flag):
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(TINY / "model", num_labels=1)
    classifier = LlamaForSequenceClassification(config).eval()
    classifier.save_pretrained(tmp_path / "classifier")
    tokenizer.save_pretrained(tmp_path / "classifier")
    flags = {flag: str(tmp_path / "classifier")}
    (step,), _ = run_main(ppo, tmp_path, monkeypatch, **flags)
    critic = step.models[1].state_dict()
    for name, weight in classifier.state_dict().items():  # score.weight is one of them
        assert torch.equal(critic[name], weight), name
    assert (critic["score.bias"] == 0).all()  # the classifier has none


def test_the_kl_penalty_is_adapted_to_the_kl_it_found(tmp_path, monkeypatch):
    # A target far below what a step moves, then one far above.
    for number, (target, factor) in enumerate([(1e-9, 2.0), (1e3, 0.5)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        flags = {"objective": "kl-penalty", "kl_target": target, "kl_penalty": 3.0}
        flags |= {"steps": 2, "value_warmup_steps": 0, "learning_rate": 3e-3}
        (first, second), rows = run_main(ppo, folder, monkeypatch, **flags)
        assert [first.given[-1], second.given[-1]] == [3.0, 3.0 * factor]
        with torch.no_grad():  # on the first batch, before and after its update
            old, new = (plain_logprobs(s.models[0], first.batch) for s in (first, second))
        k3 = ((new - old).exp() - 1 - (new - old))[first.batch["mask"]].mean().item()
        assert k3 > 1e-3
        assert rows[1]["kl/old_new"] == pytest.approx(k3, rel=1e-3)
        assert "policy/clip_frac" not in rows[1]


def test_the_kl_penalty_waits_for_the_policy(tmp_path, monkeypatch):
    flags = {"objective": "kl-penalty", "kl_penalty": 3.0, "value_warmup_steps": 1, "steps": 2}
    steps, _ = run_main(ppo, tmp_path, monkeypatch, **flags)
    assert [step.given[-1] for step in steps] == [3.0, 3.0]


def test_minibatches_share_the_values_and_targets_of_their_batch(tmp_path, monkeypatch):
    flags = {"minibatches": 2, "update_epochs": 2, "value_warmup_steps": 0}
    steps, _ = run_main(ppo, tmp_path, monkeypatch, learning_rate=1e-3, **flags)
    assert len(steps) == 4
    for step in steps[1:]:
        for name in ("old_logprobs", "old_values", "returns", "advantages"):
            assert torch.equal(step.batch[name], steps[0].batch[name])
    with torch.no_grad():
        last, batch = steps[3].models[0], steps[3].batch
        assert (plain_logprobs(last, batch) - batch["old_logprobs"]).abs().max() > 1e-3
