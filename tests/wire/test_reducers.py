from __future__ import annotations

import array
import copyreg
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from monarch_slurm.wire import dumps, loads
from monarch_slurm.wire.bulk import in_place
from monarch_slurm.wire.pickling import OUT_OF_BAND_BYTES, _Pickler, from_bytes, to_bytes

ITEMS = 2**18
"""Of float32: 1 MiB."""

SIZES = [
    pytest.param(ITEMS, id="large"),
    pytest.param(OUT_OF_BAND_BYTES // 4, id="middle"),
    pytest.param(5, id="small"),
]


def there_and_apart(value: Any) -> tuple[Any, Any]:
    """What arrives on the same machine, and what arrives as plain bytes."""
    frames = dumps(value)
    return loads(frames), loads([bytes(in_place(frame)) for frame in frames])


def values_of(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32)


class Marked(torch.Tensor):
    """A subclass without a constructor of its own."""


KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    "plain": values_of,
    "bfloat16": lambda count: values_of(count).bfloat16(),
    "bool": lambda count: values_of(count) % 3 == 0,
    "complex": lambda count: torch.complex(values_of(count), values_of(count)),
    "float8": lambda count: values_of(count).to(torch.float8_e4m3fn),
    "int16": lambda count: values_of(count).short(),
    "not contiguous": lambda count: values_of(2 * count)[::2],
    "transposed": lambda count: values_of(5 * (count // 5)).view(5, -1).T,
    "expanded": lambda count: values_of(1).expand(count),
    "conjugated": lambda count: torch.complex(values_of(count), values_of(count)).conj(),
    "negated": lambda count: torch.complex(values_of(count), values_of(count)).conj().imag,
    "no dimension": lambda count: torch.tensor(float(count)),
    "empty": lambda count: torch.empty(0, count),
    "sparse": lambda count: values_of(count).to_sparse(),
    "CSR": lambda count: values_of(5 * (count // 5)).view(5, -1).to_sparse_csr(),
    "quantized": lambda count: torch.quantize_per_tensor(values_of(count), 0.5, 3, torch.qint8),
    "with gradient": lambda count: values_of(count).requires_grad_(),
    "parameter": lambda count: torch.nn.Parameter(values_of(count)),
    "frozen parameter": lambda count: torch.nn.Parameter(values_of(count), requires_grad=False),
    "subclass": lambda count: values_of(count).as_subclass(Marked),
    "buffer": lambda count: torch.nn.Buffer(values_of(count)),
}


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.filterwarnings("ignore:Sparse|.*quantiz|TypedStorage:UserWarning")
def test_tensors_arrive_as_they_were(make: Callable[[int], torch.Tensor], count: int) -> None:
    sent = make(count)
    for got in there_and_apart({"tensor": sent}):
        tensor = got["tensor"]
        assert type(tensor) is type(sent)
        assert (tensor.dtype, tensor.layout, tensor.shape) == (sent.dtype, sent.layout, sent.shape)
        assert (tensor.requires_grad, tensor.is_leaf) == (sent.requires_grad, True)
        assert (tensor.is_conj(), tensor.is_neg()) == (sent.is_conj(), sent.is_neg())
        if sent.layout is torch.strided:
            assert tensor.stride() == sent.stride()
            same = [
                x.dequantize() if x.is_quantized else x.detach().resolve_conj().resolve_neg() for x in (tensor, sent)
            ]
            assert torch.equal(same[0].to(torch.complex128), same[1].to(torch.complex128))
        else:
            assert torch.equal(tensor.to_dense(), sent.to_dense())


@pytest.mark.parametrize("count", SIZES)
def test_tensors_that_share_memory_still_do_and_share_it_with_nobody_else(count: int) -> None:
    whole = values_of(count)
    sent = {"head": whole[:2], "tail": whole[2:], "module": torch.nn.Linear(2, 2)}
    sent["module"].tied = sent["module"].weight
    for got in there_and_apart(sent):
        head, tail = got["head"], got["tail"]
        head.as_strided((count,), (1,)).fill_(7)
        assert torch.equal(tail, torch.full((count - 2,), 7.0))
        assert torch.equal(whole, values_of(count))
        assert got["module"].tied is got["module"].weight


def test_attributes_and_hooks_of_tensors_are_kept() -> None:
    sent = values_of(ITEMS)
    sent.note = "kept"  # type: ignore[attr-defined]
    assert all(got.note == "kept" for got in there_and_apart(sent))


def test_large_tensors_leave_the_pickle_and_a_snapshot_stays() -> None:
    state = {f"layers.{number}": values_of(ITEMS) for number in range(3)}
    frames = dumps(state)
    assert len(in_place(frames[0])) < 2000
    for tensor in state.values():
        tensor.zero_()
    assert all(torch.equal(tensor, values_of(ITEMS)) for tensor in loads(frames).values())


def test_small_tensors_have_memory_that_can_grow() -> None:
    got = loads(dumps(values_of(3)))
    assert got.resize_(100).shape == (100,)


@pytest.mark.parametrize("typecode", list("bBhHiIlLqQfdu"))
@pytest.mark.parametrize("count", [0, 3, 9 * 2**20 // 8])
def test_arrays(typecode: str, count: int) -> None:
    sent = array.array(typecode, "ä" * count if typecode == "u" else range(3) if count == 3 else [1] * count)
    for got in there_and_apart([sent]):
        assert got[0] == sent
        assert got[0].typecode == typecode
        got[0].append(sent[0] if count else "u" if typecode == "u" else 1)


@pytest.mark.parametrize("size", [0, 10, OUT_OF_BAND_BYTES, 2 * 2**20])
def test_views_of_memory_arrive_as_bytes(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    for sent in (memoryview(data), memoryview(bytearray(data)), memoryview(data + data)[::2]):
        for got in there_and_apart((sent, 1)):
            assert got == (sent.tobytes(), 1)
            assert type(got[0]) is bytes


class Meters(array.array):  # type: ignore[type-arg]
    """A subclass."""


def test_subclasses_keep_their_class() -> None:
    for got in there_and_apart(Meters("d", [1.0] * ITEMS)):
        assert type(got) is Meters
        assert got[-1] == 1.0


@pytest.fixture
def registered() -> Any:
    """What a program registers, and takes back."""
    yield copyreg.pickle
    for kind in (torch.Tensor, array.array, torch.UntypedStorage):
        copyreg.dispatch_table.pop(kind, None)


def test_reducers_that_a_program_has_registered_go_first(registered: Any) -> None:
    registered(torch.Tensor, lambda tensor: (str, (f"tensor of {tensor.numel()}",)))
    registered(array.array, lambda values: (str, (f"array of {len(values)}",)))
    assert loads(dumps([values_of(ITEMS), array.array("d", [1.0])])) == [f"tensor of {ITEMS}", "array of 1"]
    copyreg.dispatch_table.pop(torch.Tensor)
    assert torch.equal(loads(dumps(values_of(ITEMS))), values_of(ITEMS))


def test_reducers_that_a_program_has_given_to_cloudpickle_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    import cloudpickle

    table = cloudpickle.Pickler.dispatch_table.maps[0]
    monkeypatch.setitem(table, memoryview, lambda view: (str, ("a view",)))
    assert loads(dumps([memoryview(b"x")])) == ["a view"]


class Opaque:
    """Has a way of its own to be pickled, as classes with buffers do."""

    def __init__(self, data: bytearray) -> None:
        self.data = data

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Opaque.again, (pickle.PickleBuffer(self.data),)

    @staticmethod
    def again(data: Any) -> Opaque:
        made = Opaque(bytearray())
        made.data = data
        return made


@pytest.mark.parametrize("size", [10, OUT_OF_BAND_BYTES, 2**21])
def test_classes_that_hand_out_buffers(size: int) -> None:
    for got in there_and_apart([Opaque(bytearray(b"x") * size)]):
        view = memoryview(got[0].data)
        assert view == b"x" * size
        assert not view.readonly


def test_a_tensor_of_a_device_that_is_not_here_says_what_to_do() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    from monarch_slurm.wire.reducers import _to_device

    with pytest.raises(RuntimeError, match=r"device cuda:0 .*RDMABuffer"):
        _to_device(values_of(3).untyped_storage(), "cuda:0")


def test_one_pickle_has_it_all() -> None:
    sent = {"tensor": values_of(ITEMS), "array": array.array("d", [1.0] * 9), "view": memoryview(b"x")}
    got = from_bytes(to_bytes(sent))
    assert torch.equal(got["tensor"], sent["tensor"])  # type: ignore[arg-type]
    assert got["array"] == sent["array"]


def test_libraries_are_not_imported_for_their_reducers() -> None:
    import subprocess

    program = "from monarch_slurm.wire import dumps; import sys; dumps([b'x']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    assert torch.Tensor in _Pickler.dispatch_table
