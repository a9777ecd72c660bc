"""What a bad configuration raises."""

from __future__ import annotations


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, found before anything starts.

    `problems` holds one line each: `where.in.yaml: what is wrong (the value, the arithmetic). how to fix it`.
    """

    def __init__(self, source: str, problems: list[str]) -> None:
        super().__init__(source, problems)
        self.source = source
        self.problems = problems

    def __str__(self) -> str:
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        return "\n".join([f"{self.source}: {count}", *(f"  - {problem}" for problem in self.problems)])
