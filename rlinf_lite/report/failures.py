"""What failed in a supervised run, how that was known, and what getting over it took."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlinf_lite.report.run_files import Line


@dataclass
class Failure:
    """One row: a failover, or something that was only noticed."""

    time: float
    who: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    again: str = "nothing"
    """What was started again."""
    workers: set[str] = field(default_factory=set)
    """That were started again."""
    seconds: float | None = None
    steps_lost: int | None = None

    def add(self, detected: Line) -> None:
        self.time = min(self.time, detected["time"])
        for known, value in (
            (self.who, _worker(detected)),
            (self.kinds, detected["kind"]),
            (self.evidence, detected["evidence"].split("\n")[0]),
        ):
            if value not in known:
                known.append(value)


def read_failures(events: list[Line]) -> list[Failure]:
    """The rows, in the order of time."""
    rows: list[Failure] = []
    by_id: dict[str, Failure] = {}
    unsettled: list[Line] = []  # noticed, and not yet part of a failover

    def settle(failure: Failure, workers: set[str]) -> None:
        """Count what was noticed of these workers to a failure."""
        for detected in [detected for detected in unsettled if _worker(detected) in workers]:
            failure.add(detected)
            unsettled.remove(detected)

    def only_noticed(detected: Line) -> None:
        rows.append(Failure(detected["time"]))
        rows[-1].add(detected)

    for event in events:
        kind, failure = event["event"], by_id.get(event.get("id", ""))
        if kind == "master_restarted":
            evidence = [event["problem"]] if event.get("problem") else []
            rows.append(Failure(event["time"], ["master"], ["crashed"], evidence, "the master"))
        elif kind == "detected" and event["kind"] == "slow":
            only_noticed(event)
        elif kind == "detected":
            unsettled.append(event)
        elif kind == "failover":
            if failure is None:
                failure = by_id[event["id"]] = Failure(event["time"])
                rows.append(failure)
            failure.workers |= {f"{group}[{rank}]" for group, ranks in event["ranks"].items() for rank in ranks}
            groups = [f"{group}[{', '.join(map(str, ranks))}]" for group, ranks in event["ranks"].items()]
            failure.again = ", ".join(groups) or f"the {event['level']}"
            if event["level"] == "fail":
                failure.again = "nothing: the job ended"
            settle(failure, {_worker(detected) for detected in unsettled})
            failure.who = failure.who or ["trainer"]
            failure.evidence = failure.evidence or [event["reason"].split("\n")[0]]
        elif kind in ("recovered", "recovery_failed") and failure is not None:
            settle(failure, failure.workers)
            failure.seconds, failure.steps_lost = event["seconds"], event.get("steps_lost")
    for detected in unsettled:
        only_noticed(detected)
    return sorted(rows, key=lambda row: row.time)


def _worker(detected: Line) -> str:
    return f"{detected['group']}[{detected['rank']}]"
