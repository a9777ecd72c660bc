"""What flows between workers: observations, trajectories, and which rows go where."""
