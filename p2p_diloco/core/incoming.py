"""Storage for contributions and commits that arrived early: this replica has not yet reached the versions that they
were made on."""

from __future__ import annotations

from collections import Counter

from .messages import Commit, Contribution
from .roster import Roster
from .rules import Rules
from .version import Version


class Incoming:
    """The contributions and commits of one shard that arrived before the version that they were made on."""

    def __init__(self, rules: Rules, roster: Roster) -> None:
        self.rules, self.roster = rules, roster
        self.early: dict[str, Contribution] = {}  # by peer
        self.commits: dict[tuple[Version, str], Commit] = {}  # by base and sender

    def __len__(self) -> int:
        return len(self.early) + len(self.commits)

    def stash(self, sender: str, contribution: Contribution) -> None:
        """Store a contribution that arrived early, unless its author is dead or has left. An author that has not sent a
        Summary yet will soon send one or be found dead."""
        if not self.roster.away(sender):
            self.early[sender] = contribution

    def keep(self, sender: str, commit: Commit) -> None:
        """Store a commit. If more than ``commits_kept`` are stored, take the sender that has most commits here, and
        drop its commit on the oldest version. So no peer displaces the commits of other peers."""
        self.commits[commit.base, sender] = commit
        if len(self.commits) > self.rules.commits_kept:
            most = Counter(sender for _, sender in self.commits).most_common(1)[0][0]
            del self.commits[min(key for key in self.commits if key[1] == most)]

    def take_commits(self, version: Version) -> list[tuple[str, Commit]]:
        """Remove and return the stored commits on this version, each with its sender. Drop commits on earlier
        versions."""
        found = [(sender, commit) for (base, sender), commit in self.commits.items() if base == version]
        self.commits = {
            key: commit for key, commit in self.commits.items() if key[0].epoch >= version.epoch and key[0] != version
        }
        return found

    def reaches(self, version: Version | None) -> bool:
        """Whether a commit on this version is stored."""
        return any(base == version for base, _ in self.commits)

    def lost(self, peer: str) -> None:
        """Handle the loss of a peer that died or left: drop its contribution if no Summary of this peer has ever
        arrived."""
        if not self.roster.met(peer):
            self.early.pop(peer, None)
