"""Work in threads: in order, and given up when nobody asks for more."""

import threading

from quantkit.storage import parallel_checks


def test_results_come_in_the_order_of_the_items(monkeypatch):
    monkeypatch.setattr(parallel_checks, "cores", lambda: 2)
    gates = [threading.Event() for _ in range(2)]

    def work(item):
        # The second is done first.
        if item == 0:
            assert gates[1].wait(10)
        elif item == 1:
            gates[1].set()
        return item * 10

    assert list(parallel_checks.in_threads(work, range(20))) == [item * 10 for item in range(20)]


def test_what_is_not_asked_for_is_given_up(monkeypatch):
    monkeypatch.setattr(parallel_checks, "cores", lambda: 1)
    done = []
    first, release = threading.Event(), threading.Event()

    def work(item):
        done.append(item)
        if item:
            first.set()
            assert release.wait(10)
        return item

    found = parallel_checks.in_threads(work, range(100))
    assert next(found) == 0
    assert first.wait(10)
    threading.Timer(0.05, release.set).start()
    found.close()
    assert done == [0, 1]
