"""What an update of grpo.py takes on each GPU, by simulation: no GPU and no download is needed.

    python benchmarks/memory.py                      # the README's table
    python benchmarks/memory.py Qwen2.5-0.5B 1       # one model, on so many GPUs

grpo.py's own shard, make_optimizer and update run on tensors that have a shape, a type and a device
but no memory (torch's FakeTensorMode), in a process group that only says it is one of many (torch's
"fake" backend). Counted is what lives at a time, to the byte: weights, optimizer, gradients, what
autograd saves, what FSDP gathers. The micro-batch is 8 rows of 1,024 tokens, all of them trained,
on top of the gradients of one before. Not counted: CUDA's context and NCCL's buffers (1 to 2 GiB),
and what the allocator loses between blocks.

The device stands for a GPU and is registered from Python, for without a GPU most builds of torch
know none that autograd and FSDP would take. Attention is what CUDA's flash kernel allocates.
"""

import gc
import os
import sys
import weakref
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # or the fake backend is warned about

import torch
import torch.distributed as dist
import transformers.masking_utils
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

import grpo

aten = torch.ops.aten


def shape(kind, hidden, intermediate, layers, heads, kv_heads, words=151_936, **others):
    """A configuration of these sizes; its embeddings are tied unless `others` says no."""
    return kind(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=words,
        **{"tie_word_embeddings": True, **others},
    )


MODELS = {
    "Qwen2.5-0.5B": shape(Qwen2Config, 896, 4864, 24, 14, 2),
    "Qwen3-0.6B": shape(Qwen3Config, 1024, 3072, 28, 16, 8, head_dim=128),
    "Qwen2.5-1.5B": shape(Qwen2Config, 1536, 8960, 28, 12, 2),
    "Qwen3-1.7B": shape(Qwen3Config, 2048, 6144, 28, 16, 8, head_dim=128),
    "Qwen2.5-7B": shape(Qwen2Config, 3584, 18_944, 28, 28, 4, 152_064, tie_word_embeddings=False),
    "tiny": shape(Qwen2Config, 128, 512, 2, 2, 1, 4096),
}


# ------------------------------------------ The device ------------------------------------------
class Idle:
    """The device's streams and events, and torch's module of it: there is nothing to wait for."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: Idle()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def is_available(self):
        return True

    is_initialized = is_available

    def current_device(self):
        return 0

    def device_count(self):
        return 1

    def _is_in_bad_fork(self):
        return False


def attention(query, key, value, attn_mask=None, dropout_p=0.0, scale=None, is_causal=True, **_):
    """scaled_dot_product_attention as CUDA has it for causal attention without a mask: flash."""
    if attn_mask is not None or not is_causal:
        raise NotImplementedError("only causal attention without a mask is simulated")
    flash = aten._scaled_dot_product_flash_attention
    return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]


class Storages(TorchDispatchMode):
    """Counts the bytes of the storages that live: now (`live`) and at most (`peak`).

    With `fake`, a FakeTensorMode: of its tensors, which the operations on them and those that
    create on the device "sim" return. Else: of all tensors.
    """

    def __init__(self, fake=None):
        super().__init__()
        self.fake, self.sizes, self.live, self.peak = fake, {}, 0, 0

    def note(self, storage, size):
        key = storage._cdata
        if key not in self.sizes:
            weakref.finalize(storage, self.forget, key)
        self.live += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        self.peak = max(self.peak, self.live)

    def forget(self, key):
        self.live -= self.sizes.pop(key)

    def __enter__(self):
        resize = torch.UntypedStorage.resize_  # by which FSDP frees what it gathered

        def noted(storage, size):
            if storage._cdata in self.sizes:
                self.note(storage, size)
            return resize(storage, size)

        self.patch = mock.patch.object(torch.UntypedStorage, "resize_", noted)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.patch.stop()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back here with the tensors inside
        if self.fake:
            result = self.simulate(function, types, args, kwargs)
        else:
            result = function(*args, **kwargs)
        for tensor in tree_leaves(result):
            if getattr(tensor, "fake_mode", None) is self.fake and torch.is_tensor(tensor):
                self.note(tensor.untyped_storage(), tensor.untyped_storage().nbytes())
        return result

    def simulate(self, function, types, args, kwargs):
        leaves = []
        for value in (*args, *kwargs.values()):
            leaves += value if isinstance(value, list | tuple) else [value]
        on_device = any(isinstance(x, torch.device) and x.type == "sim" for x in leaves)
        mine = any(getattr(x, "fake_mode", None) is self.fake for x in leaves)
        other = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)  # DTensor's own
        if other is not None or not (mine or on_device):
            return function(*args, **kwargs)
        if function is aten._local_scalar_dense.default:  # .item()
            return 0.0
        if function is aten._to_copy.default and not isinstance(args[0], FakeTensor):
            dtype = kwargs.get("dtype") or args[0].dtype  # from the CPU, where tensors are real
            return self.create(args[0].shape, dtype)
        if function is aten.index.Tensor and args[1][0].dtype == torch.bool:
            index = self.create([args[1][0].numel()], torch.long)  # the mask is true everywhere
            args = args[0], [index] * args[1][0].ndim
        result = self.fake.dispatch(function, types, args, kwargs)
        if function is aten._to_copy.default and result.device.type == "cpu":
            return torch.zeros(result.shape, dtype=result.dtype)
        return result

    def create(self, size, dtype):
        options = {"dtype": dtype, "device": torch.device("sim", 0)}
        return self.fake.dispatch(aten.empty.memory_format, (), (list(size),), options)


@contextmanager
def simulation(processes):
    """Storages of a device "sim", on the first of so many processes."""
    if not hasattr(torch, "sim"):
        _setup_privateuseone_for_python_backend(rename="sim", backend_module=Idle())
        # One kernel on CUDA; without an own one a device would compute it by parts.
        torch.library.impl("aten::silu_backward", "PrivateUse1", lambda *args: None)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    storages = Storages(fake)
    backend, store = "cpu:fake,sim:fake", FakeStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=processes)
    packed = mock.patch.object(transformers.masking_utils, "find_packed_sequence_indices")
    flash = mock.patch("torch.nn.functional.scaled_dot_product_attention", attention)
    try:
        with packed as find, flash, storages:
            find.return_value = None  # rows are not packed
            yield storages
    finally:
        dist.destroy_process_group()


# ------------------------------------------ The update ------------------------------------------
def make_batch(rows, length):
    """What grpo.py trains on: rows of random tokens, every one but the first is trained."""
    batch = {"input_ids": torch.randint(100, (rows, length))}
    batch["mask"] = torch.ones(rows, length - 1, dtype=torch.bool)
    for name in ("old_logprobs", "engine_logprobs"):
        batch[name] = torch.zeros(rows, length - 1)
    return batch | {"advantages": torch.ones(rows, 1)}


def learn(model, device, dtype, checkpointing, rows, length, storages):
    """grpo.py's update of a model, on top of an earlier micro-batch's gradients. Returns the bytes
    of weights and optimizer, and the most at a time."""
    model = grpo.shard(model, device, dtype, checkpointing)
    optimizer = grpo.make_optimizer(model)
    optimizer.param_groups[0]["fused"] = True
    gc.collect()
    state = storages.live
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    batch = make_batch(rows * dist.get_world_size(), length)
    storages.peak = storages.live
    args = grpo.Args(minibatches=1, micro_batch_size=rows, gradient_checkpointing=checkpointing)
    grpo.update(model, optimizer, batch, args)
    return state, storages.peak


def simulate(config, processes, checkpointing=False, rows=8, length=1024, dtype=torch.bfloat16):
    """(bytes of weights and optimizer, most bytes at a time in an update) on each GPU."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with simulation(processes) as storages:
        with storages.fake:
            model.to_empty(device="sim:0").tie_weights()
        model.to = lambda device: model  # it is there, and such tensors refuse to be swapped
        for tensor in [*model.parameters(), *model.buffers()]:
            storages.note(tensor.untyped_storage(), tensor.untyped_storage().nbytes())
        return learn(model, torch.device("sim", 0), dtype, checkpointing, rows, length, storages)


def row(name, processes):
    """A row of the table. While vLLM samples, weights and optimizer are kept, and its copy of the
    weights, in bfloat16, is there besides."""
    with torch.device("meta"):
        count = AutoModelForCausalLM.from_config(MODELS[name]).num_parameters()
    state, update = simulate(MODELS[name], processes)
    _, checkpointed = simulate(MODELS[name], processes, checkpointing=True)
    sizes = [update, checkpointed, state, state + 2 * count]
    cells = " | ".join(f"{size / 2**30:.1f}" for size in sizes)
    return f"| {name} | {count / 1e9:.2f} B | {processes} | {cells} |"


def main():
    wanted = [(sys.argv[1], int(sys.argv[2]))] if len(sys.argv) > 2 else []
    print("| model | parameters | GPUs | update | with checkpointing | kept | and vLLM's copy |")
    print("|---" * 7 + "|")
    for name, processes in wanted or [(name, n) for name in list(MODELS)[:-1] for n in (1, 2, 8)]:
        print(row(name, processes), flush=True)


if __name__ == "__main__":
    main()
