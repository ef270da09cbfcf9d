"""Processor time on one core: what a codec costs, whatever else the machine does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def cpu_s(work: Callable[[], object]) -> float:
    """Return the processor seconds of *work*, those of all threads of this process."""
    started = time.process_time()
    work()
    return time.process_time() - started


@contextmanager
def one_core() -> Iterator[None]:
    """Keep this thread, and those it starts, on one core until the block ends."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
