"""Timing contestants side by side, so that what the machine does meanwhile meets all alike."""

import math
import time

import numpy as np

PAUSE = 0.005  # seconds; OpenMP workers of the contestant before go on spinning for a while
SAMPLE = 0.002  # seconds that one timed sample lasts at least, by repeating short calls


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(calls, rounds):
    """{key: seconds of one call, in every round}, in each of which every one runs, in rotated order. calls: {key: function}."""
    repeats = {}
    for key, call in calls.items():
        call()  # compiles
        repeats[key] = max(1, min(200, int(SAMPLE / min(seconds(call) for _ in range(3)))))
    times, order = {key: [] for key in calls}, list(calls)
    for index in range(rounds):
        for key in order[index % len(order):] + order[: index % len(order)]:
            call, n = calls[key], repeats[key]
            time.sleep(PAUSE)
            call()  # wakes the threads, brings small operands back into the cache, and settles the page tables after a contestant's maps
            times[key].append(seconds(lambda: [call() for _ in range(n)]) / n)
    return {key: np.array(t) for key, t in times.items()}


def summary(times):
    """The median, and half the interquartile range as a share of it."""
    low, middle, high = np.percentile(times, (25, 50, 75))
    if middle <= 0:  # a difference of chains that drowned in noise
        middle = math.nan
    return {"median_s": middle, "spread": (high - low) / 2 / middle}
