"""Plain and speculative decoding, as generators of rounds.

This package has no clocks, files or configuration: rounds are timed by timing the iterator
(`harness.measurement`). Read in this order:

1. `protocols.Generation`: a request. One record has the prompt, the budget, the ends of a text, the
   sampling parameters, the uniforms, K and the acceptance rule.
2. `protocols.CausalModel`: a model with a KV cache. `forward` appends tokens to the cache and
   returns the logits after each, `rewind` removes the last n. `Drafter`: begin, propose, advance;
   `drafters.py` drafts with a model or with a head on the target's hidden states, `lookups.py`
   without a model.
3. `loops.speculative_rounds`: the loop. Each round: K draft tokens, one target forward over
   K + 1 positions, accept or correct, rewind. `loops.autoregressive_rounds` is the baseline.
4. `verification.py`: the acceptance rules, vectorised over a round's positions. That they are
   lossless is tested by enumeration in tests/test_verification.py.
5. `sampling.py`: logits to probabilities, the uniforms and the inverse-CDF draw.

Invariants between two rounds, with `text` the tokens emitted so far:

- The target's cache has prompt + text without the last token, which is fed first in the next
  round. Rejected tokens are not in it.
- A drafter knows every emitted token (`advance`). A model drafter's cache lags prompt +
  text by one token after a rejection and by two after a full acceptance (`pending`).
- Uniforms belong to text positions, not to rounds: position i is decided by entry i of
  `Uniforms.draft`, `.accept` and `.resample`, under block verification by those of the position
  at which its round began (`Generation.first_uniform`). A text depends on the seed, the prompt, the
  repetition, K and the rule, and on nothing that ran before.
- Output tokens of a round = accepted draft tokens + one token of the target's own (a correction
  after a rejection, a bonus after a full acceptance), cut by an end of text or by the budget.
- One value is read back to the host per round, so a GPU waits for the host once per round.
- Where logits are not finite, a token is BROKEN on the device and `BrokenLogitsError` on the host.

A model that can record its work (CUDA graphs) is a `Recorder`: drafting, a verify with its accept
step and a plain step are then one launch each; see `protocols.recorded`.
"""
