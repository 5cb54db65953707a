"""An invitation: all that a peer needs to take part in a private run, as a text.

Law: works on text and keys only: uses no file and no socket, and reads no clock. The text is a secret: an error shows
only its beginning.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import dataclass

from p2p_diloco.addresses import check_peer_address
from p2p_diloco.errors import ConfigError
from p2p_diloco.net.certificates import FOREVER, NAME, Grant, RunKey
from p2p_diloco.net.signing import as_text, derived, from_text, public_of

_KIND, _VERSION = "p2p_diloco invitation", 2


@dataclass(frozen=True, slots=True)
class Invitation:
    """What a peer needs to take part in a private run. Its text is a secret."""

    run_id: str
    addresses: tuple[str, ...]
    """The initial peers."""
    grant: Grant
    seed: bytes
    """The private half of the grant's key."""
    secret: bytes
    """The secret that all members of the run share."""

    @classmethod
    def anybody(cls, run_id: str) -> Invitation:
        """The invitation to an open run. Its run key follows from the run's name, so its certificates prove nothing but
        the ids of those who show them."""
        key = RunKey(derived(run_id.encode(), b"open run"))
        grant, seed = key.grant("worker", "anybody", FOREVER)
        return cls(run_id, (), grant, seed, key.secret)

    def pack(self) -> str:
        """The invitation as JSON, for a file."""
        grant = self.grant
        content = {
            "kind": _KIND,
            "version": _VERSION,
            "run_id": self.run_id,
            "name": grant.name,
            "role": grant.role,
            "addresses": list(self.addresses),
            "grant": as_text(grant.der),
            "seed": as_text(self.seed),
            "secret": as_text(self.secret),
        }
        return json.dumps(content, indent=1) + "\n"

    def line(self) -> str:
        """The invitation as one line without spaces, for an environment variable."""
        return b64encode(json.dumps(json.loads(self.pack()), separators=(",", ":")).encode()).decode()

    @classmethod
    def unpack(cls, text: str) -> Invitation:
        """Read an invitation from what `pack` or `line` returned.

        Raises:
            ConfigError: it is no invitation, or was changed.
        """
        try:
            content = json.loads(text if text.lstrip().startswith("{") else b64decode(text.strip(), validate=True))
            if not isinstance(content, dict) or content["kind"] != _KIND:
                raise ValueError("it is something else")
        except (KeyError, ValueError, RecursionError):
            mend = "name the .invite file that you were given, or give its one line of base64"
            raise ConfigError("is no invitation", key="invite", value=_short(text), mend=mend) from None
        if content.get("version") != _VERSION:
            mend = "ask the run's founder for one that this version of p2p_diloco makes"
            raise ConfigError("is of another version", key="invite", value=content.get("version"), mend=mend)
        try:
            return cls._checked(content)
        except Exception:  # the parsers raise exceptions of many kinds, which say nothing to a user
            wrong = "is damaged or was changed"
            raise ConfigError(wrong, key="invite", value=_short(text), mend="ask for the file again") from None

    @classmethod
    def _checked(cls, content: dict[str, object]) -> Invitation:
        run_id, addresses = content["run_id"], content["addresses"]
        if not isinstance(run_id, str) or not NAME.fullmatch(run_id) or not isinstance(addresses, list):
            raise ValueError("its run or addresses can't be used")
        grant = Grant.read(from_text(content["grant"]))
        seed, secret = from_text(content["seed"], 32), from_text(content["secret"], 32)
        if public_of(seed) != grant.public:
            raise ValueError("its key is not the grant's")
        return cls(run_id, tuple(check_peer_address(str(address)) for address in addresses), grant, seed, secret)


def _short(text: str) -> str:
    """The beginning of a text, for an error: too short to reveal a secret."""
    text = " ".join(text.split())
    return text if len(text) <= 24 else f"{text[:16]}..."
