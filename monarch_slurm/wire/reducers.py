"""How values with much memory are pickled, so that it travels beside the pickle: tensors, arrays, views of memory.

A reducer that a program has registered for one of these types (`copyreg.pickle`, or cloudpickle's table) goes first.
"""

from __future__ import annotations

import array
import ctypes
import importlib
import pickle
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from monarch_slurm.wire.memory_files import address_of, copy_memory

Reducer = Callable[[Any], Any]

_STEP_BYTES = 4 * 2**20
"""What is copied while no other thread of the interpreter can run, at most."""


class Reducers(dict[Any, Reducer]):
    """The reducers of this module, by type; for other types those of ``maps``, in this order."""

    def __init__(self, *maps: Mapping[Any, Reducer]) -> None:
        super().__init__()
        self._maps = maps
        self._torch = False
        self.own: dict[type, Reducer] = {}
        """Those of this module, which look at ``maps`` themselves."""
        self._add(memoryview, _reduce_memoryview, self._registered(memoryview))
        self._add(array.array, _reduce_array)

    def find_libraries(self) -> None:
        """Add those for libraries that have been imported meanwhile; none is imported for their sake."""
        if self._torch or (torch := sys.modules.get("torch")) is None or not hasattr(torch, "UntypedStorage"):
            return
        tensors = sys.modules.get("torch.nn.parameter"), sys.modules.get("torch.storage")
        if all(hasattr(module, name) for module, name in zip(tensors, ("Parameter", "TypedStorage"), strict=True)):
            self._torch = True
            self._add(torch.Tensor, lambda tensor: _reduce_tensor(torch, tensor))
            self._add(torch.nn.Parameter, lambda tensor: _reduce_tensor(torch, tensor))
            self._add(torch.UntypedStorage, _reduce_storage)
            self._add(torch.storage.TypedStorage, _reduce_typed_storage)

    def _add(self, kind: type, reduce: Reducer, default: Reducer | None = None) -> None:
        """Use ``reduce`` for a type as long as there is nothing else than ``default`` for it elsewhere."""

        maps = self._maps

        def choose(value: Any) -> Any:
            for there in maps:
                if kind in there:
                    return (reduce if there[kind] is default else there[kind])(value)
            return reduce(value)

        self[kind] = self.own[kind] = choose

    def _registered(self, kind: Any) -> Reducer | None:
        for there in self._maps:
            if kind in there:
                return there[kind]
        return None

    def __missing__(self, kind: Any) -> Reducer:
        registered = self._registered(kind)
        if registered is None:
            raise KeyError(kind)
        return registered


def _reduce_memoryview(view: memoryview) -> Any:
    # What arrives is bytes, as with cloudpickle.
    return (_to_bytes, (pickle.PickleBuffer(view),)) if view.contiguous else (bytes, (view.tobytes(),))


def _to_bytes(data: Any) -> bytes:
    return data if type(data) is bytes else bytes(data)


def _reduce_array(values: array.array[Any]) -> Any:
    if type(values) is not array.array or values.typecode == "u" or not values:
        return values.__reduce_ex__(4)
    return _to_array, (values.typecode, pickle.PickleBuffer(memoryview(values).cast("B")))


def _to_array(typecode: str, data: Any) -> array.array[Any]:
    made = array.array(typecode)
    view = memoryview(data).cast("B")
    for start in range(0, len(view), _STEP_BYTES):
        made.frombytes(view[start : start + _STEP_BYTES])
    return made


# ---- tensors: torch pickles all but the plain ones and their storages; two that share a storage do so after arrival

_view = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_WRITABLE = 0x200


def _torch() -> Any:
    # Whoever receives no tensor need not have it. While it is being imported it is among the modules, too.
    found = sys.modules.get("torch")
    return found if hasattr(found, "UntypedStorage") else importlib.import_module("torch")


def _reduce_tensor(torch: ModuleType, tensor: Any) -> Any:
    plain = (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or getattr(tensor, "has_names", bool)())
        and not (tensor.__dict__ or tensor._backward_hooks)
    )
    if not plain:
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    make = _to_tensor if type(tensor) is torch.Tensor else _to_parameter
    place = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return make, (tensor.untyped_storage(), tensor.dtype, place, tensor.requires_grad)


def _to_tensor(storage: Any, dtype: Any, place: tuple[Any, Any, Any], requires_grad: bool) -> Any:
    torch = _torch()
    tensor = torch.empty(0, dtype=dtype).set_(storage, *place)
    return tensor.requires_grad_() if requires_grad else tensor


def _to_parameter(storage: Any, dtype: Any, place: tuple[Any, Any, Any], requires_grad: bool) -> Any:
    torch = _torch()
    return torch.nn.Parameter(_to_tensor(storage, dtype, place, requires_grad=False), requires_grad)


def _reduce_storage(storage: Any) -> Any:
    device, size = storage.device, storage.nbytes()
    if device.type != "cpu":
        return _to_device, (storage.cpu(), str(device))
    if not size:
        return _to_storage, (b"",)
    # The pickler looks at the memory at once, and holds on to the storage until it is through.
    return _to_storage, (pickle.PickleBuffer(_view(storage.data_ptr(), size, _WRITABLE)),)


def _reduce_typed_storage(storage: Any) -> Any:
    return _to_typed_storage, (storage._untyped_storage, storage.dtype)


def _to_typed_storage(storage: Any, dtype: Any) -> Any:
    torch = _torch()
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _to_storage(data: Any) -> Any:
    torch = _torch()
    view = memoryview(data)
    if isinstance(data, memoryview) and not view.readonly:
        return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
    made = torch.UntypedStorage(view.nbytes)
    if view.nbytes:
        with address_of(view) as source:
            copy_memory(made.data_ptr(), source, view.nbytes)
    return made


def _to_device(storage: Any, device: str) -> Any:
    torch = _torch()
    try:
        return torch.UntypedStorage(storage.nbytes(), device=device).copy_(storage)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RuntimeError(
            f"a tensor of the device {device} was sent here, and this process cannot have one there: {error}. Send "
            "tensor.cpu(), or a monarch_slurm.rdma.RDMABuffer, which leaves the data where it is until it is read"
        ) from error
