# mypy: ignore-errors
"""Inert packages in the place of ``triton`` and ``torchvision``: kernels can be defined, never launched."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import types


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


class InertFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
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
