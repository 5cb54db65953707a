"""A run of many peers with real ids, and one message of each kind, for the tests of headers and signatures."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import Any

import base58

from p2p_diloco.core import messages as m
from p2p_diloco.core.leases import DataSet, Lease, Table, Use
from p2p_diloco.core.revision import Revision
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.state import State, append, commit_of, founding, key_of, rooted
from p2p_diloco.core.version import ContributionId, ModelVersion, Version
from p2p_diloco.node.headers import opened, pack, unpack

TOKEN, SLICES = b"t" * 16, 24
RULES = Rules(run="r", fragments=(tuple(range(SLICES)), tuple(range(SLICES, 2 * SLICES))), min_peers=1)
SEAL, OF_LIFE = bytes(range(64)), bytes(range(72))


def hashed(what: object, size: int = 16) -> str:
    return blake2b(repr(what).encode(), digest_size=size).hexdigest()


def names(count: int) -> list[str]:
    """Peer ids, sorted."""
    keys = (blake2b(str(number).encode(), digest_size=32).digest() for number in range(count))
    return sorted(base58.b58encode(b"\x00\x24\x08\x01\x12\x20" + key).decode() for key in keys)


def ready(peer: str, base: Version, sequence: int = 300, **changes: Any) -> m.Ready:
    """A contribution of 500 steps with a signature."""
    life = int(hashed(peer, 7), 16)
    id = ContributionId(life, sequence)
    hashes = tuple(hashed((peer, sequence, number), 32) for number in range(SLICES))
    link = 1e7 + life % 1000 + 0.5
    made = m.Ready(0, base, id, id, 500.0, 16000, hashes, link, True, "", (), seal=SEAL)
    return rooted(replace(made, **changes))


class Run:
    """A run at epoch 101 that has counted all its peers in each commit, and what is said of the round after it."""

    def __init__(self, count: int, rules: Rules = RULES) -> None:
        self.rules, self.names, self.me = rules, names(count), names(count)[0]
        base = Version(0, 5_000_000, 100, hashed("chain"))
        state = founding(0, base, self.me, SLICES)
        state = replace(state, links=(*((epoch, hashed(epoch)) for epoch in range(100)), (100, base.chain)))
        self.before, self.state = state, self.after(state, 299)
        self.choice = self.chosen(self.state, 300)
        self.key = key_of(0, self.state.version, self.choice)
        owners = self.state.plan.owners
        self.close = m.Close(0, self.state.version, 0, self.me, 0, self.key, self.choice, owners, OF_LIFE)
        self.commit = replace(commit_of(self.state, self.close, self.hashes, owners, rules), seal=OF_LIFE)

    @property
    def hashes(self) -> tuple[str, ...]:
        return tuple(hashed(("mean", number), 32) for number in range(SLICES))

    def chosen(self, state: State, sequence: int) -> m.Choice:
        entries = tuple((peer, ready(peer, state.version, sequence)) for peer in self.names)
        return m.Choice(self.me, 0, entries, seal=SEAL)

    def after(self, state: State, sequence: int) -> State:
        choice = self.chosen(state, sequence)
        return append(state, choice, key_of(0, state.version, choice), self.hashes, self.rules)

    def sent(self, message: m.Message) -> bytes:
        """The message's bytes, header and payload."""
        header, payload = pack(message, TOKEN)
        return header + (payload or b"")

    def read(self, message: m.Message) -> Any:
        """What another peer makes of a message."""
        header, payload = pack(message, TOKEN)
        found = opened(header, TOKEN, self.rules)
        if payload is None:
            return found
        assert found == len(payload)
        return unpack(payload, self.rules)

    def messages(self) -> list[m.Message]:
        """One message of each kind, or more, without payloads, their hashes, and roots that follow."""
        base, version, key = self.state.version, self.commit.version, self.key
        id, peer, other = ContributionId(2**61, 7), self.names[-1], self.names[len(self.names) // 2]
        data = DataSet("train", 10**6, 3, "f" * 32)
        revision = Revision(2, 0.5, None, "p" * 88, 400, saves=1)
        chains = tuple((epoch, hashed(epoch)) for epoch in range(98, 102))
        summary = m.Summary(
            2**61, "worker", True, ModelVersion(0, 10**7, 202, hashed("model")), chains[:2], False, 1.25e7, revision,
            3.5, False, (101, -1), ((0, (peer, other)),), (chains, chains),
        )  # fmt: skip
        uses = (Use(data, ((0, 500), (700, 1100)), 4000),)
        vote = m.Vote(0, base, 0, peer, turn=7)
        tables = (Table(data, 900, (Lease(peer, 9, 0, 300, 90),), (Lease(other, 9, 500, 600, 80),)),)
        asked = replace(self.state, tables=tables, revision=revision)
        return [
            m.Probe(summary), m.ProbeAck(replace(summary, revision=Revision(), awaits=())), m.Leave(2**61, True),
            ready(self.me, base), ready(self.me, base, uses=uses, grant="g", oldest=ContributionId(2**61 - 1, 9)),
            m.Ready(0, base, id, id, 0.0, 0, (), 1e6, False, seal=SEAL),
            m.Slice(0, base, self.me, id, 23, ""), m.Slice(0, base, peer, id, 23, ""),
            self.close, replace(self.close, choice=None),
            m.Mean(0, base, key, 23, "", self.me, seal=SEAL), m.Lack(0, base, key, ((3, (peer, other)), (9, (peer,)))),
            self.commit, m.Want(0, base, m.What.MEANS, (1, 2, 3), key), m.Want(0, base, m.What.READY),
            m.Claim(0, base, 3, 7), vote, replace(vote, served=self.close, commit=self.commit),
            m.Held(1, version), m.Stale(0, id, version), m.Ask(), m.Ask(1, (4, 5)),
            m.Told((base, version), (self.state.links, (*chains, (version.epoch, version.chain))), True),
            m.Head(0, self.state, tuple(hashed(number) for number in range(SLICES))), m.Head(0, asked),
            m.Part(0, version, 23),
        ]  # fmt: skip
