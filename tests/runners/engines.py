"""A generation engine of a user."""

from rlinf_lite.generation.engine import TransformersEngine


class Curt(TransformersEngine):
    """Ends responses after three tokens, and generates only with new weights."""

    num_changes = 0

    def weights_changed(self):
        self.num_changes += 1

    def stream(self, prompts, params, keys=None):
        if params.max_tokens > 3:  # the check of the model when it is built is greedy and short
            assert self.num_changes, "old weights"
            self.num_changes = 0
        for done in super().stream(prompts, params, keys):
            kept = {name: getattr(done, name)[:3] for name in ("token_ids", "logprobs", "versions")}
            yield type(done)(done.index, done.sample, finish_reason="length", **kept)
