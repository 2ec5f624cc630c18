"""What the fake server generates: tokens that depend on the prompt alone, accepted in rounds of varying length."""

from __future__ import annotations

import hashlib


def digest(text):
    """Bytes that depend on the text alone."""
    return hashlib.blake2s(text.encode()).digest()


def words(prompt, count, kind=""):
    """The first tokens of the answer to a prompt: as they are, ``garble``: other ones, or ``loop``: one of them."""
    seed = digest(kind + prompt if kind == "garble" else prompt)
    return [(seed[i % 32 if kind != "loop" else 0] * 7 + (i if kind != "loop" else 0)) % 997 for i in range(count)]


def rounds(prompt, count, steps, most=1 << 30):
    """Accepted draft tokens per verify round, until `count` tokens are there; the first comes with the prompt."""
    left, seed = count - 1, digest(prompt)[0]
    while left > 0:
        seed = (seed * 37 + 11) % 256
        accepted = min(seed % (steps + 1), left - 1, most)
        left -= accepted + 1
        yield accepted


def state(ids, meta):
    """One chunk: everything so far."""
    text = " ".join(f"w{number}" for number in ids)
    return {"text": text, "output_ids": ids, "meta_info": {**meta, "completion_tokens": len(ids)}}


def speculative(accepted, count, steps, tokens):
    """The fields that speculation adds to the last chunk."""
    proposed, number = len(accepted) * (tokens - 1), len(accepted)
    histogram = [accepted.count(length) for length in range(steps + 1)]
    fields = {"num_correct_drafts": sum(accepted), "num_proposed_drafts": proposed, "verify_ct": number}
    fields |= {"correct_drafts_histogram": histogram, "accept_histogram": histogram}
    fields |= {"accept_rate": sum(accepted) / max(proposed, 1), "accept_length": count / max(number, 1)}
    return {f"spec_{name}": value for name, value in fields.items()}
