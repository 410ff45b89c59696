"""llama.cpp: acceptance rules, drafts and serving commands, from the sources of build 11368.

- common/speculative.cpp, draft-simple: the argmax is proposed, and accepted where the target's
  sampler draws the same. Near the budget it drafts at most as many tokens as can still be emitted
  before the round's own; with one left it takes a plain step. Each of a round's K tokens takes one
  decode of the draft, and in `process` the draft also decodes each batch that the target decodes.
- tools/server/README.md: `--spec-draft-p-min` is 0 by default, `--spec-draft-sampling` greedy. With
  `probabilistic` (from build 11368) it draws among its ten likeliest tokens, at the request's
  temperature and without its top_k, top_p and min_p, and accepts by the ratio. `--spec-synth-rates`
  sets synthetic acceptance for timing: K unconditional rates by position.
- `--spec-draft-p-min` (a server for each value: requests do not set it) ends a draft at the first
  token whose probability is lower. That token is dropped: a round then drafts the tokens before it,
  or none and takes a plain step. The probability is the softmax over the draft's ten likeliest
  tokens, at temperature 0 as well. A stopped draft has taken one more decode than it has tokens.
  `--spec-draft-n-min` drops a whole draft that is shorter. Tried with build 11549 and the embedded
  tiny and tiny_small, K = 4 and 16 at 0, .5 and .9: rounds and drafted tokens are those of replay
  by this rule in every text, and in few by one that sends the token or compares its probability
  over the whole vocabulary (docs/decisions/0032).
- src/llama-kv-cache.cpp: with a KV cache for each slot, a batch is split into groups of
  neighbouring slots, each decoded by itself; `--kv-unified` has one cache, and one forward.
- docs/speculative.md: draft-eagle3 (`-md` is the head, converted with --target-model-dir),
  draft-mtp, draft-dflash, draft-dspark, ngram-simple (common/ngram-map.cpp: the *last* earlier
  match of exactly size-n tokens). Its drafts have size-m tokens; --spec-draft-n-max does not cut
  them (build 11549).
- ngram-mod (common/ngram-mod.cpp) has one table for all requests, which takes in a text in pieces
  of 32 tokens where rounds end, so that it cannot be replayed. The look-ups ngram-map-k,
  ngram-map-k4v and ngram-cache are not measured here.
"""

import shlex
from collections.abc import Callable, Sequence

from harness.engine_facts.draft_kinds import DRAFTS, DraftKind, looks_up
from harness.engine_facts.spec import (
    ANCHORED_BLOCK,
    BLOCK,
    Counting,
    EngineSpec,
    PairToServe,
    ServingLine,
)
from harness.records import LONGEST_NGRAM, Rule

COUNTING = Counting(first_position=1, shortens_last_draft=True)
# The command without a draft; the file names are placeholders for the reader's conversions
TARGET, DRAFT = "TARGET.gguf", "DRAFT.gguf"
# Look-ups of exactly n tokens; n is also the smallest K that they draft
SIMPLE = ("ngram_simple", "ngram_simple_1", "ngram_simple_12")
# The value of --spec-type by kind of draft
SPEC_TYPES = {
    "model": "draft-simple",
    "eagle3": "draft-eagle3",
    "mtp": "draft-mtp",
    "dflash": "draft-dflash",
    "dspark": "draft-dspark",
    "ngram": "ngram-simple",
    **dict.fromkeys(SIMPLE, "ngram-simple"),
    "ngram_mod": "ngram-mod",
}
# The prefix of the wheel's names of kinds of draft
ENUM = "COMMON_SPECULATIVE_TYPE_"
# Without it the draft's argmax is proposed; builds before 11368 do not have it
SAMPLING, PROBABILISTIC = "--spec-draft-sampling", "probabilistic"


def drafting_flags(
    kind: DraftKind, k: int, p_min: float = 0.0, rule: Rule | None = None
) -> dict[str, object]:
    """The flags of a server that drafts k tokens with a kind of draft, without files.

    `p_min` is the probability below which a draft model's token ends its draft.
    """
    flags: dict[str, object] = {"--spec-type": SPEC_TYPES[kind], "--spec-draft-n-max": k}
    if p_min:
        flags["--spec-draft-p-min"] = p_min
    if not looks_up(kind):
        return flags | ({SAMPLING: PROBABILISTIC} if rule == "ratio" else {})
    sizes = {"n-min": 0, "n-max": k}
    if kind != "ngram_mod":
        ngram = DRAFTS[kind].least_k if kind in SIMPLE else LONGEST_NGRAM
        sizes = {"size-n": ngram, "size-m": k}
    return flags | {f"--spec-{SPEC_TYPES[kind]}-{name}": size for name, size in sizes.items()}


def _file(name: str, stand_in: str) -> str:
    """A model's GGUF file, quoted; what stands for it where a checkpoint was measured."""
    return shlex.quote(name) if name.endswith(".gguf") else stand_in


def _plain(pair: PairToServe) -> str:
    return f"llama-server -m {_file(pair.target, TARGET)}"


def _drafting(files: str = "") -> Callable[[PairToServe], str]:
    def line(pair: PairToServe) -> str:
        flags = drafting_flags(pair.kind, pair.k, pair.p_min, pair.rule)
        given = files.replace(DRAFT, _file(pair.draft, DRAFT))
        words = [_plain(pair), given, *(f"{name} {value}" for name, value in flags.items())]
        return " ".join(filter(None, words))

    return line


def _notes_of_a_lookup(pair: PairToServe) -> Sequence[str]:
    return () if pair.of_files else ("TARGET.gguf stands for your conversion.",)


def _notes_of_a_model(pair: PairToServe) -> Sequence[str]:
    files = (
        f"TARGET.gguf and DRAFT.gguf stand for your conversions of {pair.target} and"
        f" {pair.draft}; quantised weights accept differently."
    )
    by_ratio = (
        f"With {SAMPLING} {PROBABILISTIC} it accepts by a ratio, but draws among the draft's ten"
        " likeliest tokens only; python -m harness.server engine=llamacpp decode.rule=ratio"
        " measures it."
    )
    if pair.of_files:
        return ()
    known = pair.temperature == 0 or pair.synthetic or pair.rule == "ratio"
    return (files,) if known else (files, by_ratio)


SPEC = EngineSpec(
    name="llamacpp",
    title="llama.cpp",
    rules=("greedy_draft", "ratio"),
    counting=COUNTING,
    mixes_prompts=True,
    draft_by_temperature=True,
    draft_top_k=10,
    drops_unlikely=True,
    draft_reads_verified=True,
    alike=frozenset(("model", "eagle3", "mtp", "dflash", "dspark", *SIMPLE)),
    version="b11368 or later",
    plain=_plain,
    lines={
        "model": ServingLine(_drafting("-md DRAFT.gguf"), more=_notes_of_a_model),
        "eagle3": ServingLine(
            _drafting("-md HEAD.gguf"),
            "TARGET.gguf and HEAD.gguf stand for your conversions; convert_hf_to_gguf.py takes"
            " the head with --target-model-dir.",
        ),
        "mtp": ServingLine(
            _drafting(),
            "TARGET.gguf stands for your conversion, with its MTP layers. The harness has started"
            " no llama.cpp with MTP layers yet.",
        ),
        "dflash": ServingLine(
            _drafting("-md DRAFT.gguf"),
            "TARGET.gguf and DRAFT.gguf stand for your conversions; the drafter's needs"
            f" --target-model-dir. {BLOCK}",
        ),
        "dspark": ServingLine(
            _drafting("-md DRAFT.gguf"),
            f"TARGET.gguf and DRAFT.gguf stand for your conversions. {ANCHORED_BLOCK}",
        ),
        "ngram": ServingLine(
            _drafting(),
            "TARGET.gguf stands for your conversion. It takes the last earlier match of exactly"
            " that many tokens, this run the first of them or of one token; draft=ngram_simple"
            " drafts as it does.",
        ),
        **dict.fromkeys(SIMPLE, ServingLine(_drafting(), more=_notes_of_a_lookup)),
        "ngram_mod": ServingLine(
            _drafting(),
            "TARGET.gguf stands for your conversion. What it drafts depends on requests before, so"
            " it is not replayed. A run asks each prompt more than once, and the look-up has then"
            " seen its answer: what such a run measures is an upper bound.",
        ),
    },
    reads_gguf=True,
    in_production=("--ctx-size", "--parallel", "--threads"),
    slots_flag="--parallel",
    unified_flag="--kv-unified",
    cache_flags=("--cache-type-k", "--spec-draft-type-k"),
    client="harness.engines.llamacpp",
    lists_logprobs=True,
    drafts=tuple(kind for kind in SPEC_TYPES if kind != "ngram"),
    synthetic="everywhere",
    tries_threads=True,
    wheel="xllamacpp",
)
