"""On-policy distillation: the expected gradient is that of the reverse KL."""

from __future__ import annotations

import torch

from rlinf_lite.algorithms import LossInputs, opd
from rlinf_lite.config.schema import AlgorithmConfig


def test_the_expected_gradient_is_that_of_the_reverse_kl_on_a_three_armed_bandit() -> None:
    logits = torch.tensor([0.3, -1.2, 0.8], dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.tensor([-0.5, 0.1, 1.4], dtype=torch.float64), 0)
    student = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits, retain_graph=True)
    expected = torch.zeros(3, dtype=torch.float64)
    for arm in range(3):  # each as often as the student draws it
        one, mask = student[arm].view(1, 1), torch.ones(1, 1)
        inputs = LossInputs(one, one.detach(), torch.zeros(1, 1), mask, teacher_logprobs=teacher[arm].view(1, 1))
        (gradient,) = torch.autograd.grad(opd(inputs, AlgorithmConfig()).loss, logits, retain_graph=True)
        expected += student[arm].exp().detach() * gradient
    torch.testing.assert_close(expected, exact, atol=1e-6, rtol=0)


def test_masked_positions_count_for_nothing_and_the_metric_is_the_divergence() -> None:
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, float("nan")]], requires_grad=True)
    teacher, mask = torch.tensor([[-1.5, -1.0], [-0.5, 3.0]]), torch.tensor([[1, 1], [1, 0]])
    outputs = opd(
        LossInputs(logprobs, logprobs.detach(), torch.zeros(2, 2), mask, teacher_logprobs=teacher), AlgorithmConfig()
    )
    outputs.loss.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.5, -1.0], [0.0, 0.0]]) / 3)
    torch.testing.assert_close(outputs.metrics["teacher_kl"], torch.tensor((0.5 - 1.0) / 3))
