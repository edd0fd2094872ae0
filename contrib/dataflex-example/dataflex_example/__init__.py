import dataflex_hooks as df


class KeepShort:
    """Masks responses longer than ``longest`` tokens."""

    provides = {"mask"}

    def __init__(self, longest: int = 256) -> None:
        self.longest = longest

    @df.hookimpl
    def post_advantage(self, batch, ctx):
        return df.UpdateDecision(mask=batch.lengths <= self.longest, reason="too_long")
