from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_slurm.job.errors import NodeListError
from monarch_slurm.job.nodelist import MAX_HOSTS, compress, expand, tasks_per_node

NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)
NUMBERED = st.builds(
    lambda prefix, number, width: f"{prefix}{number:0{width}}",
    st.sampled_from(["n", "rack1n", "gpu-", ""]),
    st.integers(0, 300),
    st.integers(1, 4),
)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("", []),
        ("nodes[006,011]", ["nodes006", "nodes011"]),
        ("host[001,003-004,006]", ["host001", "host003", "host004", "host006"]),
        ("nodeA,nodeB[001,003],nodeC", ["nodeA", "nodeB001", "nodeB003", "nodeC"]),
        ("host-[001-002]", ["host-001", "host-002"]),
        ("d05-[41-42]", ["d05-41", "d05-42"]),
        ("c[1-2]", ["c1", "c2"]),
        ("[1-3]", ["1", "2", "3"]),
        ("n[01-3]", ["n01", "n02", "n03"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[9-10,10]", ["n9", "n10", "n10"]),
        ("n[1-2][3-4]", ["n13", "n14", "n23", "n24"]),
        ("rack[1-2]n[01-02]", ["rack1n01", "rack1n02", "rack2n01", "rack2n02"]),
        ("a[1-2]b[3-4]c[5-6]", ["a1b3c5", "a1b3c6", "a2b3c5", "a2b3c6", "a1b4c5", "a1b4c6", "a2b4c5", "a2b4c6"]),
        (" n[1-2] , n5", ["n1", "n2", "n5"]),
        ("n,,m", ["n", "m"]),
    ],
)
def test_lists_expand_as_scontrol_expands_them(text: str, names: list[str]) -> None:
    assert expand(text) == names


def test_a_name_may_go_on_after_its_bracket() -> None:
    assert expand("node[001-003,7]-ib") == ["node001-ib", "node002-ib", "node003-ib", "node7-ib"]


@pytest.mark.parametrize(
    ("text", "offset"),
    [
        ("n[1-2", 1),
        ("n[1-2]]", 6),
        ("n[]", 2),
        ("n[2-1]", 2),
        ("tux[1-2,]", 8),
        ("n[[1-2]]", 2),
        ("n[1-2-3]", 5),
        ("n[a-b]", 2),
        ("n[1-3:2]", 5),
        ("n[3-]", 3),
        ("n[ 1-2]", 2),
        ("bgl[000x111]", 7),
        ("m,n[1-70000]", 4),
        ("m,a[1-300]b[1-300]", 2),
        ("n[1-40000],m[1-40000]", 11),
    ],
)
def test_an_error_names_the_string_and_the_place(text: str, offset: int) -> None:
    with pytest.raises(NodeListError) as caught:
        expand(text)
    assert (caught.value.text, caught.value.offset) == (text, offset)
    assert repr(text) in str(caught.value)
    assert str(offset) in str(caught.value)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("n1 n2 n3 n5", "n[1-3,5]"),
        ("rack1n01 rack1n02 rack2n01", "rack1n[01-02],rack2n01"),
        ("node1-ib node2-ib", "node1-ib,node2-ib"),
        ("n1 n3 n2", "n[1,3,2]"),
        ("n1 n1 n2", "n[1,1-2]"),
        ("n09 n10 n9", "n[09-10,9]"),
        ("n9 n10", "n[9-10]"),
        ("n099 n100", "n[099-100]"),
        ("n001 n2 n003", "n[001,2,003]"),
        ("n1 n", "n1,n"),
        ("", ""),
    ],
)
def test_names_compress_as_scontrol_compresses_them(names: str, text: str) -> None:
    assert compress(names.split()) == text


@given(st.lists(NAMES | NUMBERED))
def test_compressed_names_expand_to_themselves(names: list[str]) -> None:
    assert expand(compress(names)) == names


@given(st.text(alphabet="n10-,[] x", max_size=12))
def test_any_text_gives_names_without_grammar_in_them_or_the_typed_error(text: str) -> None:
    try:
        names = expand(text)
    except NodeListError as error:
        assert 0 <= error.offset <= len(text)  # noqa: PT017
    else:
        assert all(name and not set(name) & set("[], ") for name in names)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("1(x2)", [1, 1]), ("2(x3),1", [2, 2, 2, 1]), ("40,8", [40, 8]), ("16", [16])],
)
def test_counts_are_one_per_node(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize(
    ("text", "offset"), [("", 0), ("2(x3", 1), ("2,", 2), ("x", 0), ("2(x3)1", 5), ("1(x70000)", 0)]
)
def test_a_bad_count_is_named(text: str, offset: int) -> None:
    with pytest.raises(NodeListError) as caught:
        tasks_per_node(text)
    assert caught.value.offset == offset


def test_the_longest_range_is_allowed() -> None:
    assert len(expand(f"n[1-{MAX_HOSTS}]")) == MAX_HOSTS


@given(st.lists(st.tuples(st.integers(0, 256), st.integers(1, 40)), min_size=1, max_size=8))
def test_any_run_length_list_has_a_count_per_node(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{nodes})" if nodes > 1 else str(count) for count, nodes in runs)
    assert tasks_per_node(text) == [count for count, nodes in runs for _ in range(nodes)]
