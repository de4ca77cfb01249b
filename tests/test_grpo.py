"""GRPO's advantage, loss and update, and what it shares with the others: the clip with PPO, the
weights of the tokens with all, that no log-prob makes a loss infinite with all that have a ratio.

Values and gradients, against numbers by hand.
"""

import math

import pytest
import torch
from conftest import SCRIPTS, Policy, Recorder, flat_gradient, make_batch, near, plain_logprobs
from transformers import AutoConfig, AutoModelForCausalLM

import cispo
import common
import grpo
import gspo
import ppo
import reinforce
import rloo

NAN, INF = math.nan, math.inf
HOWS = ["sequence-sum", "sequence-mean", "token-mean", "constant"]
MODULES = [reinforce, rloo, ppo, grpo, gspo, cispo]
every_script = pytest.mark.parametrize("script", MODULES, ids=SCRIPTS)
clipping = pytest.mark.parametrize("script", [grpo, ppo, gspo], ids=lambda script: script.SCRIPT)


# ------------------------------------------ Advantages ------------------------------------------
@pytest.mark.parametrize(
    "rewards, scale_by_std, advantages",
    [
        # Mean 0.55; population variance (0.0625 + 0.0625 + 0.0025 + 0.0025) / 4 = 0.0325, whose
        # root is 0.18028: 0.25 / 0.18028 = 1.38675.
        ([[0.8, 0.3, 0.6, 0.5]], False, [[0.25, -0.25, 0.05, -0.05]]),
        ([[0.8, 0.3, 0.6, 0.5]], True, [[1.38675, -1.38675, 0.27735, -0.27735]]),
        # Each prompt with its own group. Second one: mean 7.5, std sqrt(3 * 6.25 + 56.25) / 2 =
        # 4.330, so 2.5 / 4.330 = .57735.
        (
            [[1.0, 0, 0, 1], [10, 10, 10, 0]],
            True,
            [[1.0, -1, -1, 1], [0.57735] * 3 + [-1.73205]],
        ),
        # p = 1/4: (1 - p) / sqrt(p (1 - p)) = sqrt(3), -p / sqrt(p (1 - p)) = -1 / sqrt(3);
        # a z-score does not know the scale of the rewards.
        ([[1.0, 0.0, 0.0, 0.0]], True, [[3**0.5] + [-(3**-0.5)] * 3]),
        ([[1.0, 0.9, 0.9, 0.9]], True, [[3**0.5] + [-(3**-0.5)] * 3]),
        ([[1e8, 1e8 + 1]], True, [[-1.0, 1.0]]),  # in float32 they would be equal
        ([[1e8, 1e8 + 1]], False, [[-0.5, 0.5]]),
        ([[1e29, -1e29]], True, [[1.0, -1.0]]),
    ],
)
def test_advantages_are_deviations_from_the_group(rewards, scale_by_std, advantages):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    near(grpo.group_advantages(rewards, scale_by_std), advantages, atol=1e-5)


# --------------------------------------------- Loss ---------------------------------------------
def loss_and_gradient(script, ratios, advantages, low=0.2, high=0.2):
    """[[loss, its gradient with respect to logprobs, clipped], ...] of completions of one token."""
    log_ratio, advantages = torch.tensor(ratios)[:, None].log(), torch.tensor(advantages)[:, None]
    old, mask = torch.full_like(log_ratio, -1.0), torch.ones(log_ratio.shape, dtype=torch.bool)
    logprobs = (old + log_ratio).requires_grad_()
    loss, clipped = script.policy_loss(logprobs, old, advantages, mask, low, high)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    return torch.cat([loss.detach(), gradient, clipped], 1)


@clipping
def test_ppo_cases(script):
    # -min(rho A, clip(rho, 0.8, 1.2) A). Where rho A is chosen d(-rho A)/dlogp = -rho A; where the
    # clip is, it is a constant.
    ratios, advantages = [0.5, 1.0, 1.5] * 3, [1.0] * 3 + [-1.0] * 3 + [0.0] * 3
    expected = [[-0.5, -0.5, 0], [-1, -1, 0], [-1.2, 0, 1], [0.8, 0, 1], [1, 1, 0], [1.5, 1.5, 0]]
    near(loss_and_gradient(script, ratios, advantages), expected + [[0, 0, 0]] * 3)


@clipping
def test_each_clip_flag_is_a_distance_from_1_on_its_own_side(script):
    # eps_low 0.1, eps_high 0.5: the ratio is clipped to [0.9, 1.5].
    ratios, advantages = [1.4, 1.6, 0.95, 0.85] * 2, [1.0] * 4 + [-1.0] * 4
    expected = [[-1.4, -1.4, 0], [-1.5, 0, 1], [-0.95, -0.95, 0], [-0.85, -0.85, 0]]
    expected += [[1.4, 1.4, 0], [1.6, 1.6, 0], [0.95, 0.95, 0], [0.9, 0, 1]]
    near(loss_and_gradient(script, ratios, advantages, 0.1, 0.5), expected)


@pytest.mark.parametrize("script", [grpo, ppo])
def test_the_ratio_and_the_advantage_are_each_tokens_own(script):
    logprobs, mask = torch.tensor([[2.0, 0.5]]).log(), torch.ones(1, 2, dtype=torch.bool)
    loss, clipped = script.policy_loss(logprobs, torch.zeros(1, 2), torch.tensor([[1.0, 3]]), mask)
    near(loss, [[-1.2, -1.5]])
    assert clipped.tolist() == [[True, False]]


# ------------------------------- What no log-prob and no padding does ----------------------------
def penalty_loss(logprobs, old_logprobs, advantages, mask):
    """PPO's other objective, with the results of policy_loss."""
    return ppo.penalty_loss(logprobs, old_logprobs, advantages, mask, 0.5), mask & False


def gspo_loss(*inputs):
    return gspo.policy_loss(*inputs, clip_eps_low=0.2, clip_eps_high=0.2)


LOSSES = [grpo.policy_loss, ppo.policy_loss, gspo_loss, cispo.policy_loss, penalty_loss]
every_loss = pytest.mark.parametrize("policy_loss", LOSSES)


@every_loss
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["logprobs", "old_logprobs", "advantages"])
def test_what_is_masked_changes_nothing(policy_loss, bad, where):
    mask = torch.tensor([[True, True, False], [False, True, False]])
    inputs = {
        "logprobs": torch.tensor([[-1.0, -2.0, -0.5], [-0.3, -1.5, -2.0]]),
        "old_logprobs": torch.tensor([[-1.1, -1.8, -1.0], [-0.1, -1.6, -3.0]]),
        "advantages": torch.tensor([[1.0, 1.0, 2.0], [0.5, -2.0, 1.0]]),
    }

    def run(values):
        logprobs = values["logprobs"].clone().requires_grad_()
        loss, clipped = policy_loss(logprobs, values["old_logprobs"], values["advantages"], mask)
        weighted = loss * grpo.loss_weights(mask, "token-mean", 3)
        (gradient,) = torch.autograd.grad(weighted.sum(), logprobs)
        return loss.detach(), gradient, clipped

    expected = run(inputs)
    found = run({**inputs, where: torch.where(mask, inputs[where], bad)})
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) and not a[~mask].any()
    assert (found[0][mask] != 0).all() and (found[1][mask] != 0).all()


@every_loss
@pytest.mark.parametrize("distance", [200.0, 1e5])  # exp(89) is infinite in float32
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_no_distance_to_the_old_policy_is_infinite(policy_loss, distance, advantage, sign):
    # Far above the old policy (sign 1) or below; in float32, as the scripts compute.
    old = torch.full((1, 2), -sign * distance)
    logprobs, mask = torch.zeros(1, 2).requires_grad_(), torch.ones(1, 2, dtype=torch.bool)
    loss, _ = policy_loss(logprobs, old, torch.tensor([[advantage]]), mask)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert loss.isfinite().all() and gradient.isfinite().all()
    if policy_loss is penalty_loss:  # E.g. A = 0: the KL's gradient leads back to the old policy.
        assert advantage > 0 or ((gradient * sign) > 0).all()
    elif policy_loss is cispo.policy_loss:  # -clip(rho, 0, 5) A, at most 5
        near(gradient, [[-5.0 * advantage * (sign > 0)] * 2])
    elif advantage == 0:
        assert not loss.any() and not gradient.any()
    elif advantage > 0:  # clipped above at 1.2, and nothing below
        near(loss, [[-1.2 * (sign > 0)] * 2])
        assert not gradient.any()
    elif sign > 0:  # what is bad and far too likely: descent makes it less so
        assert (gradient > 0).all()
    else:  # clipped at 0.8
        near(loss, [[0.8] * 2])
        assert not gradient.any()


# ------------------------------------------ Aggregation -----------------------------------------
def lengths_mask(*lengths, width=0):
    """A mask with rows of `lengths` tokens, each after one masked column, padded to `width`."""
    columns = torch.arange(max(width, max(lengths) + 1))
    return (1 <= columns) & (columns <= torch.tensor(lengths)[:, None])


@every_script
@pytest.mark.parametrize("padding", [0, 10])
@pytest.mark.parametrize(
    ("rows", "max_tokens", "values"),
    [
        # sums 14 and 19: 33 / 2; means 2.8 and 1.9; 33 / 15; 33 / (2 * 10)
        ([[1.0] * 4 + [10.0], [1.0] * 9 + [10.0]], 10, (16.5, 2.35, 2.2, 1.65)),
        # sums 3 and 3: 6 / 2; means 3 and 1; 6 / 4; 6 / (2 * 4)
        ([[3.0], [1.0, 1.0, 1.0]], 4, (3.0, 2.0, 1.5, 0.75)),
        # sums 5 and 7: 12 / 2; means 1 and 7; 12 / 6; 12 / (2 * 8)
        ([[1.0] * 5, [7.0]], 8, (6.0, 4.0, 2.0, 0.75)),
    ],
)
def test_aggregations(script, rows, max_tokens, values, padding):
    mask = lengths_mask(*map(len, rows), width=1 + max(map(len, rows)) + padding)
    flat = torch.tensor([value for row in rows for value in row])
    losses = torch.zeros(mask.shape).masked_scatter(mask, flat)
    for how, value in zip(HOWS, values, strict=True):
        weights = script.loss_weights(mask, how, max_tokens)
        assert weights.shape == mask.shape and (weights[~mask] == 0).all()
        assert (losses * weights).sum().item() == pytest.approx(value, abs=1e-6)
        assert not script.loss_weights(mask & False, how, max_tokens).any()  # and not 0 / 0


def test_the_aggregation_is_the_papers_by_default():
    assert reinforce.Args().loss_aggregation == rloo.Args().loss_aggregation == "sequence-sum"
    assert ppo.Args().loss_aggregation == grpo.Args().loss_aggregation == "sequence-mean"
    assert cispo.Args().loss_aggregation == "token-mean"
    assert not hasattr(gspo.Args(), "loss_aggregation")  # with another it is not its formula


# -------------------------------- The estimator is the gradient ---------------------------------
def expected_gradient(policy, size, how, scale_by_std):
    """GRPO's expected ascent direction over all groups of `size`."""
    logprobs = policy.logprobs(padding=NAN)

    def loss(rows):
        advantages = grpo.group_advantages(policy.rewards[rows][None], scale_by_std).double()
        given = (logprobs[rows], logprobs[rows].detach(), advantages.view(-1, 1), policy.mask[rows])
        return (grpo.policy_loss(*given)[0] * grpo.loss_weights(policy.mask[rows], how, 2)).sum()

    return policy.expected_gradient(loss, size)


@pytest.mark.parametrize("size", [2, 3])
def test_without_std_the_expected_gradient_is_that_of_the_expected_reward(size):
    policy = Policy()
    # A completion is in its own baseline, so (G-1)/G of its reward is left.
    exact = (size - 1) / size * policy.exact_gradient()
    assert exact.norm() > 0.1
    near(expected_gradient(policy, size, "sequence-sum", False), exact)


def test_dividing_by_the_std_turns_the_expected_gradient():
    # Three tokens at 1/3 with the rewards 0, 1, 10. Gradient of the expected reward: p (R - mean R)
    # = (-11, -8, 19) / 9. In a group of two, (R - mean) / std is the sign of the difference:
    # expected advantages (-2/3, 0, 2/3), direction (-2, 0, 2) / 9. They are not parallel.
    policy = Policy([(0,), (1,), (2,)])
    policy.tables[0].detach().zero_()
    policy.rewards = torch.tensor([0.0, 1.0, 10.0], dtype=torch.float64)
    near(policy.exact_gradient()[:3] * 9, [-11.0, -8.0, 19.0])
    near(expected_gradient(policy, 2, "sequence-sum", True)[:3] * 9, [-2.0, 0.0, 2.0], atol=1e-5)


# -------------------------------------------- Updates -------------------------------------------
# The last group is uniform. Not centred, so that the loss is not 0: -mean = -7 / 12.
ADVANTAGES = torch.tensor([[2.0], [1.0], [-1.0], [3.0], [1.5], [-0.5], [2.0], [-1.0]] + [[0.0]] * 4)


@pytest.fixture
def passes(monkeypatch):
    """The numbers of rows of the forward passes."""
    rows, original = [], common.token_logprobs
    monkeypatch.setattr(common, "token_logprobs", lambda *a: rows.append(len(a[1])) or original(*a))
    return rows


def run_update(script, model, batch, optimizer=None, **flags):
    """(metrics, gradient of the first step) of one update on the batch, of unclipped norm."""
    flags = {"max_grad_norm": 1e9, "max_completion_tokens": 32, **flags}
    if script is grpo:
        flags = {"minibatches": 1, **flags}
    optimizer = optimizer or Recorder(model)
    metrics = script.update(model, optimizer, dict(batch), script.Args(**flags))
    return metrics, optimizer.gradients[0] if isinstance(optimizer, Recorder) else None


updating = pytest.mark.parametrize("script", [grpo, rloo, reinforce], ids=lambda s: s.SCRIPT)


@updating
@pytest.mark.parametrize("how", HOWS)
def test_the_gradient_is_the_formulas_whatever_the_micro_batches(
    one_process, tiny_model, tokenizer, passes, script, how
):
    # The whole batch in one plain forward pass, uniform rows included, at ratio 1.
    batch = make_batch(tiny_model, tokenizer, ADVANTAGES)
    losses, mask = -ADVANTAGES * plain_logprobs(tiny_model, batch), batch["mask"]
    length = mask.sum(1)
    values = [losses.sum(1).mean(), (losses.sum(1) / length).mean()]
    values += [losses.sum() / length.sum(), losses.sum() / (12 * 32)]
    values = dict(zip(HOWS, values, strict=True))
    expected = flat_gradient(tiny_model, values[how])
    assert expected.norm() > 0.1  # or the comparison would say little
    wide = {name: torch.nn.functional.pad(value, (0, 10)) for name, value in batch.items()}
    wide["advantages"] = ADVANTAGES
    runs = [(batch, 1, [1] * 8), (batch, 3, [3, 3, 2]), (batch, 100, [8]), (wide, 3, [3, 3, 2])]
    for given, size, sizes in runs:
        passes.clear()
        flags = {"micro_batch_size": size, "loss_aggregation": how}
        metrics, gradient = run_update(script, tiny_model, given, **flags)
        near(gradient / expected.norm(), expected / expected.norm())
        assert passes == sizes  # none for the four rows that have no advantage
        assert metrics["policy/grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-4)
        if script is not grpo:  # whose loss is -A rho, and not -A logp
            assert metrics["loss/policy"] == pytest.approx(values[how].item(), rel=1e-4)
        elif how == "sequence-mean":
            assert metrics["loss/policy"] == pytest.approx(-7 / 12, abs=1e-5)


@updating
def test_without_any_advantage_momentum_alone_moves_the_weights(
    one_process, tiny_model, tokenizer, script
):
    batch = make_batch(tiny_model, tokenizer, ADVANTAGES)
    optimizer = script.make_optimizer(tiny_model)
    optimizer.param_groups[0]["lr"] = 1e-3
    run_update(script, tiny_model, batch, optimizer)
    before = {name: weight.detach().clone() for name, weight in tiny_model.named_parameters()}
    state = {name: optimizer.state[weight] for name, weight in tiny_model.named_parameters()}
    state = {name: (s["exp_avg"].clone(), s["exp_avg_sq"].clone()) for name, s in state.items()}
    nothing = {**batch, "advantages": torch.zeros(12, 1)}
    metrics, _ = run_update(script, tiny_model, nothing, optimizer)
    assert metrics["policy/grad_norm"] == 0.0 and metrics["loss/policy"] == 0.0
    for name, weight in tiny_model.named_parameters():
        # Adam's second step with a gradient of 0: m = .9 m, v = .95 v, each over 1 - beta^2.
        m, v = 0.9 * state[name][0] / (1 - 0.9**2), 0.95 * state[name][1] / (1 - 0.95**2)
        near(weight.detach(), before[name] - 1e-3 * m / (v.sqrt() + 1e-8))
    assert not torch.equal(tiny_model.lm_head.weight, before["model.embed_tokens.weight"])


@pytest.mark.parametrize("size", [1, 3, 100])
def test_micro_batches_are_the_rows_without_needless_columns(
    one_process, tiny_model, tokenizer, size
):
    batch, asked = make_batch(tiny_model, tokenizer, ADVANTAGES), torch.tensor([11, 2, 5, 0, 7])
    seen = []
    for rows, part in grpo.micro_batches(batch, asked, size, torch.device("cpu")):
        width = part["mask"].shape[1]
        assert len(rows) <= size and part["mask"][:, -1].any()
        assert torch.equal(part["input_ids"], batch["input_ids"][rows, : width + 1])
        assert torch.equal(part["mask"], batch["mask"][rows, :width])
        assert torch.equal(part["advantages"], ADVANTAGES[rows])
        assert not batch["mask"][rows, width:].any()  # no token was cut off
        seen += rows.tolist()
    assert sorted(seen) == sorted(asked.tolist())
    logprobs, entropies = grpo.score_tokens(tiny_model, batch, grpo.Args(micro_batch_size=size))
    near(logprobs, batch["old_logprobs"], atol=1e-5)
    assert torch.equal(entropies > 0, batch["mask"]) and not logprobs.requires_grad


def test_rows_without_an_advantage_are_trained_where_the_reference_has_a_say(
    one_process, tiny_model, tokenizer, passes
):
    batch = make_batch(tiny_model, tokenizer, torch.zeros(12, 1))
    batch["ref_logprobs"] = batch["old_logprobs"] - 0.5 * batch["mask"]  # d = 0.5 everywhere
    metrics, gradient = run_update(grpo, tiny_model, batch, beta=0.1, micro_batch_size=5)
    assert passes == [5, 5, 2]
    # k3 = exp(-.5) - 1 + .5 = .10653 at each token; its gradient in logp is 1 - exp(-.5) = .39347.
    assert metrics["loss/policy"] == pytest.approx(0.010653, abs=1e-6)
    means = plain_logprobs(tiny_model, batch).sum(1) / batch["mask"].sum(1)
    expected = flat_gradient(tiny_model, 0.039347 * means.mean())
    near(gradient / expected.norm(), expected / expected.norm(), atol=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "phimoe"])
def test_checkpointing_switches_no_router_noise_on(one_process, family):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 86}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    sizes |= {"router_jitter_noise": 0.5, "input_jitter_noise": 0.5, "attention_dropout": 0.5}
    config = AutoConfig.for_model(family, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ids, mask = torch.arange(24).view(2, 12), torch.ones(2, 11, dtype=torch.bool)
    before, _ = common.token_logprobs(model.eval(), ids, mask)
    model = grpo.shard(model, torch.device("cpu"), torch.float32, checkpointing=True)
    for _ in range(2):
        near(common.token_logprobs(model, ids, mask)[0], before, atol=1e-6)
