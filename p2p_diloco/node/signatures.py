"""Signs contributions, closes, choices, means and commits, and checks such signatures. Hashes payloads.

Law: makes and judges bytes; sends and stores nothing. A signature can't be made by any other peer, and can be passed on
with what it covers: a contribution's covers the hash over its slices' hashes, a mean's the hash of its payload.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from blake3 import blake3

from p2p_diloco.core.messages import Choice, Close, Commit, Mean, Message, Ready, Vote
from p2p_diloco.net.interface import Records, Refusal
from p2p_diloco.net.signing import as_text, from_text
from p2p_diloco.node.fields import encoded

READY, CLOSE, CHOICE, MEAN, COMMIT = b"ready", b"close", b"choice", b"mean", b"commit"

SIGNED = {
    READY: (
        "fragment", "base", "id", "oldest", "weight", "samples", "link", "reachable", "grant", "root", "uses",
    ),
    CLOSE: ("fragment", "base", "term", "leader", "attempt", "key", "owners"),
    MEAN: ("fragment", "base", "key", "number", "hash"),
    COMMIT: ("fragment", "base", "version", "term", "leader", "key", "hashes", "owners"),
}  # fmt: skip
"""The fields that a message's signature covers, after the run's token and the signer's life."""
LIFE_BYTES = 8
"""A Close's and a commit's signature begins with a number that the signer's process has drawn, its life: a peer that
starts again has forgotten what it signed before."""

M = TypeVar("M", bound=Message)
Statement = tuple[str, bytes, bytes, bytes]
"""Who signs, what kind of statement, its bytes, and the signature; empty: it isn't signed yet."""


def hash_of(payload: memoryview | bytes) -> str:
    """The BLAKE3 of a payload, 64 hexadecimal digits."""
    return blake3(payload).hexdigest()


class Signatures:
    """Makes the signatures of one peer, and checks those of the other peers of a run."""

    def __init__(self, me: str, records: Records, token: bytes) -> None:
        """`records` signs as this peer. `token`: the run's, so that no signature is valid in another run."""
        self._me, self._records, self._token = me, records, token
        self._life = secrets.token_bytes(LIFE_BYTES)
        self.saw: Callable[[Statement], None] = lambda said: None
        """Called with each statement whose signature `check` has checked."""

    def check(self, sender: str, message: Message) -> None:
        """Raises Refusal if a message, or a part of it, lacks a signature."""
        for said in self._statements(sender, message):
            if not self.holds(said):
                raise Refusal(f"{said[0]} has not signed its {said[1].decode()}")
            self.saw(said)

    def holds(self, said: Statement) -> bool:
        """Whether this peer has signed this statement."""
        signer, kind, statement, seal = said
        return self._records.signed_by(signer, as_text(seal), kind, statement)

    def signed(self, message: M) -> M:
        """A message of this peer, with its own signatures where they are missing."""
        match message:
            case Ready(seal=b""):
                return replace(message, seal=self._sign(READY, self._covered(READY, message)))
            case Close(seal=b""):
                choice = None if message.choice is None else self._chosen(message, message.choice)
                return replace(message, choice=choice, seal=self._in_this_life(CLOSE, message))
            case Commit(seal=b"", leader=self._me):
                choice = self._chosen(message, message.choice)
                return replace(message, choice=choice, seal=self._in_this_life(COMMIT, message))
            case Vote(served=served, commit=commit):
                own = None if commit is None or commit.leader != self._me else self.signed(commit)
                mine = None if served is None or served.leader != self._me else self.signed(served)
                return replace(message, served=mine or served, commit=own or commit)
        return message

    def of_mean(self, *of: object) -> bytes:
        """The signature of a mean that this peer has computed. `of`: its fragment, base, key, number and hash."""
        return self._sign(MEAN, self._statement(*of))

    def _chosen(self, of: Close | Commit, choice: Choice) -> Choice:
        """Sign an own choice, and the own contribution in it."""
        if isinstance(of, Close):
            entries = [
                (peer, self.signed(ready) if peer == self._me else ready)  # a stored one has no signature
                for peer, ready in choice.entries
            ]
            choice = replace(choice, entries=tuple(entries))
        if choice.seal or choice.by != self._me:
            return choice
        return replace(choice, seal=self._sign(CHOICE, self._choice(of, choice)))

    def _in_this_life(self, kind: bytes, of: Close | Commit) -> bytes:
        return self._life + self._sign(kind, self._covered(kind, of, self._life))

    def _sign(self, kind: bytes, statement: bytes) -> bytes:
        return from_text(self._records.sign(kind, statement))

    # -- what is signed

    def _statements(self, sender: str, message: Message) -> Iterator[Statement]:
        match message:
            case Ready():
                yield sender, READY, self._covered(READY, message), message.seal
            case Mean():
                yield message.owner, MEAN, self._covered(MEAN, message), message.seal
            case Close(choice=choice) | Commit(choice=choice):
                life, seal = message.seal[:LIFE_BYTES], message.seal[LIFE_BYTES:]
                kind = CLOSE if isinstance(message, Close) else COMMIT
                yield message.leader, kind, self._covered(kind, message, life), seal
                if choice is not None:
                    yield choice.by, CHOICE, self._choice(message, choice), choice.seal
                if choice is not None and kind == CLOSE:
                    yield from (said for peer, ready in choice.entries for said in self._statements(peer, ready))
            case Vote(served=served, commit=commit):
                for part in (served, commit):
                    if part is not None:
                        yield from self._statements(sender, part)

    def _covered(self, kind: bytes, message: Ready | Close | Mean | Commit, life: bytes = b"") -> bytes:
        return self._statement(*(getattr(message, name) for name in SIGNED[kind]), life=life)

    def _choice(self, of: Close | Commit, choice: Choice) -> bytes:
        return self._statement(of.fragment, of.base, of.key, choice.by, choice.term)

    def _statement(self, *of: object, life: bytes = b"") -> bytes:
        return encoded((self._token, life, *of))
