"""transformers: acceptance rule, drafts and calls of `generate`, from release 5.23.

generation/candidate_generator.py: settings are read from the draft's generation_config; the draft
is sampled and accepted by the ratio. Temperature and top-p given as settings are applied to the
draft twice, given as processors once. `prompt_lookup_num_tokens` is the harness's look-up.
`use_mtp` drafts one token with each MTP layer, for targets whose configuration has
`num_mtp_layers` (of models/: deepseek_v3, glm4_moe, bailing_hybrid, step3p7, inkling, mellum and
those derived from them). The harness runs one layer K times, so there is no command for MTP.
`speculation_type="dflash"` drafts with a drafter of the layout of models/muse_glimmer_assistant;
the number of tokens is that of its block less one, and processors apply to its drafts once.
"""

import json
from collections.abc import Sequence

from harness.engine_facts.spec import EngineSpec, PairToServe, ServingLine
from harness.records import LONGEST_NGRAM


def _generate(pair: PairToServe, settings: Sequence[str] = (), drafting: Sequence[str] = ()) -> str:
    """A call of `generate` as Python, with sampling that is applied to both models once.

    `settings` are lines before the call, `drafting` its arguments for drafting.
    """
    processors = _processors(pair)
    imports = ["AutoModelForCausalLM"]
    arguments = [*drafting, "do_sample=False"]
    if pair.temperature > 0:
        arguments = [*drafting, "do_sample=True", "temperature=1.0", "top_k=0", "top_p=1.0"]
    if processors:
        imports += ["LogitsProcessorList", *(text.partition("(")[0] for text in processors)]
        arguments.append(f"logits_processor=LogitsProcessorList([{', '.join(processors)}])")
    return "\n".join(
        [
            f"from transformers import {', '.join(imports)}",
            "",
            f"model = AutoModelForCausalLM.from_pretrained({json.dumps(pair.target)})",
            *settings,
            "output = model.generate(",
            "    **inputs,  # of your tokenizer",
            *(f"    {argument}," for argument in arguments),
            ")",
        ]
    )


def _processors(pair: PairToServe) -> list[str]:
    sampling, temperature = pair.sampling, pair.temperature
    penalty = sampling.repetition_penalty
    processors: list[str] = []
    if penalty is not None and penalty != 1.0:
        processors.append(f"RepetitionPenaltyLogitsProcessor({float(penalty)!r})")
    if temperature == 0:
        return processors
    if temperature != 1:
        processors.append(f"TemperatureLogitsWarper({float(temperature)!r})")
    if sampling.top_k is not None:
        processors.append(f"TopKLogitsWarper({sampling.top_k})")
    if sampling.top_p is not None:
        processors.append(f"TopPLogitsWarper({float(sampling.top_p)!r})")
    if sampling.min_p is not None:
        processors.append(f"MinPLogitsWarper({float(sampling.min_p)!r})")
    return processors


def _assisted(pair: PairToServe) -> str:
    load = f"draft = AutoModelForCausalLM.from_pretrained({json.dumps(pair.draft)})"
    return _generate(pair, (load, *_settings("draft", pair)), ("assistant_model=draft",))


def _dflash(pair: PairToServe) -> str:
    load = (
        "from transformers import AutoModel",
        f"draft = AutoModel.from_pretrained({json.dumps(pair.draft)})",
        f"draft.config.block_size = {pair.k + 1}",
    )
    return _generate(pair, load, ("assistant_model=draft", 'speculation_type="dflash"'))


def _early_exit(pair: PairToServe) -> str:
    argument = f"assistant_early_exit={pair.layers}"
    return _generate(pair, _settings("model", pair), (argument,))


def _prompt_lookup(pair: PairToServe) -> str:
    argument = f"prompt_lookup_num_tokens={pair.k}, max_matching_ngram_size={LONGEST_NGRAM}"
    return _generate(pair, drafting=(argument,))


def _settings(drafter: str, pair: PairToServe) -> tuple[str, ...]:
    """The lines that set the generation_config of the model named `drafter`."""
    config = f"{drafter}.generation_config"
    return (
        f"{config}.num_assistant_tokens = {pair.k}",
        f'{config}.num_assistant_tokens_schedule = "constant"',
        f"{config}.assistant_confidence_threshold = {pair.p_min}",
    )


def _notes(pair: PairToServe) -> Sequence[str]:
    if not _processors(pair):
        return ()
    return (
        "Temperature, top_k and top_p go in as processors: given as settings, transformers applies"
        " them to the draft twice and accepts less than this run did.",
    )


SPEC = EngineSpec(
    name="transformers",
    title="transformers",
    rules=("ratio",),
    alike=frozenset(("model", "dflash", "ngram", "early_exit")),
    stops_early=True,
    version="5.23",
    plain=_generate,
    lines={
        "model": ServingLine(_assisted, more=_notes),
        "dflash": ServingLine(
            _dflash, "It reads drafters of the layout of transformers' muse_glimmer_assistant."
        ),
        "ngram": ServingLine(_prompt_lookup),
        "early_exit": ServingLine(_early_exit),
    },
    language="python",
    sampling_in_requests=False,
)
