"""When an error is no bad luck any more."""

from __future__ import annotations

from monarch_slurm.train.repeated import RepeatedErrors


def test_the_same_error_at_the_same_step_is_counted_whatever_numbers_it_has() -> None:
    errors = RepeatedErrors()
    told = [f"RuntimeError: no route to 10.0.0.{i}:{4000 + i} at 0x7f{i}a" for i in range(3)]
    assert [errors.count(error, 0, progressed=False) for error in told] == [1, 2, 3]


def test_other_errors_and_other_steps_are_counted_by_themselves() -> None:
    errors = RepeatedErrors()
    assert errors.count("Killed(sig=9)", 0, progressed=False) == 1
    assert errors.count("Killed(sig=9)", 7, progressed=False) == 1
    assert errors.count("ValueError: no", 0, progressed=False) == 1
    assert errors.count("Killed(sig=9)", 0, progressed=False) == 2


def test_a_replica_that_has_come_further_begins_to_count_anew() -> None:
    errors = RepeatedErrors()
    assert errors.count("Killed(sig=9)", 0, progressed=False) == 1
    assert errors.count("Killed(sig=9)", 0, progressed=False) == 2
    assert errors.count("MemoryError", 900, progressed=True) == 1
    assert errors.count("Killed(sig=9)", 0, progressed=False) == 1
