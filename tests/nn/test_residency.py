"""Which experts get slots: a pure policy, replayed over traces."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefuse.nn.residency import MOST, WINDOW, Residency, choose, replay


def zipf(steps: int, experts: int, top_k: int, seed: int = 0) -> list[list[int]]:
    import random

    draw = random.Random(seed)
    order = draw.sample(range(experts), experts)
    trace = []
    for _ in range(steps):
        chosen: set[int] = set()
        while len(chosen) < top_k:
            chosen |= set(draw.choices(order, [1 / (n + 1) for n in range(experts)]))
        trace.append(sorted(chosen))
    return trace


def test_a_trace_gives_hits_moves_and_bytes() -> None:
    trace = zipf(2000, 64, 4)
    best = sum(n for _, n in Counter(e for ids in trace for e in ids).most_common(16)) / 8000
    done = replay(trace, 64, 16, expert_bytes=100)
    assert done.hits + done.misses == 8000
    assert done.bytes == 100 * done.moves
    assert 0.9 * best < done.rate <= best
    assert replay(trace, 64, 16, delay=20).rate > 0.9 * best


def test_a_load_that_is_known_never_moves_anything() -> None:
    trace = zipf(500, 32, 4)
    count = Counter(e for ids in trace for e in ids)
    done = replay(trace, 32, 8, load=[count[e] for e in range(32)])
    assert done.moves == 0
    assert done.hits == sum(n for _, n in count.most_common(8))


def test_even_use_moves_little() -> None:
    trace = [[(7 * n + k) % 32 for k in range(4)] for n in range(2000)]
    assert replay(trace, 32, 8).moves < 50


def test_all_in_slots_or_none() -> None:
    trace = zipf(200, 16, 2)
    assert replay(trace, 16, 16).rate == 1.0
    assert replay(trace, 16, 0) == replay(trace, 16, 0, delay=5)
    assert replay(trace, 16, 0).hits == 0


def test_a_slot_that_is_filled_is_left_alone_until_it_is() -> None:
    layer = Residency(4, 1)
    for _ in range(WINDOW):
        layer.note({3: 1, -1: 5, 4: 5, 99: 1})
    assert layer.look() == [(3, 0)]
    layer.begin(3, 0)
    for _ in range(2 * WINDOW):
        layer.note({2: 50})
    assert layer.look() == []
    assert layer.others() == [0, 1, 2, 3]
    layer.finish(0)
    assert (layer.slots, layer.misses, layer.hits) == ([3], 101 * WINDOW - 100 * WINDOW + 100 * WINDOW, 0)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=40), st.integers(0, 40), st.sets(st.integers(0, 39)), st.data())
def test_moves_are_legal(uses: list[float], count: int, moving: set[int], data: st.DataObject) -> None:
    slots = data.draw(st.permutations(range(len(uses))))[:count]
    slots = [-1 if n in moving else e for n, e in enumerate(slots)]
    found = choose(uses, slots, moving)
    assert len(found) <= MOST
    assert len({expert for expert, _ in found}) == len({slot for _, slot in found}) == len(found)
    for expert, slot in found:
        assert expert not in slots
        assert slot not in moving
        assert slots[slot] < 0 or uses[expert] > uses[slots[slot]]


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_the_table_names_each_expert_once(count: int) -> None:
    layer = Residency(5, count)
    slot, rank, other = layer.table()
    assert [row[0] for row in (slot, rank, other)] == [row[-1] for row in (slot, rank, other)] == [-1] * 3
    for e in range(5):
        assert (slot[e + 1] >= 0) == (other[e + 1] < 0) == (rank[e + 1] < 0)
        assert other[e + 1] in (-1, e)
        if slot[e + 1] >= 0:
            assert layer.slots[slot[e + 1]] == e
        else:
            assert layer.others()[rank[e + 1]] == e
