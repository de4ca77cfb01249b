"""PPO's rewards, advantages, losses, critic and update. Its clip is GRPO's, and tested there."""

import math
from dataclasses import replace

import pytest
import torch
import tyro
from conftest import TINY, Policy, Recorder, flat_gradient, make_batch, naive, near, read_jsonl
from runs import attempt, copy, run, small
from transformers import AutoConfig, AutoModelForSequenceClassification

import common
import ppo

NAN, INF = math.nan, math.inf


def row(*values):
    return torch.tensor([values], dtype=torch.float32)


def real(*mask):
    return torch.tensor([mask]).bool()


# ------------------------------------------- Rewards --------------------------------------------
def test_the_score_is_on_the_last_token_and_the_kl_on_each():
    # Not on the slot after it, and not in the last column; prompt columns may come first.
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 1, 0]]).bool()
    kl = torch.tensor([[0.0, 0, 0, 0, 0], [9, 0, 9, 9, NAN], [9, 0.5, -1, 2, NAN]])
    found = ppo.shaped_rewards(torch.tensor([1.0, 2.0, 3.0]), kl, mask, 0.1)
    near(found, [[0, 0, 1, 0, 0], [0, 2, 0, 0, 0], [0, -0.05, 0.1, 3 - 0.2, 0]])


# --------------------------------------------- GAE ----------------------------------------------
@pytest.mark.parametrize(
    ("rewards", "values", "mask", "gamma", "lam", "advantages"),
    [
        # Deltas .2, .2, 1 - .6 = .4: A = .4, .2 + .95 * .4 = .58, .2 + .95 * .58 = .751.
        ([0, 0, 1], [0.2, 0.4, 0.6], [1, 1, 1], 1.0, 0.95, [0.751, 0.58, 0.4]),
        # Deltas .9 * .4 - .2 = .16, .9 * .6 - .4 = .14, .4; each .45 of the next one's A.
        ([0, 0, 1], [0.2, 0.4, 0.6], [1, 1, 1], 0.9, 0.5, [0.304, 0.32, 0.4]),
        # The value at padding is nobody's future: A = 1 - 0, then 0 + .95 * 1.
        ([0, 1, INF], [0, 0, NAN], [1, 1, 0], 1.0, 0.95, [0.95, 1.0, 0.0]),
        # The prompt's columns are 0, and what is there changes nothing.
        ([NAN, 0, 1], [-INF, 0.4, 0.6], [0, 1, 1], 1.0, 0.95, [0.0, 0.58, 0.4]),
        # lam 0 is the TD residual r + gamma V' - V.
        ([1, 0, 2], [0.5, 1.0, 3.0], [1, 1, 1], 1.0, 0.0, [1.5, 2.0, -1.0]),
        ([1, 0, 2], [0.5, 1.0, 3.0], [1, 1, 1], 0.5, 0.0, [1.0, 0.5, -1.0]),
        # lam 1 is G - V, with G = 3, 2, 2, or 1 + 0 + 2 / 4, 2 / 2, 2 at gamma 1/2.
        ([1, 0, 2], [0.5, 1.0, 3.0], [1, 1, 1], 1.0, 1.0, [2.5, 1.0, -1.0]),
        ([1, 0, 2], [0.5, 1.0, 3.0], [1, 1, 1], 0.5, 1.0, [1.0, 0.0, -1.0]),
    ],
)
def test_gae(rewards, values, mask, gamma, lam, advantages):
    rewards, values, mask = row(*rewards), row(*values), real(*mask)
    found, returns = ppo.gae(rewards, values, mask, gamma, lam)
    near(found, row(*advantages))
    near(returns, torch.where(mask, found + values, 0.0))  # what the critic is fitted to
    if (gamma, lam) == (1.0, 0.95):
        near(ppo.gae(rewards, values, mask)[0], found)


# ------------------------------------------ Whitening -------------------------------------------
@pytest.mark.parametrize(
    "advantages, mask, whitened",
    [
        # Mean 2 and population std 1 of the two tokens.
        ([[1.0, 3.0, NAN, 50.0]], [[1, 1, 0, 0]], [[-1.0, 1.0, 0.0, 0.0]]),
        # Over all rows: 0, 2, 4 have the mean 2 and the variance 8 / 3: 2 / 1.63299 = 1.22474.
        ([[0.0, 2.0], [4.0, 9.0]], [[1, 1], [1, 0]], [[-1.22474, 0.0], [1.22474, 0.0]]),
        ([[5.0, NAN]], [[1, 0]], [[0.0, 0.0]]),
        ([[0.1] * 5] * 2, [[1] * 5] * 2, [[0.0] * 5] * 2),  # no rounding is blown up by its std
    ],
)
def test_whitening_is_over_the_batchs_tokens(advantages, mask, whitened):
    near(ppo.whiten(torch.tensor(advantages), torch.tensor(mask).bool()), whitened, atol=5e-6)


# ------------------------------------------ The critic ------------------------------------------
def test_value_loss():
    # The old value is 0, and +-0.5 are clipped to +-0.2. max(.25, .64) / 2: the clipped one, a
    # constant; max(.16, .01) / 2: V - G; at 0.1 nothing is clipped, .9^2 / 2; max(.25, .64) / 2.
    values, targets = row(0.5, 0.5, 0.1, -0.5).requires_grad_(), row(1.0, 0.1, 1.0, -1.0)
    found = ppo.value_loss(values, torch.zeros(1, 4), targets, 0.2)
    found.sum().backward()
    near(found.detach(), row(0.32, 0.08, 0.405, 0.32))
    near(values.grad, row(0.0, 0.4, -0.9, 0.0))
    for never in (None, 0.0):
        near(ppo.value_loss(row(0.5), row(0.0), row(1.0), never), row(0.125))  # .25 / 2


@pytest.mark.parametrize(
    ("values", "returns", "explained"),
    [
        ([0.0, 2.0, 1.0], [0.0, 2.0, 1.0], 1.0),
        ([1.0, 1.0, 1.0], [0.0, 2.0, 1.0], 0.0),  # the mean explains nothing
        ([5.0, 5.0, 5.0], [0.0, 2.0, 1.0], 0.0),  # a shift is no matter of variance
        ([0.0, 1.0], [0.0, 2.0], 0.75),  # residuals 0, 1: variance 1/4 of 1
        ([2.0, 0.0], [0.0, 2.0], -3.0),  # residuals -2, 2: variance 4
        ([0.3, 0.5, 0.9], [1.0, 1.0, 1.0], 0.0),  # there is nothing to explain
        # Equal rewards, though their float32 mean is not 0.1, or as gae's sums round them.
        ([0.3, 0.5] * 5, [0.1] * 10, 0.0),
        ([0.3, 0.5], [1.0, 1.0000001], 0.0),
    ],
)
def test_explained_variance(values, returns, explained):
    found = ppo.explained_variance(torch.tensor(values), torch.tensor(returns))
    assert found == pytest.approx(explained, abs=1e-6)


# ------------------------------------------ The penalty -----------------------------------------
def test_large_rewards_that_differ_by_1_keep_their_difference():
    # In float32 1e8 and 1e8 + 1 are one number; (1e8, 1e8 + 1) less their mean is -+.5, over .5.
    mask, scores = torch.ones(2, 1).bool(), torch.tensor([1e8, 1e8 + 1], dtype=torch.float64)
    rewards = ppo.shaped_rewards(scores, torch.zeros(2, 1), mask, 0.0)
    advantages, _ = ppo.gae(rewards, torch.zeros(2, 1), mask)
    near(ppo.whiten(advantages, mask), torch.tensor([[-1.0], [1.0]]).double(), atol=1e-6)


def test_beta_follows_the_kl():
    # 0.03 / 1.5 = 0.02 and 0.03 * 1.5 = 0.045
    kls = [0.0, 0.019, 0.021, 0.03, 0.044, 0.046, 9.0]
    assert [ppo.update_beta(2.0, kl, 0.03) for kl in kls] == [1, 1, 2, 2, 2, 4, 4]


def test_penalty_loss():
    # rho 1.5, A 2: k3 = .5 - ln 1.5, so -3 + .1 (.5 - ln 1.5), with gradient .1 (rho - 1) - rho A.
    # rho 0.5, A -1: .5 + .1 (-.5 + ln 2), gradient .1 * -.5 + .5. Nothing is clipped.
    old = row(-1.0, -2.0)
    logprobs = (old + row(1.5, 0.5).log()).requires_grad_()
    loss = ppo.penalty_loss(logprobs, old, row(2.0, -1.0), real(1, 1), 0.1)
    loss.sum().backward()
    near(loss.detach(), row(-3 + 0.1 * (0.5 - math.log(1.5)), 0.5 + 0.1 * (math.log(2) - 0.5)))
    near(logprobs.grad, row(-2.95, 0.45))


# -------------------------------- The estimator is the gradient ---------------------------------
@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_with_the_exact_critic_the_expected_gradient_is_exact(lam):
    policy = Policy()
    logprobs, mask, p = policy.logprobs(padding=NAN), policy.mask, policy.probabilities().detach()
    firsts = torch.tensor([c[0] for c in policy.completions])
    alike = (firsts == firsts[:, None]) * p  # completions that begin as this one
    exact = torch.stack([(p @ policy.rewards).expand(7), alike @ policy.rewards / alike.sum(1)], 1)
    wrong = torch.tensor([[2.0, [1.0, -3.0, 5.0][first]] for first in firsts]).double()
    rewards = ppo.shaped_rewards(policy.rewards, torch.zeros(7, 2).double(), mask, 0.0)
    for values, biased in ((exact, False), (wrong, lam < 1)):  # at lam 1 it is only noise
        advantages, _ = ppo.gae(rewards, values, mask, 1.0, lam)
        losses, _ = ppo.policy_loss(logprobs, logprobs.detach(), advantages, mask)
        bias = -policy.gradient((p[:, None] * losses).sum()) - policy.exact_gradient()
        assert bias.norm() > 0.01 if biased else bias.norm() < 1e-6


# ------------------------------------------ The models ------------------------------------------
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "n_positions": 64}
SIZES |= {"intermediate_size": 24, "vocab_size": 86, "eos_token_id": 5, "initializer_range": 0.5}


def classifier(folder, tokenizer, family, labels=1):
    """A small classifier, and ppo's Args with its folder."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **SIZES, num_labels=labels)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, ppo.Args(model=str(TINY / "model"), reward_model=str(folder))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "falcon", "bloom"])
def test_the_reward_model_scores_the_last_token_and_the_critic_begins_as_it(
    family, tmp_path, tokenizer
):
    model, args = classifier(tmp_path, tokenizer, family)
    assert tokenizer.eos_token_id == 5
    problems, texts = [{"prompt": "1+1=?"}, {"prompt": "21+32+10=?"}], ["2 is it", "53 as it is"]
    expected = []
    for problem, text in zip(problems, texts, strict=True):  # one by one, without padding
        prompt = common.encode_prompt(tokenizer, problem["prompt"])
        ids = prompt + tokenizer(text)["input_ids"] + [5]
        values = model.score(model.base_model(torch.tensor([ids]))[0])[..., 0].detach()
        assert values.std() > 0.01
        near(ppo.Critic(args, torch.float32)(torch.tensor([ids])), values)
        expected.append(values[0, -1].item())
    for size in (1, 3):  # four rows one by one, and in a part that is full and one that is not
        judge = ppo.RewardModel(replace(args, micro_batch_size=size), "cpu", torch.float32)
        found = judge(problems * 2, texts * 2)
        assert found == pytest.approx(expected * 2, abs=1e-5) and isinstance(found[0], float)
    with pytest.raises(SystemExit, match="--reward-model must have a head `score` of one label"):
        ppo.Critic(classifier(tmp_path, tokenizer, family, labels=2)[1], torch.float32)


def test_a_run_with_a_reward_model_is_scored_by_it(tmp_path, tokenizer):
    model, args = classifier(tmp_path, tokenizer, "llama")
    script = copy(tmp_path / "script", "ppo")
    flags = small("ppo", "--steps", 1, "--micro-batch-size", 3, "--reward-model", tmp_path)
    run(script, *flags, "--output-dir", tmp_path / "run", processes=2)
    judge = ppo.RewardModel(args, "cpu", torch.float32)
    for group in read_jsonl(tmp_path / "run" / "samples.jsonl"):
        problems = [{"prompt": group["prompt"]}] * 4
        assert group["rewards"] == pytest.approx(judge(problems, group["completions"]), abs=1e-5)
    model.score.weight.data.fill_(math.nan)
    model.save_pretrained(tmp_path)
    done = attempt(script, *flags, "--output-dir", tmp_path / "other")
    assert done.stderr == "error: --reward-model gives a score that is no finite number\n"


# -------------------------------------------- Updates -------------------------------------------
SCORES = torch.tensor([1.0, 0.0, 0.5, -1.0, 2.0, 0.0, 1.0, 0.0, 0.5, 0.5, 0.5, 0.5])[:, None]
ACTOR_CRITIC = "--lam 1 --no-whiten --loss-aggregation sequence-sum --minibatches 1"
ACTOR_CRITIC += " --value-warmup-steps 0"


@pytest.mark.parametrize("size", [1, 5, 100])
@pytest.mark.parametrize("objective", ["clip", "kl-penalty"])
def test_actor_critic_is_the_command_of_the_docstring(one_process, tiny_model, objective, size):
    # Policy: -(G - V) logp. Critic: (V - G)^2 / 2. Neither of the two has a share of the other's.
    assert ACTOR_CRITIC in " ".join(ppo.__doc__.split())
    flags = f"{ACTOR_CRITIC} --objective {objective} --micro-batch-size {size} --max-grad-norm 1e9"
    args = tyro.cli(ppo.Args, args=flags.split())
    assert (args.whiten, args.lam, args.gamma, args.value_warmup_steps) == (False, 1, 1, 0)
    critic = ppo.Critic(ppo.Args(model=str(TINY / "model")), torch.float32).eval()
    torch.manual_seed(0)
    torch.nn.init.normal_(critic.head.weight, std=0.02)
    batch = make_batch(tiny_model, torch.zeros(12, 1))
    mask, values = batch["mask"], critic(batch["input_ids"])[:, :-1]
    batch["old_values"] = ppo.score_values(critic, batch, args)
    rewards = ppo.shaped_rewards(SCORES[:, 0], torch.zeros(mask.shape), mask, 0.0)
    gae = ppo.gae(rewards, batch["old_values"], mask, args.gamma, args.lam)
    batch["advantages"], batch["returns"] = gae

    def mean_of_sums(losses):
        return (losses * mask).sum(1).mean()

    advantages = SCORES - values.detach()
    loss = mean_of_sums(-advantages * naive(tiny_model, batch["input_ids"], mask)[0])
    value_loss = mean_of_sums((values - SCORES) ** 2 / 2)
    expected = flat_gradient(tiny_model, loss), flat_gradient(critic, value_loss)

    recorders = (Recorder(tiny_model), Recorder(critic))
    metrics = ppo.update((tiny_model, critic), recorders, batch, args, 1.0)
    for recorder, right in zip(recorders, expected, strict=True):
        assert right.norm() > 0.01
        near(recorder.gradients[0] / right.norm(), right / right.norm(), atol=5e-6)
    assert metrics["loss/value"] == pytest.approx(value_loss.item(), rel=1e-5)
    # At the ratio 1.
    assert metrics["loss/policy"] == pytest.approx(-mean_of_sums(advantages).item(), abs=1e-5)
