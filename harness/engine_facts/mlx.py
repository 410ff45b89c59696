"""mlx-lm: acceptance rule, drafts and commands, from release 0.32.2, also run on a CPU.

- mlx_lm/generate.py, `speculative_generate_step`: two independent draws, accepted when equal.
  `--temp` is 0 by default.
- mlx_lm/server.py: `num_draft_tokens` is a field of a request, so one server started with
  `--draft-model` serves every K above 0, and one without it K = 0. A model that a request names
  replaces the loaded one, so requests name none. The server caches prefills; with a draft its text
  for a repeated prompt then differs. With `--prompt-cache-size 0` all greedy texts equal plain
  decoding's.
"""

import shlex

from harness.engine_facts.spec import Completions, EngineSpec, PairToServe, ServingLine


def _generate(pair: PairToServe, draft: str = "") -> str:
    line = f"mlx_lm.generate --model {shlex.quote(pair.target)}{draft}"
    line = f"{line} --temp {pair.temperature:g}"
    if pair.temperature == 0:
        return line
    sampling = pair.sampling
    options = (("top-k", sampling.top_k), ("top-p", sampling.top_p), ("min-p", sampling.min_p))
    return line + "".join(f" --{name} {value:g}" for name, value in options if value is not None)


def _drafting(pair: PairToServe) -> str:
    draft = shlex.quote(pair.draft)
    return _generate(pair, f" --draft-model {draft} --num-draft-tokens {pair.k}")


SPEC = EngineSpec(
    name="mlx",
    title="mlx-lm",
    rules=("exact_match",),
    alike=frozenset(("model",)),
    version="0.32.2",
    plain=_generate,
    lines={"model": ServingLine(_drafting)},
    sampling_in_requests=False,
    client="harness.engines.openai",
    starts=False,
    completions=Completions(("top_k", "min_p"), "num_draft_tokens", one_model=True),
)
