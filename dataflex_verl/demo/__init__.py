"""Generated tasks and a tiny warm-started model on which a laptop's CPU can show reinforcement learning."""
