"""The arithmetic of large swarms."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scale import page, swarm
from benchmarks.scale.failures import NOTICE_S, Commits, kept_share

RECORD = Path(page.__file__).parents[1] / "results" / "scale_2026-11-18.md"
SMALL = replace(page.EIGHT, stages=4, microbatches=8)


@pytest.mark.parametrize("lifetime_s", [3e3, 1e4, 1e6])
def test_what_is_kept_is_what_lives_drawn_at_random_keep(lifetime_s):
    commits, draw = Commits(send_s=100, fetch_s=20), random.Random(0)
    passed = kept = 0.0
    for _ in range(20_000):
        undisturbed = draw.expovariate(8 / lifetime_s)
        whole = max(0, int((undisturbed - commits.send_s) // commits.interval_s))
        kept, passed = kept + whole * commits.interval_s, passed + undisturbed + NOTICE_S + commits.fetch_s
    assert kept_share(commits, peers=8, lifetime_s=lifetime_s) == pytest.approx(kept / passed, rel=0.03)


def test_replicas_are_as_many_times_as_fast_until_the_hub_is_full():
    peers = [swarm.AVERAGE] * 4
    one, few, many = (replace(SMALL, replicas=count).tokens_per_second(peers) for count in (1, 2, 10_000))
    assert few == pytest.approx(2 * one, rel=0.02)
    nbytes = 3 * 4096 * (2 * 40 + 2 * 40)  # a token's, of states and gradients at three boundaries
    assert many < swarm.TOKENS * SMALL.hub_bps / 8 / nbytes


def test_slower_machines_and_links_slow_a_pipeline_down():
    draw = random.Random(0)
    drawn = [swarm.drawn(swarm.AVERAGE, draw) for _ in range(4)]
    slow = [replace(peer, flops=peer.flops / 2, link=replace(peer.link, up_bps=peer.link.up_bps / 2)) for peer in drawn]
    assert SMALL.tokens_per_second(slow) < SMALL.tokens_per_second(drawn) / 1.5
    first, again, other = (SMALL.drawn_tokens_per_second(2, seed=seed) for seed in (0, 0, 1))
    assert first == again != other


def test_large_messages_are_counted_in_pieces():
    assert page.messages_per_step(SMALL) == 3 * (8 * 2 + 2)
    dense = replace(SMALL, width=None)
    assert page.messages_per_step(dense) == 3 * (8 * (33 + 32) + 2)  # 32 MiB, and the ids behind the states


def test_the_committed_page_has_the_speed_that_is_computed():
    tokens_per_second = page.EIGHT.tokens_per_second([swarm.AVERAGE] * 32)
    assert f"| {page.EIGHT.name} | {tokens_per_second:,.0f} |" in RECORD.read_text()
