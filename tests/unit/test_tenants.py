"""The gate of a tenant: never more in the engine than it may have, nobody forgotten, nothing left."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from runnerd_service.config import TenantConfig
from runnerd_service.frontend.tenants import Tenants

NAMES = ("a", "b", "")


@dataclass
class World:
    """Outputs as whoever drives the gate knows them."""

    tenants: Tenants
    limits: TenantConfig
    tenant: dict[int, str] = field(default_factory=dict)
    priority: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    started: list[int] = field(default_factory=list)
    open: list[int] = field(default_factory=list)

    def add(self, name: str, priority: int, num_tokens: int) -> None:
        uid = len(self.tenant)
        self.tenant[uid], self.priority[uid], self.tokens[uid] = name, priority, num_tokens
        self.open.append(uid)
        self.tenants.open(name, uid, 1)
        self.tenants.start(uid, priority, num_tokens, lambda: self.started.append(uid))

    def close(self, uid: int) -> None:
        self.open.remove(uid)
        self.tenants.close(uid)
        self.tenants.close(uid)  # which is harmless

    def check(self) -> None:
        assert len(set(self.started)) == len(self.started)
        num_held = 0
        for name in NAMES:
            running = [uid for uid in self.open if uid in self.started and self.tenant[uid] == name]
            held = [uid for uid in self.open if uid not in self.started and self.tenant[uid] == name]
            num_held += len(held)
            if not name:
                assert held == []
                continue
            assert len(running) <= self.limits.max_running
            num_tokens = sum(self.tokens[uid] for uid in running)
            assert len(running) <= 1 or num_tokens <= self.limits.max_tokens
            if held:  # the first of them does not fit
                first = min(held, key=lambda uid: (self.priority[uid], uid))
                assert running
                is_full = len(running) == self.limits.max_running
                assert is_full or num_tokens + self.tokens[first] > self.limits.max_tokens
        assert self.tenants.num_held == num_held
        figures = self.tenants.figures()
        for name in ("a", "b"):
            there = [uid for uid in self.open if self.tenant[uid] == name]
            if name in figures:
                assert figures[name].num_running + figures[name].num_waiting == len(there)
            else:
                assert there == []


ADDS = st.tuples(st.sampled_from(NAMES), st.integers(-2, 2), st.integers(1, 60))
CLOSES = st.integers(0, 30)


@settings(deadline=None, derandomize=True, database=None)
@given(st.integers(1, 3), st.integers(20, 80), st.lists(ADDS | CLOSES, max_size=40))
def test_the_gate_is_as_wide_as_it_says_and_forgets_nobody(max_running: int, max_tokens: int, steps: list) -> None:
    limits = TenantConfig(max_running=max_running, max_tokens=max_tokens)
    world = World(Tenants(limits), limits)
    for step in steps:
        if isinstance(step, tuple):
            world.add(*step)
        elif world.open:
            world.close(world.open[step % len(world.open)])
        world.check()
    while world.open:
        world.close(world.open[0])
        world.check()
    assert world.tenants.figures() == {}


def test_an_output_that_was_heard_runs_and_one_that_was_not_waits() -> None:
    tenants = Tenants(TenantConfig())
    for uid in (1, 2, 3):
        tenants.open("a", uid, 10)
        tenants.start(uid, 0, 20, lambda: None)
    tenants.heard(2)
    tenants.heard(2)
    figures = tenants.figures()["a"]
    assert (figures.num_running, figures.num_waiting) == (1, 2)
    tenants.note_ended("a", 10, 5)
    tenants.note_refused("a")
    tenants.note_refused("")
    figures = tenants.figures()
    assert list(figures) == ["a"]
    assert (figures["a"].num_requests, figures["a"].num_refused) == (1, 1)
    assert (figures["a"].prompt_tokens, figures["a"].generation_tokens) == (10, 5)
