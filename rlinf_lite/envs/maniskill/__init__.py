"""ManiSkill 3 behind one adapter: CPU simulation (one scene per row) or GPU simulation (one batch), state or images."""
