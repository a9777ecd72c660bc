"""Gaussian policy of multi-layer perceptrons, for state observations."""
