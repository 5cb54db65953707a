"""Storage for contributions and commits that arrived early: this replica has not yet reached the versions that they
were made on."""

from __future__ import annotations

from .messages import Commit, Contribution
from .roster import Roster
from .rules import Rules
from .version import Version


class Incoming:
    """The contributions and commits of one shard that arrived before the version that they were made on."""

    def __init__(self, rules: Rules, roster: Roster) -> None:
        self.rules, self.roster = rules, roster
        self.early: dict[str, Contribution] = {}  # by peer
        self.commits: dict[Version, Commit] = {}  # by base

    def __len__(self) -> int:
        return len(self.early) + len(self.commits)

    def stash(self, sender: str, contribution: Contribution) -> None:
        """Store a contribution that arrived early, unless its author is dead or has left. An author that has not sent a
        Summary yet will soon send one or be found dead."""
        if not self.roster.away(sender):
            self.early[sender] = contribution

    def keep(self, commit: Commit) -> None:
        """Store a commit that arrived early. If more than ``commits_kept`` are then stored, drop the commit that was
        made on the oldest version."""
        self.commits[commit.base] = commit
        if len(self.commits) > self.rules.commits_kept:
            del self.commits[min(self.commits)]

    def take_commit(self, version: Version) -> Commit | None:
        """Remove and return the stored commit that was made on this version; return None if there is none. Drop the
        stored commits that were made on earlier versions."""
        self.commits = {base: commit for base, commit in self.commits.items() if base.epoch >= version.epoch}
        return self.commits.pop(version, None)

    def lost(self, peer: str) -> None:
        """Handle the loss of a peer that died or left: drop its contribution if no Summary of this peer has ever
        arrived."""
        if not self.roster.met(peer):
            self.early.pop(peer, None)
