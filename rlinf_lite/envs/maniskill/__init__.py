"""ManiSkill 3: CPU simulation (one scene per row) or GPU simulation (one batch), states or images."""
