"""A vLLM that calls its connectors in another way is refused, by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import pytest

from tierkv.errors import VersionMismatch
from tierkv.integrations.vllm.guard import require_fit


class Base(ABC):
    """What an engine calls."""

    @abstractmethod
    def load(self, context: Any, **kwargs: Any) -> None:
        """An abstract method."""

    def finished(self, request: Any, block_ids: Any) -> None:
        """A concrete one."""
        raise NotImplementedError

    @classmethod
    def build(cls, data: Any = None) -> None:
        """And one of the class."""
        raise NotImplementedError


class Fits(Base):
    """All of it, and something newer."""

    OPTIONAL: ClassVar[frozenset[str]] = frozenset({"restore"})

    def load(self, context: Any, **kwargs: Any) -> None:
        """As the base says."""

    def finished(self, request: Any, block_ids: Any, more: Any = None) -> None:
        """With one more that has a default."""

    @classmethod
    def build(cls, data: Any = None) -> None:
        """As the base says."""

    def restore(self) -> None:
        """Which this base does not call."""


def test_what_fits_is_taken() -> None:
    """Also with parameters of its own that have defaults."""
    require_fit(Fits, (Base,), "1.0")


def refused(connector: type, *bases: type) -> str:
    """What is said of it."""
    with pytest.raises(VersionMismatch, match=r"vLLM 9\.9") as caught:
        require_fit(connector, bases, "9.9")
    return str(caught.value)


def test_a_new_abstract_method_is_named() -> None:
    """One that the connector does not have."""

    class Newer(Base):
        @abstractmethod
        def teleport(self) -> None:
            """New."""

    class Connector(Fits, Newer):
        pass

    assert "teleport() is required" in refused(Connector, Newer)


def test_a_changed_parameter_is_named() -> None:
    """By both lists."""

    class Other(Base):
        def finished(self, request: Any, groups: Any, block_ids: Any) -> None:  # type: ignore[override]  # on purpose
            """More."""

    text = refused(Fits, Other)
    assert "finished(self, request, groups, block_ids) is called" in text


def test_keywords_that_are_not_taken_are_named() -> None:
    """The engine passes what it likes."""

    class Strict(Fits):
        OPTIONAL = Fits.OPTIONAL

        def load(self, context: Any) -> None:  # type: ignore[override]  # on purpose
            """Nothing more."""

    assert "load() is called with more keywords" in refused(Strict, Base)


def test_a_method_that_is_not_called_any_more_is_named() -> None:
    """It would be dead code that was thought to work."""

    class Renamed(Fits):
        OPTIONAL = Fits.OPTIONAL

        def finish(self) -> None:
            """Under its old name."""

    assert "finish() is not called" in refused(Renamed, Base)
