"""ResponseStore: bounds hold under any load, chains stay whole, owners are kept apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samovar.errors import NotFoundError, OverloadedError
from samovar.server.responses.running import RunningResponse
from samovar.server.responses.schema import ResponseObject
from samovar.server.responses.store import MAX_RUNNING, KeptResponse, ResponseStore


def _response(name: str, size: int = 0, previous: str | None = None, owner: str = "") -> KeptResponse:
    body = b'{"output": [{"id": "out_%s", "text": "%s"}]}' % (name.encode(), b"x" * size)
    items = b'[{"id": "in_%s"}]' % name.encode()
    ids = (f"out_{name}", f"in_{name}")
    return KeptResponse(response_id=name, owner=owner, previous=previous, input_items=items, body=body, item_ids=ids)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4000), st.integers(-1, 30), st.booleans()), max_size=60))
def test_never_grows(steps: list[tuple[int, int, int, bool]]) -> None:
    """Bytes are what is kept, never over the limit; what is kept can be continued, or its root was deleted."""
    store = ResponseStore(20_000)
    deleted, absent = set(), set()
    names: list[str] = []
    for at, (pick, size, previous, deletes) in enumerate(steps):
        before = names[previous % len(names)] if names and previous >= 0 else None
        name = f"r{at}"
        if before is not None and before not in store._kept:
            absent.add(before)
        fits = store.put(_response(name, size, before))
        names.append(name)
        if deletes:
            victim = names[pick % len(names)]
            try:
                store.delete("", victim)
                deleted.add(victim)
            except NotFoundError:
                pass
        kept = list(store._kept.values())
        assert store.num_bytes == sum(response.size for response in kept) <= store.max_bytes
        assert set(store._items.values()) <= set(store._kept)
        assert fits == (name in store._kept) or name in deleted
    for response in list(store._kept.values()):
        # Whoever builds on an answer that is gone built on one that was gone already, or that was deleted since.
        assert response.previous is None or response.previous in {*store._kept, *deleted, *absent}


def test_least_recently_used_goes() -> None:
    """What is used stays; a chain is used as a whole and loses its newest answer first."""
    one = _response("a", 1000).size
    store = ResponseStore(one * 3 + 300)
    for name, previous in (("a", None), ("b", "a"), ("c", None)):
        assert store.put(_response(name, 1000, previous))
    store.get("", "b")
    assert store.put(_response("d", 1000))
    with pytest.raises(NotFoundError):
        store.get("", "c")
    assert [r.response_id for r in store.chain("", "b")] == ["a", "b"]
    assert store.put(_response("e", 1000))
    assert store.put(_response("f", 1000))
    with pytest.raises(NotFoundError, match="previous_response_id"):
        store.chain("", "b")


def test_too_large_and_off() -> None:
    """An answer larger than everything is not kept, and costs nobody else; a store of nothing keeps nothing."""
    store = ResponseStore(5000)
    assert store.put(_response("a"))
    assert not store.put(_response("b", 6000))
    assert len(store) == 1
    assert not ResponseStore(0).put(_response("a"))


def test_missing_ancestor() -> None:
    """A chain with a deleted answer in it is refused by name, never shortened."""
    store = ResponseStore(100_000)
    store.put(_response("a"))
    store.put(_response("b", previous="a"))
    store.delete("", "a")
    with pytest.raises(NotFoundError, match="'a'"):
        store.chain("", "b")


def test_long_chains_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Continuing a chain of n answers touches each of them once, not n times: it runs on the event loop."""
    store = ResponseStore(10_000_000)
    for at in range(300):
        assert store.put(_response(f"r{at}", previous=f"r{at - 1}" if at else None))
    calls: list[str] = []
    touch = store._touch
    monkeypatch.setattr(store, "_touch", lambda response: (calls.append(response.response_id), touch(response))[1])
    assert [response.response_id for response in store.chain("", "r299")] == [f"r{at}" for at in range(300)]
    assert calls == ["r299"]
    assert list(store._kept) == [f"r{at}" for at in range(299, -1, -1)]


def test_owners_are_apart() -> None:
    """Another key's answers do not exist, by id, by item, or as a chain."""
    store = ResponseStore(100_000)
    store.put(_response("a", owner="alice"))
    assert store.find_item("alice", "out_a") == {"id": "out_a", "text": ""}
    assert store.find_item("alice", "in_a") == {"id": "in_a"}
    assert store.find_item("bob", "out_a") is None
    for use in (store.get, store.chain, store.delete):
        with pytest.raises(NotFoundError):
            use("bob", "a")


async def test_running_is_bounded() -> None:
    """So many run in the background and no more; a long stream keeps its newest events, and says what is gone."""
    store = ResponseStore(MAX_RUNNING * 1000)
    runs = [
        RunningResponse(ResponseObject(id=f"r{i}", created_at=0, status="queued", model="m"), "")
        for i in range(MAX_RUNNING)
    ]
    for run in runs:
        store.begin(run)
    with pytest.raises(OverloadedError):
        store.begin(runs[0])
    run = runs[0]
    slow = run.follow(-1)
    run.add(b"0" * 400)
    assert await anext(slow) == b"0" * 400
    for number in range(1, 6):
        run.add(b"%d" % number * 400)
        assert sum(map(len, run.frames)) <= 1000
    assert run.frames[-1] == b"5" * 400 and run.first_frame + len(run.frames) == 6
    assert b"events_dropped" in await anext(slow)
    run.end()
    kept = [piece async for piece in run.follow(run.first_frame - 1)]
    assert b"".join(kept) == b"".join(run.frames)
    store.end(run)
    assert store.running("", "r0") is None
