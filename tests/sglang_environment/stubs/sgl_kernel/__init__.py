"""Stands in for sgl_kernel, which has no build for CPUs on package indexes; a dense model with torch's attention
calls none of it. Every name is a function that says what was called.
"""

__version__ = "0.4.10"  # sglang compares it with the least it takes


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def call(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}: there are no CPU kernels in this environment")

    return call
