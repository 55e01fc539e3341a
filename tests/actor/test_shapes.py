from __future__ import annotations

import math
import pickle
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_slurm._src.actor.shape import MeshTrait
from monarch_slurm.actor import Extent, Point, Shape, Slice, ValueMesh


def make_mesh(**sizes: int) -> ValueMesh[int]:
    extent = Extent(list(sizes), list(sizes.values()))
    return ValueMesh(extent.region, list(range(extent.nelements)))


grids = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 5), max_size=4)


@given(grids, st.data())
def test_slices_select_what_numpy_style_indexing_selects(sizes: dict[str, int], data: st.DataObject) -> None:
    mesh = make_mesh(**sizes)
    parts: dict[str, int | slice] = {}
    expected = [dict(point) for point, _ in mesh]
    for label, size in sizes.items():
        kind = data.draw(st.sampled_from(["all", "int", "slice"]))
        if kind == "int":
            index = data.draw(st.integers(0, size - 1))
            parts[label] = index
            expected = [c for c in expected if c[label] == index]
        elif kind == "slice":
            start = data.draw(st.integers(0, size - 1))
            step = data.draw(st.integers(1, 3))
            parts[label] = slice(start, size, step)
            expected = [c for c in expected if c[label] in range(start, size, step)]
    part = mesh.slice(**parts)
    assert part.values() == [mesh.item(**c) for c in expected]
    assert part.extent.labels == [label for label in sizes if not isinstance(parts.get(label), int)]
    assert [point.rank for point, _ in part] == list(range(len(part)))


@given(grids, st.data())
def test_a_slice_of_ranks_finds_each_of_its_ranks(sizes: dict[str, int], data: st.DataObject) -> None:
    ndslice = Extent(list(sizes), list(sizes.values())).region.ndslice
    for place, rank in enumerate(ndslice):
        assert ndslice.index(rank) == place
        assert ndslice.get(place) == rank
        assert ndslice.nditem(ndslice.coordinates(rank)) == rank
    outside = data.draw(st.integers().filter(lambda rank: rank not in list(ndslice)))
    with pytest.raises(ValueError, match="is not in"):
        ndslice.coordinates(outside)


def test_strided_slices_know_what_is_not_in_them() -> None:
    every_other = Slice(offset=1, sizes=[3], strides=[2])
    assert list(every_other) == [1, 3, 5]
    for rank in (-1, 0, 2, 4, 6, 7):
        with pytest.raises(ValueError, match="is not in"):
            every_other.index(rank)
    assert every_other[1:] == (3, 5)
    with pytest.raises(IndexError):
        every_other.get(3)
    with pytest.raises(IndexError):
        every_other.nditem([3])


def test_texts() -> None:
    extent = Extent(["x", "y"], [2, 2])
    assert str(extent) == repr(extent) == "{x: 2, y: 2}"
    assert str(Point(1, extent)) == "{'x': 0/2, 'y': 1/2}"
    assert str(Point(0, Extent([], []))) == "{}"
    assert str(extent.region) == "{x=2,y=2}"
    assert repr(make_mesh(y=2)) == "ValueMesh({y: 2}):\n  (({'y': 0/2}, 0), ({'y': 1/2}, 1))"
    assert "Slice(offset=0, sizes=[2, 2], strides=[2, 1])" in repr(extent.region)


def test_points() -> None:
    point = Point(5, Extent(["x", "y"], [2, 3]))
    assert dict(point) == {"x": 1, "y": 2}
    assert point == {"x": 1, "y": 2}
    assert point.size("y") == 3
    assert point["y"] == 2
    with pytest.raises(KeyError):
        point["z"]
    with pytest.raises(IndexError):
        Point(6, point.extent)
    assert pickle.loads(pickle.dumps(point)) == point
    assert hash(point) == hash(Point(5, Extent(["x", "y"], [2, 3])))


def test_slice_errors() -> None:
    mesh = make_mesh(x=2, y=2)
    with pytest.raises(TypeError, match="Shape does not have dimension labeled 'z'"):
        mesh.slice(z=0)
    for index in (2, -1):
        with pytest.raises(IndexError, match="index out of range"):
            mesh.slice(x=index)
    with pytest.raises(ValueError, match="out of range 2:2:1 for dimension x of size 2"):
        mesh.slice(x=slice(2, 2))


def test_integers_that_are_not_int_can_index() -> None:
    class Index:
        def __index__(self) -> int:
            return 1

    assert make_mesh(x=2, y=2).slice(x=Index()).values() == [2, 3]


def test_split() -> None:
    mesh = make_mesh(host=4, gpu=4)
    split = mesh.split(host=("dp", "pp"), gpu=("tp", "cp"), pp=2, cp=2)
    assert split.sizes == {"dp": 2, "pp": 2, "tp": 2, "cp": 2}
    assert split.values() == mesh.values()
    assert split.slice(dp=1, cp=0).values() == [8, 10, 12, 14]
    assert mesh.rename(gpu="device").extent.labels == ["host", "device"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"host": "dp"}, "expected a sequence of dimensions"),
        ({"rack": ("a", "b"), "a": 2}, "there is no dimension 'rack'"),
        ({"host": ("a", "b")}, "cannot infer"),
        ({"host": ("a", "b"), "a": 3}, "not evenly divided"),
        ({"host": ("a", "b"), "a": 2, "b": 4}, "not evenly divided"),
        ({"host": ("gpu", "b"), "b": 2}, "duplicate"),
        ({"host": ("a", "b"), "a": 2, "c": 2}, "unused size constraints"),
    ],
)
def test_split_errors(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_mesh(host=4, gpu=2).split(**arguments)


def test_flatten() -> None:
    mesh = make_mesh(x=2, y=3)
    assert mesh.flatten("all").sizes == {"all": 6}
    assert mesh.slice(x=1).flatten("y2").values() == [3, 4, 5]
    assert mesh.slice(x=0, y=0).flatten("one").sizes == {"one": 1}
    # Shapes of procs keep the ranks of the mesh that they are cut from, so these have gaps; values are renumbered.
    gaps = Shape(["x"], Slice(offset=0, sizes=[2], strides=[3]))
    assert not gaps.ndslice.dense
    assert mesh.slice(y=0).flatten("x2").values() == [0, 3]


def test_size() -> None:
    mesh = make_mesh(x=2, y=3)
    assert (mesh.size(), mesh.size("y"), mesh.size(["x", "y"]), len(mesh)) == (6, 3, 6, 6)
    with pytest.raises(KeyError):
        mesh.size("z")


def test_items_of_value_meshes() -> None:
    mesh = make_mesh(x=2, y=3)
    assert mesh.item(x=1, y=2) == 5
    with pytest.raises(KeyError, match="'y'"):
        mesh.item(x=1)
    with pytest.raises(KeyError, match=r"item has extra dimensions: \['z'\]"):
        mesh.item(x=1, y=1, z=1)
    with pytest.raises(IndexError, match="rank 10 not in current shape"):
        mesh.get(10)
    with pytest.raises(IndexError, match="rank 10 not in current shape"):
        mesh.item(x=1, y=10)
    with pytest.raises(TypeError):
        mesh[0]  # type: ignore[index]
    assert make_mesh().item() == 0
    assert pickle.loads(pickle.dumps(mesh)).values() == mesh.values()


def test_from_indexed() -> None:
    shape = Extent(["x"], [3]).region
    assert ValueMesh.from_indexed(shape, [(2, "c"), (0, "a"), (1, "b"), (0, "A")]).values() == ["A", "b", "c"]
    with pytest.raises(ValueError, match=r"no value for ranks \[1\]"):
        ValueMesh.from_indexed(shape, [(2, "c"), (0, "a")])
    with pytest.raises(ValueError, match="2 values for a shape of 3"):
        ValueMesh(shape, [1, 2])


@given(grids)
def test_shapes_pickle(sizes: dict[str, int]) -> None:
    shape = Extent(list(sizes), list(sizes.values())).region
    again = pickle.loads(pickle.dumps(shape))
    assert again == shape
    assert hash(again) == hash(shape)
    assert len(shape) == math.prod(sizes.values())


@given(st.lists(st.integers(0, 50), max_size=12))
def test_slices_of_a_list_have_its_ranks_in_order(ranks: list[int]) -> None:
    assert [rank for part in Slice.from_list(ranks) for rank in part] == ranks


def test_evenly_spaced_ranks_are_one_slice() -> None:
    assert Slice.from_list([2, 5, 8, 11]) == [Slice(offset=2, sizes=[4], strides=[3])]
    assert len(Slice.from_list([0, 1, 2, 10, 20, 30])) == 2
    assert Slice.from_list([7]) == [Slice(offset=7, sizes=[1], strides=[1])]


def test_a_shape_is_a_region() -> None:
    shape = Shape(["x", "y"], Slice.new_row_major([2, 3])).at("x", 1)
    assert shape.region is shape.as_shape() is shape
    assert shape.point_of_base_rank(4) == shape.point(4)
    assert shape.region.slice() == shape.ndslice


@given(st.dictionaries(st.text(), st.integers(0, 5), max_size=4), st.integers(0, 5))
def test_shapes_come_out_of_their_bytes(sizes: dict[str, int], offset: int) -> None:
    shape = Shape(list(sizes), Slice(offset=offset, sizes=list(sizes.values()), strides=[2] * len(sizes)))
    for one in (shape, shape.extent):
        restore, arguments = one.__reduce__()
        assert restore is type(one).from_bytes
        assert restore(*arguments) == one
    for point in (Point(rank, shape.extent) for rank in range(min(3, shape.extent.nelements))):
        assert Point.from_bytes(point.__reduce__()[1][0]) == point


@pytest.mark.parametrize("data", [b"", b"\x90", b"\x94\xa1a\xa1b\xa1c\xa1d", b"\x92\x91\x01\x91\x01", b"\x81" * 9000])
@pytest.mark.parametrize("kind", [Shape, Extent, Point])
def test_bytes_of_something_else(kind: type[Shape], data: bytes) -> None:
    with pytest.raises(ValueError, match=r"these bytes are no|expected, not"):
        kind.from_bytes(data)


S = Slice(offset=2, sizes=[2, 3], strides=[3, 1])
H = Shape(["x", "y"], S)
E = Extent(["x", "y"], [2, 3])
MESH = ValueMesh(H, [0, 1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda: S[-1], TypeError),
        (lambda: S["x"], TypeError),  # type: ignore[index]
        (lambda: S[6], IndexError),
        (lambda: S[::-1], IndexError),
        (lambda: S.get(6), ValueError),
        (lambda: S.get(-1), OverflowError),
        (lambda: S.index(99), ValueError),
        (lambda: S.coordinates(99), ValueError),
        (lambda: S.nditem([0]), IndexError),
        (lambda: S.nditem([-1, 0]), OverflowError),
        (lambda: Slice(offset=-1, sizes=[2], strides=[1]), OverflowError),
        (lambda: Slice(offset=0, sizes=[2], strides=[1, 1]), ValueError),
        (lambda: H.at("z", 0), ValueError),
        (lambda: H.at("x", 2), ValueError),
        (lambda: H.at("x", -1), OverflowError),
        (lambda: H.index(z=0), ValueError),
        (lambda: H.index(x=2), ValueError),
        (lambda: H.select("z", slice(0, 1)), ValueError),
        (lambda: H.select("x", slice(2, 3)), ValueError),
        (lambda: H.select("x", 1), TypeError),  # type: ignore[arg-type]
        (lambda: Extent(["x"], [-1]), OverflowError),
        (lambda: Extent(["x"], [1, 2]), ValueError),
        (lambda: E["z"], ValueError),
        (lambda: Point(0, E)["z"], ValueError),
        (lambda: Point(0, E).size("z"), ValueError),
        (lambda: Point(6, E), ValueError),
        (lambda: Point(-1, E), OverflowError),
        (lambda: MESH.get(6), ValueError),
        (lambda: MESH.get(-1), OverflowError),
        (lambda: MESH.item(x=0, y=-1), OverflowError),
        (lambda: MESH.item(x=0, y=3), IndexError),
        (lambda: MESH.item(x=0), KeyError),
        (lambda: MESH.slice(z=0), TypeError),
        (lambda: MESH.slice(x=2), IndexError),
        (lambda: MESH.slice(x=-1), IndexError),
        (lambda: MESH.slice(x=slice(1, 1)), ValueError),
        (lambda: MESH.size("z"), KeyError),
        (lambda: ValueMesh.from_indexed(H, [(rank, 0) for rank in range(7)]), ValueError),
    ],
)
def test_what_is_out_of_range_raises_what_monarch_raises(wrong: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error):
        wrong()


def test_a_mapping_of_dimensions_knows_what_it_does_not_have() -> None:
    assert "z" not in E
    assert E.get("z") is None
    assert Point(0, E).get("z", 7) == 7
    with pytest.raises(KeyError, match=r"^Dimension 'z' not found; there are: \['x', 'y'\]$"):
        E["z"]


def test_items_are_an_iterator() -> None:
    items = MESH.items()
    assert next(items) == (Point(0, E), 0)
    assert [value for _, value in items] == [1, 2, 3, 4, 5]
    assert next(iter(MESH)) == (Point(0, E), 0)


class Grid(MeshTrait):
    """A mesh of somebody else's: it has the three members that it must have, and keeps a ``_shape`` of its own."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    @property
    def _ndslice(self) -> Slice:
        return self._shape.ndslice

    @property
    def _labels(self) -> tuple[str, ...]:
        return tuple(self._shape.labels)

    def _new_with_shape(self, shape: Shape) -> Grid:
        return Grid(shape)


def test_a_mesh_of_your_own() -> None:
    grid = Grid(Shape(["x", "y"], Slice.new_row_major([2, 4])))
    assert grid.slice(x=1).extent == Extent(["y"], [4])
    assert list(grid.slice(x=1, y=slice(1, 3))._ndslice) == [5, 6]
    assert grid.split(y=("a", "b"), a=2).sizes == {"x": 2, "a": 2, "b": 2}
    assert grid.flatten("all").size("all") == len(grid) == grid.size() == 8
    assert grid.rename(x="rows").extent.labels == ["rows", "y"]
    with pytest.raises(TypeError, match="abstract"):
        MeshTrait()  # type: ignore[abstract]
