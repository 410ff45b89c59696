"""How well a draft was accepted, by the names and formulas of the projects that print it.

One run has an acceptance length of 2.91 in one tool and 2.84 in another, and nothing is wrong: they
count other things. Of a cell's requests, with their rounds, drafted and accepted tokens:

- vLLM: 1 + accepted / rounds over all requests. It counts drafts that were accepted beyond the end
  of a text, so it is a little above the tokens that a round emitted (vllm#56101): at acceptance .97
  and K = 8, 7.98 for 7.44 in texts of 47 tokens. AIPerf calls it token-weighted, llama.cpp's log
  prints it as well. The server's own count is taken where the run has it.
- SGLang: tokens of the answers / rounds. The first token of an answer, which the prefill gave,
  counts there.
- A mean of the requests' own lengths weighs a short answer as much as a long one: SpecForge's
  benchmark (of SGLang's), AIPerf's acceptance length (of vLLM's), Model-Optimizer's Average_AL (of
  tokens per round), which it called acceptance rate before. Model-Optimizer counts the lengths of
  what is streamed, so the prefill's token is an entry of length 1 beside the rounds'.
- SpecForge's training prints accepted / rounds, without the token that every round adds.
- An acceptance rate is accepted / drafted in vLLM, AIPerf and llama.cpp. Model-Optimizer's are by
  length, from 1: joint, the share of entries of at least that length, and conditional, the same of
  the entries of at least the length before.

Speed uses this report's own: tokens that rounds emitted / rounds. From the joint rates it also
expects that of every smaller K, in rounds that start where those of this K did. A smaller K starts
more rounds where drafts are accepted, so this is a little low where acceptance comes in stretches.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from harness.analysis.cells import completed, latest
from harness.records import Trial, grouped
from harness.stats.jackknife import Array
from harness.summary import AcceptanceLength
from harness.theory.acceptance import conditional


def acceptance_lengths(trials: Sequence[Trial], first_position: int) -> Iterator[AcceptanceLength]:
    """Every convention's number of each temperature and K, over the requests that count rounds.

    `new_tokens` of a trial are those that rounds emitted; before them `first_position` tokens of an
    answer come from the prefill.
    """
    done = completed(latest(trials))
    counted = [t for t in done if t.k and t.rounds and t.accepted is not None]
    groups = grouped(counted, lambda trial: (trial.temperature, trial.k))
    for (temperature, k), group in sorted(groups.items()):
        for convention, alias, values in _named(group, first_position):
            yield AcceptanceLength(temperature, k, convention, alias, values)


def _named(
    trials: Sequence[Trial], first_position: int
) -> Iterator[tuple[str, str, tuple[float, ...]]]:
    """(convention, alias, values) of some requests at one K."""
    counts = [(trial.rounds, trial.accepted, trial.new_tokens) for trial in trials]
    rounds, accepted, emitted = np.array(counts, dtype=np.float64).T
    # As the server counts them
    of_server = [t.accepted if t.counted_accepted is None else t.counted_accepted for t in trials]
    counted = np.array(of_server, dtype=np.float64)
    answers = emitted + first_position
    yield "this report", "tokens_per_round", _ratio(emitted, rounds)
    yield "vLLM, llama.cpp", "mean acceptance length", _ratio(rounds + counted, rounds)
    yield "AIPerf", "token-weighted acceptance length", _ratio(rounds + counted, rounds)
    yield "AIPerf", "acceptance length", _mean((rounds + counted) / rounds)
    yield "SGLang", "spec_accept_length", _ratio(answers, rounds)
    yield "SpecForge, benchmark", "accept length", _mean(answers / rounds)
    yield "SpecForge, training", "simulated_acc_len", _ratio(accepted, rounds)
    of_streamed = _mean(answers / (rounds + first_position))
    yield "Model-Optimizer", "Average_AL, once acceptance rate", of_streamed
    drafted = [trial.drafted for trial in trials if trial.drafted]
    if len(drafted) == len(trials):
        rate = _ratio(counted, np.array(drafted, dtype=np.float64))
        yield "vLLM, AIPerf, llama.cpp", "draft acceptance rate", rate
    lengths = [trial.accepted_lengths for trial in trials if trial.accepted_lengths]
    if len(lengths) == len(trials):
        joint = _joint(lengths)
        shorter = tuple((1.0 + np.cumsum(joint)).tolist())
        yield "this report", "expected tokens per round at K = 1, 2, ...", shorter
        yield "vLLM", "acceptance rate by position", joint
        of_rounds = rounds.sum() / (rounds.sum() + first_position * len(trials))
        by_length = (1.0, *(float(of_rounds * share) for share in joint))
        yield "Model-Optimizer", "Joint_Acceptance_Rate", by_length
        yield "Model-Optimizer", "Conditional_Acceptance_Rate", conditional(by_length)


def _ratio(numerators: Array, denominators: Array) -> tuple[float, ...]:
    return (float(numerators.sum() / denominators.sum()),)


def _mean(values: Array) -> tuple[float, ...]:
    return (float(values.mean()),)


def _joint(lengths: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Of all rounds, the share that accepted at least 1, 2, ... tokens."""
    total = np.zeros(max(map(len, lengths)))
    for counts in lengths:
        total[: len(counts)] += counts
    at_least = total[::-1].cumsum()[::-1]
    return tuple(float(count / at_least[0]) for count in at_least[1:])
