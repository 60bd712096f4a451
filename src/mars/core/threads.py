"""Threads that work for one request, beside steps that all of them wait for."""

import os
import threading
from contextlib import suppress

NICENESS = 10


def lower_priority() -> None:
    """Have the thread that calls this give way to the others of its process, where the system can do so."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # on Linux a thread has its own
