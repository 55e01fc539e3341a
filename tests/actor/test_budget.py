from __future__ import annotations

from monarch_slurm.actor.budget import RestartBudget, RestartLimit


def test_failures_far_apart_cost_nothing() -> None:
    budget = RestartBudget(RestartLimit(2, within=10.0))
    assert [budget.use(now) for now in range(0, 1000, 11)] == [0.0] * 91
    assert budget.used == 1


def test_failures_close_together_use_the_budget_up() -> None:
    budget = RestartBudget(RestartLimit(3, within=10.0), backoff=1.0, max_backoff=1.5)
    assert [budget.use(now) for now in (0.0, 1.0, 2.0, 3.0)] == [0.0, 1.0, 1.5, None]
    assert budget.used == 3
    assert budget.use(10.5) == 0.0
    assert budget.used == 3


def test_a_restart_that_held_ends_the_row() -> None:
    budget = RestartBudget(RestartLimit(100, within=1000.0), backoff=1.0, max_backoff=8.0, settled=5.0)
    assert [budget.use(now) for now in (0.0, 1.0, 3.0, 6.0, 12.0)] == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert budget.use(24.9) == 8.0
    assert budget.use(38.0) == 0.0
    assert budget.use(39.0) == 1.0


def test_no_restart_at_all() -> None:
    assert RestartBudget(RestartLimit(0, within=10.0)).use(0.0) is None
