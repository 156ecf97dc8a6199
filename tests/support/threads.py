"""Work that several threads do at once."""

import threading


def run_in_threads(work, count=6):
    """Call ``work`` with 0, 1, ... in a thread each, and wait for all."""
    workers = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
