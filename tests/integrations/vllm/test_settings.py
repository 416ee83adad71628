"""What a user may set, and what he is told when it is wrong."""

from __future__ import annotations

import pytest

from tierkv.errors import InvalidArgument
from tierkv.integrations.vllm.settings import Settings


def test_other_connectors_settings_are_none_of_ours() -> None:
    """Only what begins with ``tierkv.`` is read."""
    settings = Settings.of({"lmcache.mp.port": 5555, "tierkv.socket": "/run/x.sock"})
    assert settings == Settings(socket="/run/x.sock")


def test_an_unknown_setting_is_named_and_the_known_ones_are_listed() -> None:
    """A typing error must not be a setting without effect."""
    with pytest.raises(InvalidArgument, match=r"sokcet.*tierkv\.socket"):
        Settings.of({"tierkv.sokcet": "/run/x.sock"})


def test_a_wrong_type_is_named() -> None:
    """With the field."""
    with pytest.raises(InvalidArgument, match="lookup_timeout_s"):
        Settings.of({"tierkv.lookup_timeout_s": "soon"})
