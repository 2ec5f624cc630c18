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

from raytune_eagle.engines.cpu import attention, speculative
from raytune_eagle.engines.cpu.inert import InertFinder

_OPS = {
    f.__name__: f
    for f in (
        speculative.assign_req_to_token_pool_cpu,
        speculative.assign_extend_cache_locs_cpu,
        speculative.assign_draft_cache_locs_contiguous_cpu,
        speculative.build_draft_decode_metadata_cpu,
        speculative.build_tree_kernel_efficient_cpu,
        speculative.verify_tree_greedy_cpu,
        speculative.fill_accept_out_cache_loc_cpu,
        speculative.fill_bonus_tokens_cpu,
        speculative.copy_all_layer_kv_cache_cpu,
        attention.without_scales(attention.decode_attention_cpu, 3),
        attention.without_scales(attention.extend_attention_cpu, 6),
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
    sys.meta_path.append(InertFinder(*(n for n in ("triton", "torchvision") if not importlib.util.find_spec(n))))
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
