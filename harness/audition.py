"""Many drafts, one target: which one is worth serving?

    python -m harness.audition                                     the embedded family
    python -m harness.audition model=qwen3_32b drafts=[qwen3_0_6b,qwen3_1_7b,qwen3_4b,ngram]
    python -m harness.audition traces_from=RUN latency.target_ms=12 latency.draft_ms=1.5
    python -m harness.audition traces_from=RUN latency.measure=true      the same texts, this card
    python -m harness.audition drafts=[a,b] latency_from=SERVER_RUN      on the engine of that run
    python -m harness.audition texts_from=http://HOST:PORT latency_from=RUN   a target on a server
    python -m harness.audition combine=[RUN_ON_ONE_CARD,RUN_ON_ANOTHER]  which card?

The target generates its text once per temperature, without any draft; each draft scores that text
in one prefill; replay then gives the exact expected rounds for every K. So four drafts at eight K
cost little more than the text itself. With `traces_from` nothing is loaded: stored acceptance meets
other step times, of another GPU or engine; with `latency.measure` the steps are timed on this one.
With `latency_from` of a server run drafts are priced by that engine's rounds, of one draft there.
With `texts_from` the completions are a server's: the target's weights, and a GPU, stay there.
Runs on several cards are put together with `combine`: what does a token cost on each?
"""

from typing import NoReturn

from harness.cli import run_app


def main() -> NoReturn:
    """Run the command and exit with its status."""
    run_app("audition")


if __name__ == "__main__":
    main()
