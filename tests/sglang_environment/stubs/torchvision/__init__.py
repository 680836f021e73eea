"""Stands in for torchvision while sglang is imported; a text model calls none of it.

Owns nothing but names: every submodule can be imported, every capitalised name is an empty class, and every
other name is a function that says what was called.
"""

import importlib.abc
import importlib.machinery
import sys

__version__ = "0.0.0"
__path__ = []


class _Missing(type):
    """Classes whose attributes are their own names, so that constants can be read at import."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def _names_of(module):
    def find(name):
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{module}.{name}"
        if full in sys.modules:
            return sys.modules[full]
        if name[0].isupper():
            return _Missing(name, (), {})

        def call(*args, **kwargs):
            raise NotImplementedError(f"{full}: torchvision is not installed in this environment")

        return call

    return find


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__getattr__ = _names_of(module.__name__)


sys.meta_path.insert(0, _Submodules())
__getattr__ = _names_of("torchvision")
