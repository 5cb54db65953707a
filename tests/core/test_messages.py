"""Messages are plain data; a plan answers which peers it names."""

from __future__ import annotations

from p2p_diloco.core.messages import Plan


def test_a_plan_names_its_group_and_its_succession() -> None:
    plan = Plan(("a", "b"), ("b", "c"))
    assert [plan.names(peer) for peer in "abcd"] == [True, True, True, False]
