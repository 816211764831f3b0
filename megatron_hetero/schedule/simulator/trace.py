"""Timelines in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

Every lane (simulated, rehearsed) is a process of its own, so that they lie below each other.  In it
each stage is a thread, and so is each direction of a boundary.  Memory is a counter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_hetero.schedule.parts import MessageSpan
from megatron_hetero.schedule.simulator.timelines import StageTimeline

_MICROSECONDS = 1e6
_COLORS = {
    "forward": "thread_state_running",
    "backward": "thread_state_runnable",
    "backward_input": "thread_state_runnable",
    "backward_weight": "thread_state_iowait",
    "gradient_sync": "terrible",
    "step": "grey",
    "weight_sync": "terrible",
}
"""Names of the format's own palette."""


def chrome_trace(
    lanes: Mapping[str, Sequence[StageTimeline]],
    messages: Mapping[str, Sequence[MessageSpan]] | None = None,
) -> dict[str, Any]:
    """Build the JSON object of a trace file.

    Args:
        lanes: name of the lane -> its stages; times in seconds from the step's begin.
        messages: name of the lane -> what its boundaries carried.
    """
    events: list[dict[str, Any]] = []
    # A process for each lane, named by its first event.
    for pid, (name, timelines) in enumerate(lanes.items(), start=1):
        events.append(_name("process_name", pid, 0, name))
        # Threads: the stages from 1 on, then the directions of boundaries.
        threads = {(t.replica, t.stage): tid for tid, t in enumerate(timelines, start=1)}
        for timeline in timelines:
            tid = threads[timeline.replica, timeline.stage]
            place = f"replica {timeline.replica} stage {timeline.stage}"
            where = f"{place}: {', '.join(timeline.devices)}" if timeline.devices else place
            events.append(_name("thread_name", pid, tid, where))
            events.extend(_operations(timeline, pid, tid))
            events.extend(_memory(timeline, pid, place))
        carried = (messages or {}).get(name, ())
        events.extend(_messages(carried, pid, len(threads) + 1))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _operations(timeline: StageTimeline, pid: int, tid: int) -> Iterator[dict[str, Any]]:
    for span in timeline.operations:
        # Exchange and update belong to no micro-batch.
        number = "" if span.micro_batch < 0 else f" {span.micro_batch}"
        event = _slice(f"{span.kind}{number}", pid, tid, span.start_s, span.end_s)
        event["cat"] = span.kind
        event["cname"] = _COLORS[span.kind]
        event["args"] = {"micro_batch": span.micro_batch, "chunk": span.chunk}
        yield event


def _memory(timeline: StageTimeline, pid: int, place: str) -> Iterator[dict[str, Any]]:
    for time_s, num_bytes in timeline.memory:
        yield {
            "name": f"memory of {place}",
            "ph": "C",
            "pid": pid,
            "ts": time_s * _MICROSECONDS,
            "args": {"GiB": num_bytes / (1 << 30)},
        }


def _messages(
    messages: Sequence[MessageSpan], pid: int, first_tid: int
) -> Iterator[dict[str, Any]]:
    # One thread for each pair of stages and direction that carried anything.
    channels = sorted({(m.pipeline, m.sender, m.receiver) for m in messages})
    threads = {channel: tid for tid, channel in enumerate(channels, start=first_tid)}
    for (replica, sender, receiver), tid in threads.items():
        yield _name("thread_name", pid, tid, f"replica {replica} link {sender} -> {receiver}")
    for message in messages:
        tid = threads[message.pipeline, message.sender, message.receiver]
        event = _slice(str(message.operation), pid, tid, message.start_s, message.end_s)
        event["cat"] = "message"
        event["args"] = {"posted_s": message.posted_s, "arrival_s": message.arrival_s}
        yield event


def _slice(name: str, pid: int, tid: int, start_s: float, end_s: float) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": start_s * _MICROSECONDS,
        "dur": (end_s - start_s) * _MICROSECONDS,
    }


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
