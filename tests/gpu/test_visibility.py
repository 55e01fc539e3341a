"""Variables that say which devices are visible: what programs see, contradictions, one proc's share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_slurm.gpu import VisibilityError, restrict_to, settle, visible_indices

UUIDS = [f"GPU-{index:016x}" for index in range(8)]
ROCR, HIP, CUDA, ORDINAL = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"


@pytest.mark.parametrize(
    ("env", "seen"),
    [
        ({}, [*range(8)]),
        ({ROCR: "4,5,6,7"}, [4, 5, 6, 7]),
        ({ROCR: "4,5,6,7", HIP: "1,0"}, [5, 4]),
        ({ROCR: "4,5", HIP: "1", CUDA: "0"}, [5]),
        ({ROCR: "GPU-0000000000000003,1"}, [3, 1]),
        ({HIP: "7"}, [7]),
        ({CUDA: "2, 3"}, [2, 3]),
        ({ORDINAL: "6"}, [6]),
        ({HIP: ""}, []),
        ({HIP: "1,-1,2"}, [1]),
    ],
)
def test_what_programs_see_on_amd(env: dict[str, str], seen: list[int]) -> None:
    assert visible_indices("rocm", 8, UUIDS, env) == seen


def test_other_vendors_see_their_own_variable_only() -> None:
    env = {ROCR: "1", HIP: "2", CUDA: "3,GPU-0000000000000001"}
    assert visible_indices("cuda", 8, UUIDS, env) == [3, 1]
    assert settle("cuda", 8, UUIDS, env) == ({}, None)


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({ROCR: "8"}, "there are 8 devices"),
        ({ROCR: "4,5", HIP: "4"}, "there are 2 devices"),
        ({HIP: "1,1"}, "twice"),
        ({ROCR: "GPU-dead"}, "no device GPU-dead"),
        ({CUDA: "one"}, "no device one"),
    ],
)
def test_a_device_that_is_not_there_is_named(env: dict[str, str], text: str) -> None:
    with pytest.raises(VisibilityError, match=text):
        visible_indices("rocm", 8, UUIDS, env)


def test_slurm_without_renumbering_hides_every_device_and_is_mended() -> None:
    """Slurm gives the same list to both layers; the second counts behind the first."""
    env = {ROCR: "4,5", CUDA: "4,5", ORDINAL: "4,5"}
    changes, why = settle("rocm", 8, UUIDS, env)
    assert changes == {HIP: "0,1", CUDA: "0,1", ORDINAL: "0,1"}
    assert "CUDA_VISIBLE_DEVICES=4,5" in str(why)
    assert visible_indices("rocm", 8, UUIDS, {**env, **{name: str(value) for name, value in changes.items()}}) == [4, 5]


def test_what_agrees_is_told_to_every_reader_and_else_left_alone() -> None:
    assert settle("rocm", 8, UUIDS, {}) == ({}, None)
    assert settle("rocm", 8, UUIDS, {ROCR: "4,5"}) == ({}, None)
    assert settle("rocm", 8, UUIDS, {ROCR: "4,5", HIP: "1"}) == ({CUDA: "1"}, None)
    assert settle("rocm", 8, UUIDS, {CUDA: "1"}) == ({HIP: "1"}, None)
    assert settle("rocm", 0, [], {ROCR: "4", CUDA: "4"}) == ({}, None)
    changes, why = settle("rocm", 8, UUIDS, {HIP: "9"})
    assert changes == {}
    assert "HIP_VISIBLE_DEVICES=9" in str(why)


LISTS = st.lists(st.integers(0, 9), max_size=8).map(lambda numbers: ",".join(map(str, numbers)))
ENVIRONMENTS = st.fixed_dictionaries({}, optional=dict.fromkeys((ROCR, HIP, CUDA, ORDINAL), LISTS))


@given(ENVIRONMENTS)
def test_settled_variables_never_contradict_each_other(env: dict[str, str]) -> None:
    changes, _ = settle("rocm", 8, UUIDS, env)
    after = {name: value for name, value in {**env, **changes}.items() if value is not None}
    second = {after[name] for name in (HIP, CUDA, ORDINAL) if name in after}
    try:
        visible_indices("rocm", 8, UUIDS, {ROCR: env[ROCR]} if ROCR in env else {})
        seen = visible_indices("rocm", 8, UUIDS, after)
    except VisibilityError:
        return  # the user's own list names what is not there: told, and left alone
    assert len(second) <= 1
    try:
        assert visible_indices("rocm", 8, UUIDS, env) == seen
    except VisibilityError:
        assert seen == visible_indices("rocm", 8, UUIDS, {ROCR: env[ROCR]})


def test_a_procs_share_is_counted_behind_what_its_host_sees() -> None:
    assert restrict_to([2, 3], "rocm", {}) == {HIP: "2,3", CUDA: "2,3"}
    assert restrict_to([1], "rocm", {ROCR: "4,5"}) == {HIP: "1", CUDA: "1"}
    assert restrict_to([1], "rocm", {ROCR: "4,5,6", HIP: "2,0"}) == {HIP: "0", CUDA: "0"}
    assert restrict_to([0], "cuda", {CUDA: "GPU-a,GPU-b", HIP: "7"}) == {CUDA: "GPU-a"}
