"""A member of a private run with a client of its own: what it sends is refused, clipped or passed over, with a reason
in the status, and the honest members go on with equal digests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from dataclasses import replace

import msgpack
import pytest
from liar import TRIES, ZEROS, liar, until_told
from nodes import RUN_ID, SLICES, STEP_S, Field, RealNode

from p2p_diloco.config import RunConfig
from p2p_diloco.core.messages import Ask, Claim, Vote
from p2p_diloco.core.version import ContributionId
from p2p_diloco.net.framing import Bulk, FrameStream, Message, encode
from p2p_diloco.net.interface import Limits, Traffic
from p2p_diloco.net.relay import RELAY
from p2p_diloco.node.board import name_of
from p2p_diloco.node.headers import pack
from p2p_diloco.node.inbox import FETCHES_AT_ONCE, FETCHES_PER_S
from p2p_diloco.node.run import Run
from p2p_diloco.node.run_record import BOARD, RunRecord
from p2p_diloco.node.wire import Audit, Copy, OfMean
from tests.net.members import invitation

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


def test_a_member_that_signs_two_choices_of_one_attempt_is_expelled(field: Field) -> None:
    """One honest node gets both, and shows them to the others."""

    async def row() -> None:
        async with liar(field, "forked") as member:
            await member.look()
            closes = [member.close(member.choice((member.id, member.contribution()))) for _ in range(2)]
            for close in closes:  # both on one base, whatever commits come meanwhile
                await member.tell(field.nodes[0].id, close)
            telling = asyncio.create_task(field.tells(member.name, "it signed two Closes of one attempt", nodes=3))
            while not telling.done():
                await member.tell_all(Ask())
                await asyncio.wait({telling}, timeout=0.2)
            await telling
            await field.goes_on()

    field.do(row())


def test_a_commit_in_a_leaders_name_is_ignored(field: Field) -> None:
    """It counts an incarnation of 2^62 of an honest peer, after which no contribution of that peer would fit."""

    async def row() -> None:
        async with liar(field, "forger") as member:

            async def say() -> None:
                await member.look()
                ready = member.contribution(id=ContributionId(2**62, 1), oldest=ContributionId(2**62, 1))
                choice = member.choice((field.nodes[1].id, ready), by=member.leader)
                seal = b"s" * 72
                forged = member.commit(replace(choice, seal=seal[:64]), member.leader, seal=seal)
                await member.tell_all(forged)

            await until_told(member, "has not signed its commit", say)
            await field.goes_on()

    field.do(row())


def test_a_claim_of_an_enormous_term_is_refused(field: Field) -> None:
    """No later claim could exceed 2^40. Each vote that it gets is for another peer."""

    async def row() -> None:
        async with liar(field, "claimant") as member:
            for _ in range(TRIES):
                await member.tell_all(Claim(0, (await member.look()).version, 2**40))
                await asyncio.sleep(0.1)
            votes = member.got(Vote)
            assert votes
            assert all(vote.leader != member.id and vote.term < 2**20 for vote in votes)
            await field.goes_on()

    field.do(row())


def test_a_flood_of_requests_for_states_is_refused(field: Field) -> None:
    """The holder of an invitation gets the whole model sixteen times, and then once a second, however many peers it
    starts; rounds go on meanwhile."""

    async def row() -> None:
        async with contextlib.AsyncExitStack() as members:
            invited = invitation(name="greedy")
            greedy = [await members.enter_async_context(liar(field, "greedy", invited)) for _ in range(3)]
            answers, before, began = list[str](), field.epoch, time.monotonic()
            while len(answers) < 400 or field.epoch < before + 5:
                for member in greedy:
                    answers += await member.tell_all(Ask(0, tuple(range(SLICES))))
            most = FETCHES_AT_ONCE + (time.monotonic() - began) * FETCHES_PER_S
            assert 0 < answers.count("") <= len(field.nodes) * most
            await field.tells("greedy", "the sender, or others with its invitation, asked for too many", nodes=3)
            await field.goes_on()

    field.do(row())


def test_who_says_that_it_is_ahead_and_sends_nothing_stops_the_others_only_for_a_while() -> None:
    """In asynchronous mode it is believed, and asked for that state in vain. Then the others go on with their own."""
    field = Field(mode="async", round_timeout=None)

    async def row() -> None:
        for node in field.nodes:
            node.step_s = 1.0  # else no peer is ever behind for long enough
        async with liar(field, "boaster") as member:
            member.ahead = 1000
            await member.take_part()
            await field.tells("boaster", "it says that it is ahead, and has sent nothing")
            await field.goes_on(4)

    try:
        field.do(row())
    finally:
        field.end()


@pytest.mark.parametrize("forks", [False, True])
def test_a_greater_model_that_one_member_tells_is_not_taken(field: Field, forks: bool) -> None:
    """It says that it is a thousand epochs ahead, on the run's lineage or on one of its own, and would hand over zeros
    as parameters. Nobody asks for them, and rounds go on as before."""

    async def row() -> None:
        for node in field.nodes:
            node.step_s = 1.0  # else no peer seems to be behind for long enough
        async with liar(field, "usurper") as member:
            member.ahead, member.forks = 1000, forks
            await member.take_part()
            await member.until(lambda: [ask for ask in member.got(Ask) if ask.fragment is None], "asked what it holds")
            await field.goes_on(8)
            assert not [ask for ask in member.got(Ask) if ask.fragment is not None]
            assert field.epoch < member.version().epoch

    try:
        field.do(row())
    finally:
        for node in field.nodes:
            node.step_s = STEP_S


def test_few_means_are_audited_at_a_members_request(field: Field) -> None:
    """Whatever it asks of which node: each shows its own means once, and gets the contributions to others' a few times
    for it."""

    async def row() -> None:
        async with liar(field, "auditor") as member:
            answers, asked = list[str](), 0
            await member.take_part()
            for _ in range(10 * TRIES):
                for commit in member.commits[asked:]:
                    of = enumerate(zip(commit.owners, commit.hashes, strict=True))
                    for number, (owner, hash) in of:
                        answers += await member.tell_all(Audit(OfMean(0, commit.key, number, owner, hash)))
                asked = len(member.commits)
                if any("has audited many means for the sender" in answer for answer in answers):
                    break
                await asyncio.sleep(0.2)
            assert any("has audited many means for the sender" in answer for answer in answers), answers
            await field.tells("auditor", "has audited many means for the sender")
            copies = Counter((copy.mean, copy.author) for copy in member.got(Copy))
            assert 0 < max(copies.values()) <= len(field.nodes)
            await field.goes_on()

    field.do(row())


def test_streams_of_one_byte_a_second_are_cut(field: Field) -> None:
    """Frames that come so slowly, and payloads: rounds go on meanwhile, and no stream stays longer than a payload of
    its length may take."""

    async def row() -> None:
        async with liar(field, "snail") as member:
            await member.look()
            header, _ = pack(member.part(member.contribution(), 0), member.run.rules, member.token)
            said = encode(Bulk(header, len(ZEROS)))
            streams = []
            for node in field.nodes:
                for begun in (1, 1, len(said), len(said)):
                    pipe, _ = await member.transport._exchange._dial(node.id)
                    pipe.write(said[:begun])
                    streams.append((pipe, begun))
            began = field.epoch
            for passed_s in range(30):
                for pipe, begun in streams:
                    if pipe.ended is None:
                        pipe.write((said + ZEROS)[begun + passed_s :][:1])
                await asyncio.sleep(1.0)
                if field.epoch >= began + 5 and all(pipe.ended is not None for pipe, _ in streams):
                    break
            assert field.epoch >= began + 5
            assert all(pipe.ended is not None for pipe, _ in streams)
            await field.goes_on()

    field.do(row())


def test_junk_in_the_dht_hides_nothing(field: Field, caplog: pytest.LogCaptureFixture) -> None:
    """1 KiB of junk, and a run's record with other settings and a lower name than the true one, beside the true record;
    junk beside the peers' records. A newcomer joins the true run, and all statuses are read."""

    async def row() -> None:
        first = field.nodes[0]
        async with liar(field, "litterer") as member:
            true = min(await BOARD.fetch(first.transport, RUN_ID))
            for number in range(10_000):
                run = Run(RUN_ID, RunConfig(**{**field.config, "outer_lr": number / 7}), field.layout)
                false = RunRecord.founding(run, member.id, 0.0).pack()
                if name_of(false) < true:
                    break
            assert name_of(false) < true
            for value in (os.urandom(900), false):
                assert await BOARD.store(member.transport, RUN_ID, value)
            for bucket in range(4):
                await member.transport.store(f"{RUN_ID}/peers/{bucket}", member.id, os.urandom(900), 60.0)
            newcomer = RealNode("newcomer", invitation(name="newcomer"), {})
            await newcomer.begin(field.addresses)
            found = next(message for message in newcomer.said if message["kind"] == "run")
            assert found["config"]["outer_lr"] == field.config["outer_lr"]
            assert {node.id for node in field.nodes} <= set(await field.statuses())
            await field.goes_on()
            await newcomer.end()
        await field.goes_on()

    field.do(row())
    assert "the run key did not sign it" in caplog.text


def test_a_member_has_no_other_host_dialled_back(field: Field) -> None:
    """A request to be dialled back at another IP address than its own is answered, and not followed."""

    async def row() -> None:
        dialled = list[str]()
        server = await asyncio.start_server(lambda *_: dialled.append("dialled"), "127.0.0.3", 0)
        address = f"/ip4/127.0.0.3/tcp/{server.sockets[0].getsockname()[1]}"
        async with liar(field, "caller") as member:
            asked = {"check": [address], "member": member.transport.membership.chain}
            for node in field.nodes:
                pipe, _ = await member.transport._dht.daemon.open_stream(node.id, RELAY, timeout_s=20.0)
                pipe.write(encode(Message(msgpack.packb(asked))))
                frames = FrameStream(pipe, node.id, Limits(), Traffic())
                answer = await frames.read(idle_s=20.0, frame_s=20.0)
                assert isinstance(answer, Message)
                assert "it isn't at 127.0.0.1" in str(msgpack.unpackb(answer.header))
                pipe.abort()
        assert dialled == []
        server.close()
        await field.goes_on()

    field.do(row())
