"""How the connector's parts connect to the daemon: at once or not at all."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tierkv.client.sync import Client, connect
from tierkv.core.spec import KVSpec
from tierkv.integrations.attachment import Attachment
from tierkv.integrations.vllm.logs import log
from tierkv.integrations.vllm.settings import Settings

CONNECT_S = 1.0


def attachment(
    settings: Settings, specs: Sequence[KVSpec], part: str, call_timeout_s: float
) -> Attachment:
    """A connection that calls bound by ``call_timeout_s`` use, and a dead daemon holds up none."""

    def attach() -> Client:
        return connect(
            settings.socket or None,
            timeout_s=CONNECT_S,
            call_timeout_s=call_timeout_s,
            reconnect_s=0.0,
            name=f"vllm-{os.getpid()}-{part}",
            populate=part != "lookup",  # which touches no block
        )

    return Attachment(attach, specs, f"tierkv {part}", log)
