"""The real verl trainer on a CPU: a platform, a transformers rollout and the few settings verl needs for them.

Opt-in only, by the environment variable ``VERL_PLATFORM=cpu``: the driver node of a GPU cluster may have no GPU
itself, so the absence of one never switches this on.
"""
