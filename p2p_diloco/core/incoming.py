"""Contributions and commits on versions of a shard that this replica has not reached, stored until it reaches them."""

from __future__ import annotations

from .messages import Commit, Contribution
from .roster import Roster
from .rules import Rules
from .version import Version


class Incoming:
    """The contributions and commits of one shard that arrived early."""

    def __init__(self, rules: Rules, roster: Roster) -> None:
        self.rules, self.roster = rules, roster
        self.early: dict[str, Contribution] = {}  # by peer
        self.commits: dict[Version, Commit] = {}  # by base

    def __len__(self) -> int:
        return len(self.early) + len(self.commits)

    def stash(self, sender: str, contribution: Contribution) -> None:
        """Store a contribution unless its author is dead or has left. An author that has not sent a Summary yet will
        soon do so or be found dead."""
        if not self.roster.away(sender):
            self.early[sender] = contribution

    def keep(self, commit: Commit) -> None:
        """Store a commit. If more than ``commits_kept`` are stored, drop the one on the oldest version."""
        self.commits[commit.base] = commit
        if len(self.commits) > self.rules.commits_kept:
            del self.commits[min(self.commits)]

    def take_commit(self, version: Version) -> Commit | None:
        """Remove and return the stored commit on this version, or None. Commits on earlier versions are dropped."""
        self.commits = {base: commit for base, commit in self.commits.items() if base.epoch >= version.epoch}
        return self.commits.pop(version, None)

    def lost(self, peer: str) -> None:
        """Handle a peer that died or left: drop its contribution if the peer has never sent a Summary."""
        if not self.roster.met(peer):
            self.early.pop(peer, None)
