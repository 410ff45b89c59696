"""Answers that are checked: to prompts with a JSON schema, tools or a tag that ends reasoning.

Every server is asked for them after all that is timed, and they are kept apart (structured.jsonl):
texts under a grammar are not the target's own. All K of a prompt, temperature and visit have the
same seed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from harness.analysis.server_structured import latest_answers
from harness.commands.drafted import EncodedPrompt
from harness.commands.progress import progress
from harness.commands.server_requests import Role, Workload
from harness.commands.server_start import every_k, side_by_side, started
from harness.config import ServerConfig
from harness.engines.adapters import Adapter
from harness.engines.protocol import RefusedError, RequestFailedError, Server, ServerDiedError
from harness.measurement.answer_checks import AnswerCheck, check_schemas, checks_of
from harness.records import GREEDY, Prompt, StructuredAnswer, UserError, in_one_line
from harness.serving.spec import EngineSpec
from harness.storage import RunFolder


def check_structured(config: ServerConfig, prompts: Sequence[Prompt], spec: EngineSpec) -> None:
    """Refuse what no text can be held against, or the engine's requests cannot carry."""
    check_schemas(prompts)
    grammars = (check for prompt in prompts for check in checks_of(prompt) if check.grammar)
    named = next(grammars, None)
    if named is not None and not spec.json_schema:
        key = "prompts.schema" if named.kind == "schema" else "prompts.tools"
        given = config.prompts.schema if named.kind == "schema" else config.prompts.tools
        what = "a JSON schema" if named.kind == "schema" else 'tools and tool_choice "required"'
        raise UserError(
            f"{named.prompt.origin if given is None else key}: has {what}, and requests of"
            f" engine={config.engine} carry no grammar; engine=llamacpp, vllm and sglang take one,"
            " or leave it out"
        )


def measure_structured(
    folder: RunFolder, work: Workload, adapter: Adapter, dead: set[Role]
) -> None:
    """Ask every server that is left for the checked answers that the folder lacks."""
    chosen = folder.manifest.served_ks
    ks = work.ks
    if chosen is not None and not every_k(folder, work.config):
        ks = sorted({0, *(chosen.k_at(value) or 0 for value in work.config.temperature)})
    done = {
        answer.request
        for answer in latest_answers(folder.structured.read())
        if answer.status == "ok"
    }
    waiting = {
        role: [each for each in _asked(work, role.k) if each.answer.request not in done]
        for role in map(Role, ks)
        if role not in dead
    }
    roles = [role for role, asked in waiting.items() if asked]

    def left_out(role: Role, error: UserError) -> bool:
        _failed(folder, [each.answer for each in waiting[role]], error)
        return True

    for group in side_by_side(roles, work, adapter) if roles else ():
        with started(folder, work, adapter, group, slots=1, left_out=left_out) as servers:
            total = sum(len(waiting[role]) for role in servers)
            with progress("structured output", total) as tick:
                for role, server in servers.items():
                    for number, each in enumerate(waiting[role]):
                        try:
                            folder.structured.append(_answered(work, server, each))
                        except ServerDiedError as error:
                            left = [later.answer for later in waiting[role][number:]]
                            _failed(folder, left, error)
                            break
                        except (RequestFailedError, RefusedError) as error:
                            _failed(folder, [each.answer], error)
                        tick()


class _Asked(NamedTuple):
    """A request for an answer that is checked, and what is known of the answer before."""

    entry: EncodedPrompt
    check: AnswerCheck
    answer: StructuredAnswer


def _asked(work: Workload, k: int) -> Iterator[_Asked]:
    config = work.config
    given = [(entry, check) for entry in work.prompts for check in checks_of(entry.prompt)]
    for (entry, check), temperature in product(given, config.temperature):
        prompt = entry.prompt
        # A greedy request is the same in every visit, and a test counts it once
        for visit in range(1 if temperature == GREEDY else config.repetitions):
            answer = StructuredAnswer(
                prompt_set=prompt.prompt_set,
                prompt=prompt.id,
                visit=visit,
                k=k,
                temperature=temperature,
                schema=check.grammar or "",
                seed=work.request(entry, temperature, 0, visit).seed,
                check=check.kind,
            )
            yield _Asked(entry, check, answer)


def _answered(work: Workload, server: Server, asked: _Asked) -> StructuredAnswer:
    entry, check, answer = asked
    request = work.request(entry, answer.temperature, answer.k, answer.visit)
    done = server.generate(request.asked._replace(seed=answer.seed, schema=check.grammar))
    ended = done.tokens[-1:] and done.tokens[-1] in work.vocabulary.eos
    text = work.vocabulary.tokenizer.decode(
        done.tokens[:-1] if ended else done.tokens,
        skip_special_tokens=not check.keeps_special_tokens,
    )
    return replace(
        answer,
        status="ok",
        tokens=done.tokens,
        text=text,
        complete=done.stop_reason != "budget",
        fault=check.fault_of(text),
    )


def _failed(folder: RunFolder, answers: Sequence[StructuredAnswer], error: UserError) -> None:
    folder.structured.append(*(replace(each, error=in_one_line(error)) for each in answers))
