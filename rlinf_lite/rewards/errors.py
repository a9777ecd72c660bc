"""What can be wrong with a reward function before anything is scored."""


class RewardError(ValueError):
    """A reward function that cannot be imported or lacks a package."""


class UnknownSourceError(RewardError):
    """A data_source that no rule is registered for."""
