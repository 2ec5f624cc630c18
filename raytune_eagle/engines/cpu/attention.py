# mypy: ignore-errors
"""``sgl_kernel``'s operations of attention, in plain torch; the long argument lists are its own (0.5.20)."""

from __future__ import annotations

from raytune_eagle.engines.cpu.speculative import in_rows


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
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(-1, 1, 1).expand(heads, scores.shape[1], 1)
        probs = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    else:
        probs = torch.softmax(scores, dim=-1)
    return torch.matmul(probs, vf).transpose(0, 1)


def without_scales(op, at):
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
    for i, (r, s) in enumerate(in_rows(req_pool_indices, seq_lens)):
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
    for r, s, n, start in in_rows(req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc):
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
