"""What optimizes a model: learner, sharding, strategies, schedules."""
