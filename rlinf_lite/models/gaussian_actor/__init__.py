"""A tanh-Gaussian policy for off-policy learning."""
