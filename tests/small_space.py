"""A space small enough to count by hand."""

import functools

import yaml

from raytune_eagle import specfile
from raytune_eagle.space import Space


@functools.cache
def space(text):
    """It is only read: the same for the same text."""
    return Space(specfile.parse(yaml.safe_load(text)))


SMALL = """
name: s
engine: {model: /m, draft: [/d1, /d2], args: {tp-size: 8}}
space:
  speculative: {num_steps: {int: [1, 3]}, eagle_topk: [1, 2], num_draft_tokens: {int: [2, 6]}}
  nccl: {NCCL_PROTO: [Simple, LL], NCCL_BUFFSIZE: [1048576, 16777216]}
  args: {disable-custom-all-reduce: [true, false], page-size: [null, 16]}
"""

CUSTOM = SMALL.replace("disable-custom-all-reduce: [true, false], ", "")
