"""Contributions and commits on versions of a shard that this replica has not reached, kept until it has."""

from __future__ import annotations

from .messages import Commit, Contribution
from .roster import Roster
from .rules import Rules
from .version import Version


class Incoming:
    def __init__(self, rules: Rules, roster: Roster) -> None:
        self.rules, self.roster = rules, roster
        self.early: dict[str, Contribution] = {}  # by peer
        self.commits: dict[Version, Commit] = {}  # by base

    def __len__(self) -> int:
        return len(self.early) + len(self.commits)

    def stash(self, sender: str, contribution: Contribution) -> None:
        """Keep a contribution, also from a peer that is not met yet: it will soon be met or found dead."""
        if not self.roster.away(sender):
            self.early[sender] = contribution

    def keep(self, commit: Commit) -> None:
        """Keep a commit; above ``commits_kept`` the oldest is dropped."""
        self.commits[commit.base] = commit
        if len(self.commits) > self.rules.commits_kept:
            del self.commits[min(self.commits)]

    def take_commit(self, version: Version) -> Commit | None:
        """The kept commit on this version, if there is one; commits on earlier versions are dropped."""
        self.commits = {base: commit for base, commit in self.commits.items() if base.epoch >= version.epoch}
        return self.commits.pop(version, None)

    def lost(self, peer: str) -> None:
        """The peer died or left. Drop its contribution if it was never met."""
        if not self.roster.met(peer):
            self.early.pop(peer, None)
