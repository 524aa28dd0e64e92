"""Several threads that make the same calls again and again."""

import threading
from collections.abc import Callable


def run_callers(is_right: Callable[[int], bool], times: int) -> None:
    """Four threads ask ``is_right`` with their number, so often; it must always be."""
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(times):
            if not is_right(i):
                wrong.append(i)

    callers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not wrong
    assert not any(caller.is_alive() for caller in callers)
