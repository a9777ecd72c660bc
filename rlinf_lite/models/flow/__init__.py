"""Flow-matching policies: pi0, pi0.5 and SmolVLA."""
