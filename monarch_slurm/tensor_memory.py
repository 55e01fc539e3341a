"""Tensors whose bytes in memory are not their values, or that have none: DTensors, fake ones, views that conjugate."""

from __future__ import annotations

from typing import Any


def check_memory(what: str, tensor: Any) -> None:
    """Refuse a strided tensor whose ``data_ptr()`` does not lead to its values.

    Args:
        what: how the message calls it: ``"the destination"``.
        tensor: on a device that has memory.

    Raises:
        ValueError: it is such a tensor; the text says what to do instead.
    """
    if tensor.is_conj():
        raise ValueError(f"{what} is a conjugated view, whose memory holds other values; use .resolve_conj()")
    if tensor.is_neg():
        raise ValueError(f"{what} is a negated view, whose memory holds other values; use .resolve_neg()")
    if tensor.numel() == 0:
        return
    try:
        storage = tensor.untyped_storage()
        is_fake = storage.device.type == "meta"
        start, size = (0, 1) if is_fake else (storage.data_ptr(), storage.nbytes())
    except (RuntimeError, NotImplementedError):  # it has no storage, or one without memory
        raise ValueError(f"{what} has no memory of its own: {_what_instead(tensor)}") from None
    if start == 0 and size:
        raise ValueError(f"{what} has no memory of its own: {_what_instead(tensor)}")
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if needed > size:
        raise ValueError(
            f"{what} reaches to byte {needed} of a storage of {size}: its memory was freed or resized. Parameters of "
            "FSDP have theirs only while they are gathered"
        )


def _what_instead(tensor: Any) -> str:
    kind = type(tensor).__name__
    if hasattr(tensor, "to_local"):
        return f"it is a {kind}; use .to_local(), this rank's part, or .full_tensor()"
    if hasattr(tensor, "fake_mode"):
        return f"it is a {kind}; use a real tensor"
    if hasattr(tensor, "__tensor_flatten__"):
        parts = ", ".join(tensor.__tensor_flatten__()[0])
        return f"a {kind} wraps other tensors; use those ({parts}), or wait for it if it is a collective's result"
    return f"a {kind} that torch.func or vmap has wrapped, or a subclass that wraps others; use the tensor inside"
