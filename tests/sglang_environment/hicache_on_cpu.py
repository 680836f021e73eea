"""Starts SGLang's server with HiCache on CPU: what HiCache calls of CUDA, and would compile, is plain Python here.

It is also the main module of the processes that the server starts, which is how they get the same. A "device" of CPU
memory is copied from and to by torch, at once. Keys of pages are hashes of tokens as SGLang's own extension makes them;
what seeds them (extra_key) is SGLang's code.
"""

import hashlib
import runpy
from array import array
from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.cpp_utils import native_hash
from sglang.srt.mem_cache.pool_host import common, mha


def to_host(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Of the device's buffers (all layers of the keys, then all of the values) into pages that hold every layer."""
    pages = dst_indices.long()[::page_size] // page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        kind, layer = divmod(number, layers)
        rows = source[src_indices.long()]
        dst_ptrs[kind][pages, layer] = rows.reshape(len(pages), page_size, *rows.shape[1:])


def to_device(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer of keys and values, back."""
    pages = src_indices.long()[::page_size] // page_size
    for source, destination in zip(src_ptrs, dst_ptrs, strict=True):
        destination[dst_indices.long()] = source[pages, layer_id].reshape(-1, *destination.shape[1:])


def get_hash(
    tokens: array, count: int, width: int, bigram: bool, prior: bytes | None, page_size: int | None
) -> str | list[str]:
    """A chain of SHA-256, one a page; without pages one of all tokens."""
    assert width == 1 and not bigram, "only the tokens of plain language models"
    digest, hashes = prior or b"", []
    for start in range(0, count, page_size or max(count, 1)):
        page = tokens[start : min(start + page_size, count) if page_size else count]
        digest = hashlib.sha256(digest + array("I", page).tobytes()).digest()
        hashes.append(digest.hex())
    return hashes if page_size else hashes[0]


mha.transfer_kv_all_layer_direct_lf_pf = to_host
mha.transfer_kv_per_layer_direct_pf_lf = to_device
common._cuda_host_register = lambda *arguments: None
native_hash._load_native_hash_module = lambda: SimpleNamespace(get_hash=get_hash)

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
