"""What failed in a supervised run, how that was known, and what getting over it took."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

from rlinf_lite.report.axes import duration, percent
from rlinf_lite.report.run_files import Line, RunFiles


@dataclass
class Failure:
    """One row: a failover, or something that was only noticed."""

    time: float
    who: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    again: str = ""
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
    unsettled: list[Line] = []
    for event in events:
        kind, failure = event["event"], by_id.get(event.get("id", ""))
        if kind == "master_restarted":
            rows.append(Failure(event["time"], ["master"], ["crashed"], [event.get("problem", "")], "the master"))
        elif kind == "detected" and event["kind"] == "slow":
            rows.append(_only_noticed(event))
        elif kind == "detected":
            unsettled.append(event)
        elif kind == "failover":
            if failure is None:
                failure = by_id[event["id"]] = Failure(event["time"])
                rows.append(failure)
            failure.workers |= {f"{group}[{rank}]" for group, ranks in event["ranks"].items() for rank in ranks}
            failure.again = _started_again(event)
            _settle(failure, unsettled, {_worker(detected) for detected in unsettled})
            failure.who = failure.who or ["trainer"]
            failure.evidence = failure.evidence or [event["reason"].split("\n")[0]]
        elif kind in ("recovered", "recovery_failed") and failure is not None:
            _settle(failure, unsettled, failure.workers)
            failure.seconds, failure.steps_lost = event["seconds"], event.get("steps_lost")
    return sorted(rows + [_only_noticed(event) for event in unsettled], key=lambda row: row.time)


def failure_section(run: RunFiles) -> str:
    """A table and its totals; empty where nothing failed."""
    rows = read_failures(run.events)
    if not rows:
        return ""
    start = min(event["time"] for event in run.events)
    body = "".join(
        f"<tr><td class=num>{duration(row.time - start)}<td>{_shown(row.who)}<td>{_shown(row.kinds)}"
        f"<td class=wrap>{_shown(row.evidence)}<td class=wrap>{escape(row.again or 'nothing')}"
        f"<td class=num>{'–' if row.seconds is None else duration(row.seconds)}"
        f"<td class=num>{'–' if row.steps_lost is None else row.steps_lost}</tr>"
        for row in rows
    )
    seconds, steps = sum(row.seconds or 0.0 for row in rows), sum(row.steps_lost or 0 for row in rows)
    share = f"{percent(seconds / run.seconds)} of the time went into getting over them" if run.seconds else ""
    return (
        "<section><h2>Failures</h2><div class=scroll><table><thead><tr><th class=num>At<th>Who<th>What<th>Evidence"
        f"<th>Started again<th class=num>Took<th class=num>Steps lost</tr></thead><tbody>{body}<tr class=total>"
        f"<th scope=row>{len(rows)} in all</th><td><td><td class=soft>{share}<td><td class=num>{duration(seconds)}"
        f"<td class=num>{steps}</tr></tbody></table></div></section>"
    )


def _settle(failure: Failure, unsettled: list[Line], workers: set[str]) -> None:
    """Count what was noticed of some workers to a failure."""
    for detected in [detected for detected in unsettled if _worker(detected) in workers]:
        failure.add(detected)
        unsettled.remove(detected)


def _only_noticed(detected: Line) -> Failure:
    row = Failure(detected["time"])
    row.add(detected)
    return row


def _started_again(failover: Line) -> str:
    if failover["level"] == "fail":
        return "nothing: the job ended"
    groups = [f"{group}[{', '.join(map(str, ranks))}]" for group, ranks in failover["ranks"].items()]
    return ", ".join(groups) or f"the {failover['level']}"


def _worker(detected: Line) -> str:
    return f"{detected['group']}[{detected['rank']}]"


def _shown(values: list[str]) -> str:
    return escape("; ".join(value for value in values if value)) or "–"
