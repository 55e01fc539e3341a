"""The state of a trainer as bytes: a snapshot of nested containers of tensors, its hash, and its form on a wire.

A *tree* here is what ``state_dict`` functions return: dicts (with text or number keys), lists and tuples of tensors,
DTensors, numbers, text, booleans and None. A snapshot replaces every tensor by a copy in host memory, and every DTensor
by a `_SHARD` dict around this rank's part of it: the state of rank r of one replica goes to rank r of another, whose
mesh it is put on again by `restore`.

On the wire a snapshot is a JSON header that describes the tree, then the tensors' bytes, end to end. Nothing is
pickled, so what a peer sends can be wrong, but it cannot run.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.train.piece_hashes import PieceHasher, pieces

_SHARD = "__shard__"
_LENGTH = struct.Struct(">Q")
_MAX_HEADER = 1 << 28


Meshes = Mapping[str, DeviceMesh]
"""Device meshes by the names of their dimensions, with commas between; the name of a mesh without names is empty."""


class StateError(MonarchSlurmError):
    """A trainer's state cannot be taken, sent or read."""


def snapshot(tree: Any) -> Any:
    """Return a copy of ``tree`` in host memory that later changes of the tensors do not reach."""
    if isinstance(tree, DTensor):
        return snapshot(_own_part(tree))
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", copy=True).contiguous()
    if isinstance(tree, dict):
        return {key: snapshot(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(snapshot(value) for value in tree)
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    raise StateError(f"a trainer's state holds a {type(tree).__name__}, which cannot be sent: give numbers or tensors")


def _own_part(tensor: DTensor) -> dict[str, Any]:
    """Return this rank's part of a sharded tensor, and what is needed to make it part of one again."""
    for placement in tensor.placements:
        if not isinstance(placement, (Shard, Replicate)):
            raise StateError(f"a trainer's state holds a tensor that is placed as {placement}, which cannot be sent")
    dims = [placement.dim if isinstance(placement, Shard) else None for placement in tensor.placements]
    shape, stride, mesh = list(tensor.shape), list(tensor.stride()), _name(tensor.device_mesh)
    return {_SHARD: tensor.to_local(), "dims": dims, "shape": shape, "stride": stride, "mesh": mesh}


def meshes_of(module: nn.Module) -> dict[str, DeviceMesh]:
    """Return the meshes that the parameters of ``module`` are on; none if they are not sharded."""
    meshes = [p.device_mesh for p in module.parameters() if isinstance(p, DTensor)]
    return {_name(mesh): mesh for mesh in meshes}


def _name(mesh: DeviceMesh) -> str:
    return ",".join(mesh.mesh_dim_names or ())


def restore(tree: Any, meshes: Meshes) -> Any:
    """Undo `snapshot`'s change of DTensors: put each `_SHARD` dict on its mesh as this rank's part.

    Raises:
        StateError: the snapshot is of a sharded trainer, but there is no such mesh.
    """
    if isinstance(tree, dict):
        if _SHARD not in tree:
            return {key: restore(value, meshes) for key, value in tree.items()}
        name = tree.get("mesh", "")
        if name not in meshes:
            have = "is sharded otherwise" if meshes else "has a single rank"
            raise StateError(f"the state comes from a replica that is sharded over ({name}), but this one {have}")
        mesh = meshes[name]
        placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in tree["dims"]]
        local = tree[_SHARD].to(mesh.device_type)
        shape, stride = torch.Size(tree["shape"]), tuple(tree["stride"])
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    if isinstance(tree, (list, tuple)):
        return type(tree)(restore(value, meshes) for value in tree)
    return tree


def tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a snapshot in the order in which they travel."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors(value)


def size(tree: Any) -> int:
    """Return the bytes of a snapshot's tensors."""
    return sum(tensor.nbytes for tensor in tensors(tree))


def digest(tree: Any) -> str:
    """Return the hash of a tree in hexadecimal: every tensor's bytes, every other leaf, and where each stands.

    A tree and its snapshot have the same digest, wherever the tensors are; the order of a dict's entries does not
    count. Two trees have the same digest exactly if they are equal bit for bit (not-a-number equals itself, 0.0 and
    -0.0 differ). It is the sha256 of a description of the tree in which the sha256 of each MiB stands for the bytes
    of the tensors, so that several threads can share the work.
    """
    with PieceHasher() as hasher:
        return _digest(tree, lambda tensor: hasher.hash(raw_bytes(tensor.detach().cpu().contiguous())))


def _digest(tree: Any, hashes_of: Callable[[Tensor], bytes]) -> str:
    hasher = hashlib.sha256()
    _feed(hasher.update, tree, hashes_of)
    return hasher.hexdigest()


def _feed(update: Callable[[bytes], object], tree: Any, hashes_of: Callable[[Tensor], bytes]) -> None:
    if isinstance(tree, DTensor):
        _feed(update, _own_part(tree), hashes_of)
    elif isinstance(tree, Tensor):
        update(f"tensor {tree.dtype} {list(tree.shape)}\n".encode())
        update(hashes_of(tree))
    elif isinstance(tree, dict):
        update(f"dict {len(tree)}\n".encode())
        for key in sorted(tree, key=repr):
            update(f"{key!r}\n".encode())
            _feed(update, tree[key], hashes_of)
    elif isinstance(tree, (list, tuple)):
        update(f"{type(tree).__name__} {len(tree)}\n".encode())
        for value in tree:
            _feed(update, value, hashes_of)
    else:
        update(f"{type(tree).__name__} {tree!r}\n".encode())


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor, writable, without copying it."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def encode_header(tree: Any) -> bytes:
    """Return what precedes the tensors' bytes on the wire: the header's length (8 bytes, big-endian) and the header."""
    header = json.dumps(_describe(tree), separators=(",", ":")).encode()
    return _LENGTH.pack(len(header)) + header


def read_snapshot(fill: Callable[[memoryview], None]) -> Any:
    """Read a snapshot from the wire, straight into the memory of its tensors.

    Args:
        fill: fills the whole of a buffer with the next bytes, or raises.

    Raises:
        StateError: what came is not a snapshot.
    """
    tree = _read_header(fill)
    for tensor in tensors(tree):
        fill(raw_bytes(tensor))
    return tree


def read_hashed(fill: Callable[[memoryview], None]) -> tuple[Any, str]:
    """Read a snapshot as `read_snapshot` does, and hash it on other threads while it comes.

    Returns:
        The snapshot and its `digest`.

    Raises:
        StateError: what came is not a snapshot.
    """
    tree = _read_header(fill)
    with PieceHasher() as hasher:
        hashes: dict[int, list[Future[bytes]]] = {}
        for tensor in tensors(tree):
            hashes[id(tensor)] = []
            for piece in pieces(raw_bytes(tensor)):
                fill(piece)
                hashes[id(tensor)].append(hasher.start(piece))
        return tree, _digest(tree, lambda tensor: b"".join(hash_.result() for hash_ in hashes[id(tensor)]))


def _read_header(fill: Callable[[memoryview], None]) -> Any:
    length = bytearray(_LENGTH.size)
    fill(memoryview(length))
    (count,) = _LENGTH.unpack(length)
    if count > _MAX_HEADER:
        raise StateError(f"a peer sent a state header of {count} bytes")
    header = bytearray(count)
    fill(memoryview(header))
    try:
        return _build(json.loads(bytes(header).decode()))
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise StateError(f"a peer sent a state header that cannot be read ({error})") from error


def _describe(tree: Any) -> Any:
    """Return ``tree`` as JSON: leaves stand for themselves, everything else is a list that begins with its kind."""
    if isinstance(tree, Tensor):
        return ["tensor", str(tree.dtype).removeprefix("torch."), list(tree.shape)]
    if isinstance(tree, dict):
        return ["dict", [[key, _describe(value)] for key, value in tree.items()]]
    if isinstance(tree, (list, tuple)):
        return [type(tree).__name__, [_describe(value) for value in tree]]
    return tree


def _build(described: Any) -> Any:
    if not isinstance(described, list):
        return described
    kind = described[0]
    if kind == "tensor":
        dtype = getattr(torch, described[1])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{described[1]} is no dtype")
        return torch.empty(described[2], dtype=dtype)
    if kind == "dict":
        return {key: _build(value) for key, value in described[1]}
    if kind not in ("list", "tuple"):
        raise TypeError(f"{kind} is no container")
    values = [_build(value) for value in described[1]]
    return tuple(values) if kind == "tuple" else values
