"""How SGLang grows a draft's tree, from the chance of each choice; numpy only, any number of drafts at once.

Every depth keeps the `eagle_topk` likeliest paths, each grows `eagle_topk` children, and the ``num_draft_tokens - 1``
likeliest of all candidates are verified (``select_top_k_tokens``, ``organize_draft_results``, 0.5.16-0.5.23). What a
round accepts is on average the sum of these candidates' chances, whatever else a draft is like.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def candidates(chances: Sequence[Array]) -> list[Array]:
    """Chances of all candidates of each depth; of a depth's choices, likeliest first, given that its path holds.

    Args:
        chances: by depth, the last axis over the choices; axes before it over drafts.
    """
    found, paths = [], np.ones((*chances[0].shape[:-1], 1))
    for choices in chances:
        children = (paths[..., :, None] * choices[..., None, :]).reshape(*paths.shape[:-1], -1)
        found.append(children)
        paths = np.sort(children, axis=-1)[..., ::-1][..., : choices.shape[-1]]
    return found


def reached(grown: Sequence[Array], tokens: int) -> Array:
    """Share of verify rounds that accept at least 1, 2, … drafts of a tree of `tokens`, along the last axis.

    Args:
        grown: candidates of as many depths as the tree has steps.
        tokens: ``num_draft_tokens``.

    Raises:
        ValueError: the tree does not hold so many tokens.
    """
    chances = np.concatenate(grown, axis=-1)
    depths = np.repeat(np.arange(len(grown)), [each.shape[-1] for each in grown])
    if tokens - 1 > chances.shape[-1]:
        raise ValueError(f"a tree of these {len(grown)} steps holds {chances.shape[-1] + 1} tokens at most")
    chosen = np.argsort(-chances, axis=-1, kind="stable")[..., : tokens - 1]
    kept = np.take_along_axis(chances, chosen, axis=-1)
    return np.stack([np.where(depths[chosen] == depth, kept, 0.0).sum(-1) for depth in range(len(grown))], axis=-1)


def accepted(grown: Sequence[Array], tokens: int) -> Array:
    """Drafts accepted a round by trees of 2, 3, …, at most `tokens` tokens, along the last axis."""
    chances = np.sort(np.concatenate(grown, axis=-1), axis=-1)[..., ::-1]
    return np.cumsum(chances[..., : tokens - 1], axis=-1)
