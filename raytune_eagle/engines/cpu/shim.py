# mypy: ignore-errors
"""Pure-torch stand-ins that let SGLang 0.5.20 run on any x86-64 or arm64 CPU, speculative decoding included.

SGLang has a CPU engine (``SGLANG_USE_CPU_ENGINE=1 --device cpu``) and, since 0.5.16, CPU speculative decoding, but both
import a CPU build of ``sgl_kernel``, which is on no index, and ``triton``. This module supplies

* ``triton`` and ``torchvision``: inert packages, where absent (kernels can be defined, never launched);
* ``sgl_kernel``: the handful of CPU operations that the engine calls, in plain torch (also in place of a CUDA build);
* hooks, so that the (torch-backed) ``intel_amx`` attention backend, the only CPU one with tree verify, serves without AMX.

It relies on private names of SGLang: the launcher refuses other versions, and tests/test_cpu_layer.py compares
speculative with plain decoding. Every process of the server needs it before it imports SGLang: see ``server.py``.
Nothing here is tuned: it is for tiny models.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types

NEG_INF = float("-inf")


# --------------------------------------------------------------------------
# inert triton
# --------------------------------------------------------------------------
class _Anything:
    """Stands for any triton object: attribute, call, index, launch grid, decorator."""

    def __init__(self, name="triton"):
        self.__name__ = name
        self.__qualname__ = name

    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if name == "active":  # triton.runtime.driver.active, as on a host with no GPU
            raise RuntimeError("0 active drivers ([]). There should only be one.")
        return _Anything(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        return _Anything(self.__name__ + "()")

    def __getitem__(self, item):
        return self

    def __or__(self, other):
        return self

    __ror__ = __or__

    def __iter__(self):
        return iter(())

    def __bool__(self):
        return False

    def __hash__(self):
        return hash(self.__name__)

    def __eq__(self, other):
        return self is other

    def __mro_entries__(self, bases):  # class Foo(triton.X): ...
        return (object,)


class _Kernel:
    """What ``@triton.jit`` returns: keeps the function, refuses to launch."""

    def __init__(self, fn):
        self.fn = fn
        self.__name__ = getattr(fn, "__name__", "kernel")
        self.__module__ = getattr(fn, "__module__", __name__)
        self.__doc__ = getattr(fn, "__doc__", None)

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            raise NotImplementedError(
                f"triton kernel {self.__module__}.{self.__name__} launched, "
                "but this machine has no triton (raytune_eagle.engines.cpu)"
            )

        return launch

    def __call__(self, *args, **kwargs):
        return self[None](*args, **kwargs)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name)


def _jit(fn=None, **_):
    return _Kernel(fn) if fn is not None else _Kernel


def _passthrough(*args, **kwargs):
    return lambda fn: fn


class _InertModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _Anything(f"{self.__name__}.{name}")


class _InertFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, *names):
        self.names = names

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _InertModule(spec.name)

    def exec_module(self, module):
        module.__path__ = []
        if module.__name__ == "triton":
            module.__version__ = "3.7.0"
            module.jit = _jit
            module.autotune = _passthrough
            module.heuristics = _passthrough
            module.Config = lambda *a, **k: (a, k)
            module.cdiv = lambda a, b: -(-a // b)
            module.next_power_of_2 = lambda n: 1 << max(0, (int(n) - 1).bit_length())


# --------------------------------------------------------------------------
# sgl_kernel: speculative ops
# --------------------------------------------------------------------------
def _rows(*tensors):
    return zip(*(t.tolist() for t in tensors))


def assign_req_to_token_pool_cpu(req, req_to_token, start, end, out_cache_loc, pool_len):
    at = 0
    for r, s, e in _rows(req, start, end):
        req_to_token[r, s:e] = out_cache_loc[at : at + e - s].to(req_to_token.dtype)
        at += e - s


def assign_extend_cache_locs_cpu(req, req_to_token, start, end, out_cache_loc, pool_len):
    at = 0
    for r, s, e in _rows(req, start, end):
        out_cache_loc[at : at + e - s] = req_to_token[r, s:e].to(out_cache_loc.dtype)
        at += e - s


def assign_draft_cache_locs_contiguous_cpu(req, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps):
    n = topk * num_steps
    for i, (r, s) in enumerate(_rows(req, seq_lens)):
        out_cache_loc[i * n : (i + 1) * n] = req_to_token[r, s : s + n].to(out_cache_loc.dtype)


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    """Row b*topk+k = committed prefix of request b, then candidate k's slots."""
    rows = req_to_token[req_pool_indices.long()].repeat_interleave(topk, dim=0)
    for b, s in enumerate(seq_lens.tolist()):
        for k in range(1, topk):
            src = s + k * num_steps
            rows[b * topk + k, s : s + num_steps] = rows[b * topk, src : src + num_steps]
    return rows


def build_tree_kernel_efficient_cpu(
    parent_list,
    selected_index,
    verified_seq_len,
    tree_mask,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    topk,
    depth,
    draft_token_num,
    tree_mask_mode,
):
    """Turn the selected candidates into a tree (mask, positions, child/sibling links)."""
    n = draft_token_num
    mode = int(tree_mask_mode)
    if mode not in (0, 1):
        raise NotImplementedError(f"tree mask mode {mode}")
    parents_all = parent_list.tolist()
    offset = 0
    for b, (sel, seq_len) in enumerate(zip(selected_index.tolist(), verified_seq_len.tolist())):
        where = {}
        for i, s in enumerate(sel[: n - 1]):
            where.setdefault(s, i + 1)
        parent = [0] * n  # position in the tree, -1: not selected
        for i in range(1, n):
            tb = sel[i - 1] // topk
            parent[i] = 0 if tb == 0 else where.get(parents_all[b][tb], -1)

        nxt, sib = [-1] * n, [-1] * n
        for i in range(n - 1, 0, -1):
            p = parent[i]
            if p >= 0:
                sib[i], nxt[p] = nxt[p], i
        allowed = [[False] * n for _ in range(n)]
        pos = [seq_len] * n
        for i in range(n):
            allowed[i][0] = True
            cur, steps = i, 0
            while cur > 0 and steps < depth:
                allowed[i][cur] = True
                steps += 1
                cur = parent[cur]
            pos[i] = seq_len + steps

        as_t = tree_mask.new_tensor
        retrive_index[b] = retrive_index.new_tensor(range(b * n, (b + 1) * n))
        retrive_next_token[b] = retrive_next_token.new_tensor(nxt)
        # only written where set, like the kernel (the buffer comes filled with -1)
        retrive_next_sibling[b] = retrive_next_sibling.new_tensor(sib)
        positions[b * n : (b + 1) * n] = positions.new_tensor(pos)
        block = as_t(allowed)
        if mode == 1:
            tree_mask.view(-1)[b * n * n : (b + 1) * n * n] = block.view(-1)
        else:
            width = seq_len + n
            view = tree_mask.view(-1)[offset : offset + n * width].view(n, width)
            view[:, seq_len:] = block
            offset += n * width


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Walk each tree from the root along the target model's own tokens."""
    target = target_predict.reshape(-1).tolist()
    rows = _rows(candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    depth = accept_index.shape[1]
    for b, (cand, index, nxt, sib) in enumerate(rows):
        last = index[0]
        accept_index[b, 0] = last
        accepted, cur = 0, 0
        for _ in range(1, depth):
            cur = nxt[cur]
            while cur != -1 and cand[cur] != target[last]:
                cur = sib[cur]
            if cur == -1:
                break
            predicts[last] = target[last]
            accepted += 1
            last = index[cur]
            accept_index[b, accepted] = last
        accept_token_num[b] = accepted
        predicts[last] = target[last]


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    idx = accept_index.reshape(-1)
    idx = idx[idx > -1].long()
    accept_out_cache_loc[: idx.numel()] = out_cache_loc[idx]


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    import torch

    at = torch.arange(accept_lens.numel()) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.reshape(-1)[at])


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Move KV rows inside each layer's buffer; only raw addresses are passed."""
    import ctypes

    import numpy

    if tgt_loc.numel() == 0:
        return
    tgt, src = tgt_loc.numpy(), src_loc.numpy()
    rows = int(max(tgt.max(), src.max())) + 1
    for address, stride in _rows(data_ptrs, strides):
        raw = (ctypes.c_uint8 * (rows * stride)).from_address(address)
        buffer = numpy.frombuffer(raw, dtype=numpy.uint8).reshape(rows, stride)
        buffer[tgt] = buffer[src]


# --------------------------------------------------------------------------
# sgl_kernel: attention ops
# --------------------------------------------------------------------------
def _attend(q, k, v, scale, logit_cap, mask, sinks=None):
    """q [T,H,D]; k,v [S,Hk,D]; mask [T,S] bool or None -> [T,H,Dv] (float32 math)."""
    import torch

    heads, kv_heads = q.shape[1], k.shape[1]
    qf, kf, vf = (t.float().transpose(0, 1) for t in (q, k, v))
    if heads != kv_heads:
        kf = kf.repeat_interleave(heads // kv_heads, dim=0)
        vf = vf.repeat_interleave(heads // kv_heads, dim=0)
    scores = torch.matmul(qf, kf.transpose(1, 2)) * scale
    if logit_cap and logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, NEG_INF)
    if sinks is not None:
        sink = sinks.float().view(-1, 1, 1).expand(heads, scores.shape[1], 1)
        probs = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    else:
        probs = torch.softmax(scores, dim=-1)
    return torch.matmul(probs, vf).transpose(0, 1)


def _without_scales(op, at):
    """0.5.20 inserted (k_scale, v_scale), used by fp8 KV caches only, after the caches."""

    def call(*args):
        if isinstance(args[at], float):
            args = args[:at] + args[at + 2 :]
        return op(*args)

    call.__name__ = op.__name__
    return call


def decode_attention_cpu(
    q,
    k_cache,
    v_cache,
    out,
    key,
    value,
    loc,
    attn_logits,
    req_to_token,
    req_pool_indices,
    seq_lens,
    scale,
    logit_cap,
    is_cross_attn=False,
    sliding_window=0,
    encoder_lens=None,
    sinks=None,
):
    if key is not None and value is not None and not is_cross_attn:
        k_cache[loc] = key.view(-1, *k_cache.shape[1:]).to(k_cache.dtype)
        v_cache[loc] = value.view(-1, *v_cache.shape[1:]).to(v_cache.dtype)
    for i, (r, s) in enumerate(_rows(req_pool_indices, seq_lens)):
        lo = max(0, s - sliding_window) if sliding_window > 0 else 0
        slots = req_to_token[r, lo:s].long()
        out[i : i + 1] = _attend(q[i : i + 1], k_cache[slots], v_cache[slots], scale, logit_cap, None, sinks).to(
            out.dtype
        )


def extend_attention_cpu(
    q,
    key,
    value,
    out,
    k_cache,
    v_cache,
    req_to_token,
    req_pool_indices,
    seq_lens,
    extend_seq_lens,
    extend_start_loc,
    max_len_extend,
    scale,
    logit_cap,
    is_cross_attn=False,
    sliding_window=0,
    encoder_lens=None,
    sinks=None,
    tree_mask=None,
    is_causal=True,
):
    """The backend has stored K/V in the cache already, so read them all from there."""
    import torch

    flat = tree_mask.reshape(-1) if tree_mask is not None else None
    at = 0
    for r, s, n, start in _rows(req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc):
        slots = req_to_token[r, :s].long()
        mask = None
        if is_causal:
            k_pos = torch.arange(s)
            q_pos = torch.arange(s - n, s).unsqueeze(1)
            mask = k_pos <= q_pos
            if sliding_window > 0:
                mask &= k_pos > q_pos - sliding_window
            if flat is not None:
                mask[:, s - n :] = flat[at : at + n * n].view(n, n)
                at += n * n
        out[start : start + n] = _attend(
            q[start : start + n], k_cache[slots], v_cache[slots], scale, logit_cap, mask, sinks
        ).to(out.dtype)


# --------------------------------------------------------------------------
# module plumbing
# --------------------------------------------------------------------------
_OPS = {
    f.__name__: f
    for f in (
        assign_req_to_token_pool_cpu,
        assign_extend_cache_locs_cpu,
        assign_draft_cache_locs_contiguous_cpu,
        build_draft_decode_metadata_cpu,
        build_tree_kernel_efficient_cpu,
        verify_tree_greedy_cpu,
        fill_accept_out_cache_loc_cpu,
        fill_bonus_tokens_cpu,
        copy_all_layer_kv_cache_cpu,
        _without_scales(decode_attention_cpu, 3),
        _without_scales(extend_attention_cpu, 6),
    )
}


def _missing_op(name):
    """Module ``__getattr__``: CPU ops import fine and fail on use; the rest is absent."""
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is not covered by raytune_eagle.engines.cpu")

    return missing


class _KernelFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "sgl_kernel":
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__path__ = []
        module.__version__ = "0.0.0+torch"
        module.__dict__.update(_OPS, __getattr__=_missing_op)
        import torch

        ns = torch.ops.sgl_kernel
        for name in ("decode_attention_cpu", "extend_attention_cpu"):
            setattr(ns, name, _OPS[name])


class _AfterImport(importlib.abc.MetaPathFinder):
    """Run a callback on a module right after it is first executed."""

    def __init__(self, hooks):
        self.hooks = dict(hooks)

    def find_spec(self, fullname, path=None, target=None):
        hook = self.hooks.pop(fullname, None)
        if hook is None:
            return None
        spec = importlib.util.find_spec(fullname)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            hook(module)

        spec.loader.exec_module = exec_module
        return spec


def _hook_registry(module):
    module.ATTENTION_BACKENDS["torch_native"] = module.ATTENTION_BACKENDS["intel_amx"]


def _hook_draft_utils(module):
    original = module.DraftBackendFactory._create_backend

    def _create_backend(self, name, backend_map, *args, **kwargs):
        backend_map = dict(backend_map, torch_native=backend_map["intel_amx"])
        return original(self, name, backend_map, *args, **kwargs)

    module.DraftBackendFactory._create_backend = _create_backend


def _hook_transformers(module):
    module.is_torchvision_available = lambda: False
    module.is_torchvision_v2_available = lambda: False
    module.is_torchvision_greater_or_equal = lambda *a, **k: False


def install() -> None:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    sys.meta_path.append(_InertFinder(*(n for n in ("triton", "torchvision") if not importlib.util.find_spec(n))))
    sys.meta_path.insert(0, _KernelFinder())  # first: a build for CUDA, where there is one, cannot be imported here
    sys.meta_path.insert(
        0,
        _AfterImport(
            {
                "transformers.utils.import_utils": _hook_transformers,
                "sglang.srt.layers.attention.attention_registry": _hook_registry,
                "sglang.srt.speculative.draft_utils": _hook_draft_utils,
            }
        ),
    )
