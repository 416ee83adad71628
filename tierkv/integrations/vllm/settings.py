"""What a user may set in vLLM's ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tierkv.errors import InvalidArgument

PREFIX = "tierkv."


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each field is set as ``tierkv.<field>``.

    ``socket``: the daemon's; empty: as ``tierkv.connect`` finds it. ``weights``: the file or folder
    whose content tells these weights from others; empty: the model's own. ``tenant``: whose blocks
    they are; engines of different tenants share none. ``lookup_timeout_s``: how long the scheduler
    waits for the daemon; when it takes longer, it is taken for dead.
    ``transfer_timeout_s``: the same for loads and saves, which no step waits for. ``save``: whether
    this engine stores, or only reads. ``save_output``: whether generated tokens are stored, too.
    """

    socket: str = ""
    weights: str = ""
    tenant: str = ""
    lookup_timeout_s: float = 0.25
    transfer_timeout_s: float = 5.0
    save: bool = True
    save_output: bool = True

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> Settings:
        """Take those that begin with ``tierkv.``. Raises InvalidArgument for what is none."""
        own = {
            key.removeprefix(PREFIX): value
            for key, value in extra_config.items()
            if key.startswith(PREFIX)
        }
        try:
            return msgspec.convert(own, cls)
        except msgspec.ValidationError as error:
            known = ", ".join(PREFIX + field for field in cls.__struct_fields__)
            raise InvalidArgument(
                f"kv_connector_extra_config: {error}; there are {known}"
            ) from error
