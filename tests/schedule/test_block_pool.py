"""BlockPool against a plain model: no leak, no double free, least recently released goes first."""

from __future__ import annotations

import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.schedule.block_pool import BlockPool


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_blocks=st.integers(1, 12))
def test_pool_agrees_with_a_list(seed: int, num_blocks: int) -> None:
    """Random allocations, shares, frees and publications, beside counts and an ordered list kept by hand."""
    rng = random.Random(seed)
    pool = BlockPool(num_blocks)
    tables: list[list[int]] = []
    order = list(range(num_blocks))  # Free blocks, the next one first.
    names: dict[int, bytes] = {}
    for step in range(120):
        action = rng.randrange(4)
        if action == 0:
            count = rng.randrange(num_blocks + 2)
            if count > len(order):
                with pytest.raises(RuntimeError, match=f"{count} blocks wanted, {len(order)} free"):
                    pool.allocate(count)
                continue
            expected, order = order[:count], order[count:]
            for block in expected:
                names.pop(block, None)
            assert pool.allocate(count) == expected
            tables.append(expected)
        elif action == 1 and names:
            block = rng.choice(list(names))
            assert pool.find(names[block]) == block
            pool.share([block])
            if block in order:
                order.remove(block)
            tables.append([block])
        elif action == 2 and tables:
            table = tables.pop(rng.randrange(len(tables)))
            pool.free(table)
            held = {b for t in tables for b in t}
            for block in reversed(table):
                if block not in held:
                    order = [*order, block] if block in names else [block, *order]
        elif action == 3 and (held := [b for t in tables for b in t if b not in names]):
            block = rng.choice(held)
            names[block] = str(step).encode()
            pool.publish(block, names[block])
        assert pool.free_ids() == order
        assert pool.num_free == len(order) and pool.num_used == num_blocks - len(order)
        assert pool.num_published == len(names)
        assert pool.usage == pool.num_used / num_blocks


def test_a_large_pool_costs_arrays_only() -> None:
    """No object per block, neither when the pool is made nor while blocks come and go: a few million must be cheap."""
    before = sys.getallocatedblocks()
    pool = BlockPool(2_400_000)
    table = pool.allocate(10)
    assert sys.getallocatedblocks() - before < 1000
    assert (table, pool.num_free) == (list(range(10)), 2_399_990)
    pool.free(table)
    assert pool.allocate(11) == list(range(11))


def test_impossible_requests_are_errors() -> None:
    """A block cannot be freed twice, nor published by nobody."""
    pool = BlockPool(3)
    table = pool.allocate(2)
    pool.free(table)
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.free(table)
    with pytest.raises(RuntimeError, match="nobody holds"):
        pool.publish(0, b"x")
    with pytest.raises(RuntimeError, match="ever handed out"):
        pool.share([2])
    assert pool.num_free == 3 and sorted(pool.free_ids()) == [0, 1, 2]


def test_a_content_keeps_its_first_block() -> None:
    """Two blocks with one content: the first is found, the second is blank when freed and is reused first."""
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.publish(first, b"same")
    pool.publish(second, b"same")
    pool.free([first, second])
    assert pool.find(b"same") == first and pool.num_published == 1
    assert pool.free_ids() == [second, 2, 3, first]


def test_a_chain_is_evicted_from_its_end() -> None:
    """A beginning is worth more than what follows: without it the rest cannot be found."""
    pool = BlockPool(3)
    table = pool.allocate(3)
    for block in table:
        pool.publish(block, bytes([block]))
    pool.free(table)
    pool.allocate(1)
    assert [pool.find(bytes([b])) is not None for b in table] == [True, True, False]


def test_forgetting_leaves_holders_alone() -> None:
    """After `unpublish_all` nothing is found, and held blocks are still held."""
    pool = BlockPool(3)
    table = pool.allocate(2)
    pool.publish(table[0], b"x")
    pool.unpublish_all()
    assert pool.find(b"x") is None and pool.num_published == 0 and pool.num_used == 2
    pool.publish(table[0], b"x")
    pool.free(table)
    assert pool.num_free == 3 and pool.find(b"x") == table[0]
