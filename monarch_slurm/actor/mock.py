"""Other classes in the place of actor classes, for tests: in this process and in procs that are spawned meanwhile."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from monarch_slurm.actor.actor import Actor
from monarch_slurm.actor.endpoint import NO_TENSORS
from monarch_slurm.actor.startup import register_startup_function

_mocks: dict[type[Actor], type[Actor]] = {}


def get_actor_class(cls: type[Actor]) -> type[Actor]:
    """Return the class that is spawned where ``cls`` is asked for."""
    return _mocks.get(cls, cls)


def get_actor_mock_registry_state() -> dict[type[Actor], type[Actor]]:
    """Return the classes that are replaced now, and by which."""
    return dict(_mocks)


def set_actor_mock_registry_state(state: dict[type[Actor], type[Actor]]) -> None:
    """Replace these classes, too."""
    _mocks.update(state)


class patch_actor:  # noqa: N801 - Monarch's name
    """Have ``spawn`` of the class ``original`` spawn ``mock``: within a ``with`` or ``async with`` block, or while a
    decorated function runs.

    It holds in this process and in procs that are spawned meanwhile, and in those that they spawn.
    """

    def __init__(self, original: type[Actor], mock: type[Actor]) -> None:
        self.original = original
        self.mock = mock
        self._before: list[type[Actor] | None] = []

    def __enter__(self) -> type[Actor]:
        self._before.append(_mocks.get(self.original))
        _mocks[self.original] = self.mock
        return self.mock

    def __exit__(self, *_: object) -> None:
        before = self._before.pop()
        if before is None:
            _mocks.pop(self.original, None)
        else:
            _mocks[self.original] = before

    async def __aenter__(self) -> type[Actor]:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, which runs with the other class."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def patched_async(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await function(*args, **kwargs)

            return patched_async

        @functools.wraps(function)
        def patched(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return patched


class patch_tensor_engine:  # noqa: N801 - Monarch's name
    """Refuses: there is no tensor engine that could be replaced.

    Raises:
        NotImplementedError: always.
    """

    def __init__(self, actor_class: type[Actor], mock_factory: Callable[..., Any] | None = None) -> None:
        _refuse()


def _refuse() -> NoReturn:
    raise NotImplementedError(NO_TENSORS)


def _for_new_procs() -> Callable[[], None] | None:
    return functools.partial(set_actor_mock_registry_state, dict(_mocks)) if _mocks else None


register_startup_function(_for_new_procs)
