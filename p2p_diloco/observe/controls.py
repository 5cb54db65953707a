"""What the dashboard's buttons do: the founder's changes of a run, at a browser's wish.

Law: a wish is JSON from a browser that was let in; a wish that can't be read is refused. One change at a time. The
change itself is the same as that of the commands `set`, `stop`, `save` and `kick`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager

from p2p_diloco.config import RunConfig
from p2p_diloco.core.revision import CHANGEABLE
from p2p_diloco.errors import UsageError
from p2p_diloco.net.interface import Records
from p2p_diloco.observe.revise import Asker, Outcome, revise, save, stop

WITHIN_S = 30.0
"""The most seconds to wait until the peers know of a change."""

log = logging.getLogger(__name__)


class Controls:
    """Carries out the changes of a run that a browser asks for, in the founder's name.

    Args:
        run_id: the run to change.
        asker: the founder's identity, or the run key. If None, the dashboard can't change, save or stop the run.
        records: opens the DHT for one change.
        kick: revokes an invitation, which disconnects the peers that use it. Its argument is the invitation's name, its
            grant's id, or the id of the peer that it was made for. If `kick` is None, the dashboard can't revoke any.
    """

    def __init__(
        self,
        run_id: str,
        asker: Asker | None,
        records: Callable[[], AbstractAsyncContextManager[Records]],
        kick: Callable[[str], Awaitable[str]] | None,
    ) -> None:
        self._run_id, self._asker, self._records, self._kick = run_id, asker, records, kick
        self._one_at_a_time = asyncio.Lock()

    @property
    def offered(self) -> tuple[str, ...]:
        """The names of what can be done."""
        return (*(("set", "save", "stop") if self._asker else ()), *(("kick",) if self._kick else ()))

    async def carry_out(self, wish: object) -> str:
        """Carry out a wish such as {"do": "set", "values": {"outer_lr": 0.5}}; returns the outcome as a sentence.

        Raises:
            UsageError, ConfigError: the wish can't be read or can't be done. Refused, GaveUpWaiting: as `revise`.
        """
        asked = wish.get("do") if isinstance(wish, Mapping) else None
        if asked not in self.offered:
            known = asked in ("set", "save", "stop", "kick")
            key = "--key" if asked == "kick" else "--identity-path or --key"
            mend = f"start the dashboard with {key}" if known else f"ask for one of {', '.join(self.offered)}"
            raise UsageError("can't be done from here", key="do", value=asked, mend=mend)
        log.info("asked for in the browser: %s", wish)
        async with self._one_at_a_time:
            match wish:
                case {"do": "kick", "name": str(name)} if self._kick and name:
                    return await self._kick(name)
                case {"do": "set", "values": dict(values)} if values.keys() <= set(CHANGEABLE) and values:
                    given = RunConfig.model_validate(values).given
                    checked = {key: given[key] for key in values}
                    made = await self._asked(lambda dht, asker: revise(dht, self._run_id, asker, checked, WITHIN_S))
                    return _told(made, ", ".join(f"{key}={made.settings[key]}" for key in checked))
                case {"do": "save"}:
                    made = await self._asked(lambda dht, asker: save(dht, self._run_id, asker, WITHIN_S))
                    return _told(made, f"being saved by {', '.join(made.saved_by) or 'no peer yet'}")
                case {"do": "stop", "save": bool(keep)}:
                    made = await self._asked(lambda dht, asker: stop(dht, self._run_id, asker, WITHIN_S, save=keep))
                    return _told(made, f"the run ends for all peers at epoch {made.settings['stop_after_epochs']}")
        raise UsageError("can't be read", key="wish", value=wish, mend="reload the page")

    async def _asked(self, ask: Callable[[Records, Asker], Awaitable[Outcome]]) -> Outcome:
        assert self._asker is not None, "it is not offered otherwise"
        async with self._records() as dht:
            return await ask(dht, self._asker)


def _told(made: Outcome, text: str) -> str:
    if not made.news:
        return f"{text}: it is so already, and nothing was changed"
    return f"revision {made.revision.number}: {text}; known by {', '.join(made.known_by) or 'no peer yet'}"
