"""When kernels may serve, and when plain paths must."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def eager(*tensors: Tensor) -> bool:
    """Whether kernels may serve: plain tensors on a CPU, and nothing that records, compiles or transforms."""
    if torch.compiler.is_compiling() or not (_undisturbed() if _settled.choice is None else _settled.choice[0]):
        return False
    for tensor in tensors:
        if type(tensor) not in _PLAIN or not tensor.is_cpu or torch._C._functorch.is_legacy_batchedtensor(tensor):
            return False
    return True


_PLAIN = (Tensor, nn.Parameter)


def _undisturbed() -> bool:
    if torch._C._is_tracing() or is_in_torch_dispatch_mode() or torch._C._len_torch_function_stack():
        return False
    return not _transforming()


def transformed() -> bool:
    """Whether ``torch.func`` or forward-mode derivatives are at work, which PyTorch's fused attention knows in part."""
    if not torch.compiler.is_compiling() and _settled.choice is not None:
        return _settled.choice[1]
    return _transforming()


def _transforming() -> bool:
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


class _Settled(threading.local):
    choice: tuple[bool, bool] | None = None  # what ``_undisturbed`` and ``_transforming`` said


_settled = _Settled()


def settled(block: Callable[..., Any]) -> Callable[..., Any]:
    """A block for checkpointing: when it is run again for the gradient, maybe under other modes than the first time, it
    takes the same path, so that it keeps the same tensors. (A compiler sees to that itself, and takes no kernel.)"""
    if torch.compiler.is_compiling():
        return block
    choice = _undisturbed(), _transforming()

    def run(*given: Any, **named: Any) -> Any:
        before, _settled.choice = _settled.choice, choice
        try:
            return block(*given, **named)
        finally:
            _settled.choice = before

    return run
