"""Rewards for the tests of the reasoning loop."""


def arbitrary(solution, ground_truth, extra_info):
    """Something that every policy gets, and that differs within a group."""
    return (1 + sum(map(ord, solution)) % 89) / 100


def always_one(solution, ground_truth, extra_info):
    return 1.0


def odd_prompts(solution, ground_truth, extra_info):
    """A signal for problems with an odd answer only."""
    return arbitrary(solution, ground_truth, extra_info) if int(ground_truth) % 2 else 0.0


def raises_sometimes(solution, ground_truth, extra_info):
    if sum(map(ord, solution)) % 2:
        raise RuntimeError("this answer is too odd")
    return 0.5
