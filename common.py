"""Tokenisation and log-probabilities: what the six scripts share, and nothing of a run.

Shapes: input_ids (B, T), padded on the right, where with causal attention no real token sees it.
All else per token is (B, T-1), and column t is about `input_ids[:, t + 1]`. The mask is bool, true
exactly on the tokens of the completion, its stop token included. Log-probs are in nats, float32.
"""

import math
from functools import partial

import torch
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import AutoTokenizer, GenerationConfig


# ------------------------------------------- Tokens -------------------------------------------
def load_tokenizer(name):
    """The tokenizer of a folder or hub name, with a padding token set.

    Nothing is masked by token id, so a padding token that equals EOS hides no EOS from the loss.
    Raises ValueError where the tokenizer has no EOS, and what transformers raises.
    """
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {name} has no EOS token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def encode_prompt(tokenizer, prompt):
    """Token ids (a list) of a prompt: a string, or chat messages `[{"role": …, "content": …}]`.

    With a chat template a string becomes one user message, the template is applied once, and the
    assistant's header is added. Without one a string gets the special tokens that the tokenizer
    puts before a text. It begins with one BOS at most, and none that the template does not write.
    A content is text or a list of parts `{"type": "text", "text": …}`. Raises ValueError for other
    parts, for messages without a template, and for text that has no UTF-8 form.
    """
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if tokenizer.chat_template is None:
        if not isinstance(prompt, str):
            raise ValueError("chat messages need a tokenizer with a chat template")
        prompt.encode()  # a lone surrogate raises here, and not in the tokenizer
        added = tokenizer("")["input_ids"]
        if added[-1:] == [eos] and added != [bos]:  # it would end the text before the completion
            added = added[:-1]
        ids = added + tokenizer(prompt, add_special_tokens=False)["input_ids"]
        while bos is not None and ids[:2] == [bos, bos]:  # the text had one already
            ids = ids[1:]
        return ids
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    cleaned = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            others = {part.get("type") for part in content} - {"text"}
            if others:
                raise ValueError(f"the prompt has a part of the type {sorted(map(str, others))[0]}")
            content = "".join(part["text"] for part in content)
        while tokenizer.bos_token and content.lstrip().startswith(tokenizer.bos_token):
            content = content.lstrip().removeprefix(tokenizer.bos_token).lstrip()
        content.encode()
        cleaned.append({**message, "content": content})
    text = tokenizer.apply_chat_template(
        cleaned,
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,  # Qwen3's: it answers at once; other templates do not look at it
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def stop_token_ids(tokenizer, generation_config):
    """The set of ids that end a completion: the tokenizer's EOS and the generation config's."""
    listed = generation_config.eos_token_id
    listed = listed if isinstance(listed, list) else [listed]
    return {tokenizer.eos_token_id, *listed} - {None}


def truncate_at_stop(ids, stop_ids):
    """(the ids up to and with the first stop token, whether there was one)."""
    for i, token in enumerate(ids):
        if token in stop_ids:
            return ids[: i + 1], True
    return ids, False


def collate(prompts, completions, pad_id):
    """(input_ids (B, T), mask (B, T-1)) of B lists of prompt ids and B lists of completion ids."""
    rows = [torch.tensor(p + c) for p, c in zip(prompts, completions, strict=True)]
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id)
    column = torch.arange(1, input_ids.shape[1])  # of the token that is scored
    start = torch.tensor([len(prompt) for prompt in prompts])[:, None]
    end = torch.tensor([len(row) for row in rows])[:, None]
    return input_ids, (start <= column) & (column < end)


# --------------------------------------- Log-probabilities ---------------------------------------
def token_logprobs(model, input_ids, mask, temperature=1.0, chunk_size=512):
    """(log-probs of the completion tokens, entropies of their distributions), 0 where mask is 0.

    The distribution is softmax(logits / temperature), the one sampled from. The logits of a batch
    never exist at once: the head runs over `chunk_size` completion positions at a time, in float32
    from the logits on, and again in the backward pass. Both outputs are differentiable.
    input_ids (B, T); mask and outputs (B, T-1). Raises ValueError unless temperature > 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0 to score samples, not {temperature}")
    if isinstance(model, FSDPModule) and not hasattr(model, "score_tokens"):
        # Parts of the model are called, not its forward: FSDP must gather the weights all the same.
        model.score_tokens = partial(_token_logprobs, model)
        register_fsdp_forward_method(model, "score_tokens")
    score = getattr(model, "score_tokens", partial(_token_logprobs, model))
    return score(input_ids, mask, temperature, chunk_size)


def _token_logprobs(model, input_ids, mask, temperature, chunk_size):
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
    hidden, targets = hidden[mask], input_ids[:, 1:][mask]
    head = model.get_output_embeddings()
    weight, bias = head.weight, getattr(head, "bias", None)
    values = _Head.apply(hidden, weight, bias, targets, temperature, chunk_size, model)
    empty = torch.zeros(mask.shape, device=mask.device)
    return tuple(empty.masked_scatter(mask, value) for value in values)


class _Head(torch.autograd.Function):
    """(log-probs, entropies), both (N,), of targets (N,) at hidden states (N, H). It equals

        logp = (model_logits(model, hidden, weight, bias) / temperature).log_softmax(-1)
        logprobs = logp.gather(-1, targets[:, None])[:, 0]
        entropies = -(logp.exp() * logp).sum(-1)

    by chunks, in a fifth of the memory. With p = softmax(z), z = logits / temperature and H the
    entropy: d log p_y / dz = onehot(y) - p and dH / dz = -p (log p + H). A chunk's logits are the
    largest tensors there are, so this is done in place, and the head's gradient is added up in
    one tensor: autograd would make one for each chunk.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, chunk_size, model):
        logprobs, entropies = [], []
        for h, y in zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True):
            z = model_logits(model, h, weight, bias).div_(temperature)
            z -= z.amax(-1, keepdim=True)
            p = z.exp()
            total = p.sum(-1)
            logprobs.append(z.gather(-1, y[:, None])[:, 0] - total.log())
            entropies.append(total.log() - p.mul_(z).sum(-1) / total)
        logprobs, entropies = torch.cat(logprobs), torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, bias, targets, entropies)
        ctx.settings = temperature, chunk_size, model
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, d_logprobs, d_entropies):
        hidden, weight, bias, targets, entropies = ctx.saved_tensors
        temperature, chunk_size, model = ctx.settings
        scale, cap = logit_transform(model)
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32)  # a sum over the chunks
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        if d_logprobs is None:
            d_logprobs = torch.zeros_like(entropies)
        for start in range(0, len(targets), chunk_size):
            rows = slice(start, start + chunk_size)
            z = model_logits(model, hidden[rows], weight, bias)
            slope = 1 - (z / cap) ** 2 if cap else 1.0
            z.div_(temperature).sub_(z.amax(-1, keepdim=True))
            p = z.exp()
            total = p.sum(-1, keepdim=True)
            p /= total
            d = d_logprobs[rows, None]
            if d_entropies is None:
                z = p.mul_(-d)
            else:
                z.sub_(total.log()).add_(entropies[rows, None]).mul_(-d_entropies[rows, None])
                z.sub_(d).mul_(p)
            z.scatter_add_(1, targets[rows, None], d)
            z = z.mul_(slope).mul_(scale / temperature).to(weight.dtype)
            d_hidden[rows] = z @ weight
            if weight.dtype == torch.float32:
                d_weight.addmm_(z.T, hidden[rows])
            else:
                d_weight += z.T @ hidden[rows]
            if bias is not None:
                d_bias += z.sum(0)
        d_bias = None if bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight.to(weight.dtype), d_bias, None, None, None, None


def logit_transform(model):
    """(scale, cap) of logits = cap tanh(scale head(hidden) / cap); cap None where there is none."""
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    scale = scale / (getattr(config, "logits_scaling", None) or 1.0)  # Granite
    return scale, getattr(config, "final_logit_softcapping", None)  # Gemma


def model_logits(model, hidden, weight, bias):
    """Float32 logits (N, V) of hidden states (N, H), scaled or capped as by the model's forward."""
    scale, cap = logit_transform(model)
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    logits = logits.mul_(scale) if scale != 1 else logits
    return logits.div_(cap).tanh_().mul_(cap) if cap else logits


@torch.no_grad()
def check_logits(model):
    """Raises ValueError where `model_logits` is not what the model's own forward computes."""
    input_ids = torch.arange(4, device=model.device)[None]
    own = model(input_ids=input_ids, use_cache=False).logits[0].float()
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[0]
    head = model.get_output_embeddings()
    ours = model_logits(model, hidden, head.weight, getattr(head, "bias", None))
    if not torch.allclose(ours, own, rtol=1e-3, atol=1e-3):
        kind = type(model).__name__
        raise ValueError(f"{kind} is not supported: its logits are not those of model_logits")


def bounded_exp(x, most=20.0):
    """exp(x) up to `most`, and from there on its tangent: no difference of two log-probs makes it,
    or its gradient, infinite, and the gradient keeps its direction. Any shape."""
    inside = x.clamp(max=most)
    return inside.exp() * (1 + x - inside)


def kl_estimate(logprobs, ref_logprobs, kind):
    """Per-token estimate of KL(π ‖ ref) from samples of π, in nats, the shape of the inputs.

    With d = logprobs − ref_logprobs: k1 = d, k2 = d²/2, k3 = exp(−d) − 1 + d (Schulman,
    "Approximating KL divergence", 2020). In the reward, k1 is the unbiased one. As a loss k2 has
    the KL's own gradient; k3's is near it near the reference alone, and k1's has the mean zero.
    Raises ValueError for another kind.
    """
    difference = logprobs - ref_logprobs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference**2 / 2
    if kind == "k3":
        return bounded_exp(-difference) - 1 + difference
    raise ValueError(f"the KL estimator is k1, k2 or k3, not {kind}")


def rollout_correction(old_logprobs, rollout_logprobs, mask, cap):
    """Truncated importance weights min(π_trainer / π_engine, cap), detached, 0 where mask is 0.

    The engine computes with other kernels, on a GPU in another precision, than the trainer: its
    samples come from a slightly different policy, and the weight corrects for that (Yao et al.,
    "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025). All (B, T-1).
    """
    log_ratio = torch.where(mask, old_logprobs - rollout_logprobs, 0.0).detach()
    return log_ratio.clamp(max=math.log(cap)).exp() * mask


@torch.no_grad()
def sample(model, prompts, seeds, temperature, max_tokens, stop_ids):
    """[(completion, log-probs)] of B lists of prompt ids, by transformers' `generate`.

    A completion is a list of ids up to and with its first stop token; its log-probs are those of
    the distribution sampled from. A row's tokens are chosen by random numbers of its own seed, so
    no other row changes them. Temperature 0 is greedy. The checkpoint's settings do not leak in.
    """
    size, done = max(1, 32_768 // (max(map(len, prompts), default=0) + max_tokens)), []
    for start in range(0, len(prompts), size):
        part = slice(start, start + size)
        done += _sample(model, prompts[part], seeds[part], temperature, max_tokens, stop_ids)
    return done


def _sample(model, prompts, seeds, temperature, max_tokens, stop_ids):
    width = max(map(len, prompts))
    ids = [[min(stop_ids)] * (width - len(prompt)) + prompt for prompt in prompts]
    real = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    own = [torch.Generator().manual_seed(seed) for seed in seeds]
    uniform = [torch.rand(max_tokens, generator=g, dtype=torch.float64) for g in own]
    uniform = torch.stack(uniform).to(model.device)
    chosen_logprobs = []

    def choose(ids, logits):
        """Leaves one token a row: where the distribution function exceeds its uniform number."""
        logprobs = (logits.float() / (temperature or 1.0)).log_softmax(-1)
        cumulative = logprobs.double().exp().cumsum(-1)
        bound = uniform[:, len(chosen_logprobs), None] * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, bound, right=True)
        token = drawn if temperature else logprobs.argmax(-1, keepdim=True)
        chosen_logprobs.append(logprobs.gather(1, token))
        return torch.full_like(logits, -math.inf).scatter(1, token, 0.0)

    model.generation_config = GenerationConfig(
        max_new_tokens=max_tokens, eos_token_id=sorted(stop_ids), pad_token_id=min(stop_ids)
    )
    ids, real = torch.tensor([ids, real], device=model.device)
    rows = model.generate(ids, attention_mask=real, logits_processor=[choose])[:, width:].tolist()
    logprobs = torch.cat(chosen_logprobs, 1).tolist()
    completions = [truncate_at_stop(row, stop_ids)[0] for row in rows]
    return [(row, kept[: len(row)]) for row, kept in zip(completions, logprobs, strict=True)]
