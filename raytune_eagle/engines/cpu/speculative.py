# mypy: ignore-errors
"""``sgl_kernel``'s operations of speculative decoding, in plain torch."""

from __future__ import annotations


def in_rows(*tensors):
    return zip(*(t.tolist() for t in tensors))


def assign_req_to_token_pool_cpu(req, req_to_token, start, end, out_cache_loc, pool_len):
    at = 0
    for r, s, e in in_rows(req, start, end):
        req_to_token[r, s:e] = out_cache_loc[at : at + e - s].to(req_to_token.dtype)
        at += e - s


def assign_extend_cache_locs_cpu(req, req_to_token, start, end, out_cache_loc, pool_len):
    at = 0
    for r, s, e in in_rows(req, start, end):
        out_cache_loc[at : at + e - s] = req_to_token[r, s:e].to(out_cache_loc.dtype)
        at += e - s


def assign_draft_cache_locs_contiguous_cpu(req, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps):
    n = topk * num_steps
    for i, (r, s) in enumerate(in_rows(req, seq_lens)):
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
    rows = in_rows(candidates, retrive_index, retrive_next_token, retrive_next_sibling)
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
    for address, stride in in_rows(data_ptrs, strides):
        raw = (ctypes.c_uint8 * (rows * stride)).from_address(address)
        buffer = numpy.frombuffer(raw, dtype=numpy.uint8).reshape(rows, stride)
        buffer[tgt] = buffer[src]
