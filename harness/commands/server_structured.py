"""Prompts with a JSON schema: every server answers them, held to the schema by its grammar.

Texts under a grammar are not the target's own, so they are asked for after all that is timed, and
kept apart (structured.jsonl). All K of a prompt, temperature and visit have the same seed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from harness.analysis.server_structured import latest_answers
from harness.commands.drafted import EncodedPrompt
from harness.commands.progress import progress
from harness.commands.server_requests import Role, Workload
from harness.commands.server_start import every_k, side_by_side, started
from harness.config import ServerConfig
from harness.engines.adapters import Adapter
from harness.engines.protocol import RefusedError, RequestFailedError, Server, ServerDiedError
from harness.measurement.structured_output import check_schemas, fault_of
from harness.records import GREEDY, Prompt, StructuredAnswer, UserError, in_one_line
from harness.serving.spec import EngineSpec
from harness.storage import RunFolder


def check_structured(config: ServerConfig, prompts: Sequence[Prompt], spec: EngineSpec) -> None:
    """Refuse prompts with a JSON schema where the engine's requests cannot carry one."""
    named = next((prompt for prompt in prompts if prompt.schema is not None), None)
    if named is not None and not spec.json_schema:
        where = named.origin if config.prompts.schema is None else "prompts.schema"
        raise UserError(
            f"{where}: has a JSON schema, and requests of engine={config.engine} carry none;"
            " engine=llamacpp, vllm and sglang take one, or leave the schema out"
        )
    check_schemas(prompts)


def measure_structured(
    folder: RunFolder, work: Workload, adapter: Adapter, dead: set[Role]
) -> None:
    """Ask every server that is left for the answers with a schema that the folder lacks."""
    chosen = folder.manifest.served_ks
    ks = work.ks
    if chosen is not None and not every_k(folder, work.config):
        ks = sorted({0, *(chosen.k_at(value) or 0 for value in work.config.temperature)})
    done = {
        (answer.k, answer.temperature, answer.paired)
        for answer in latest_answers(folder.structured.read())
        if answer.status == "ok"
    }
    waiting = {
        role: [
            each
            for each in _asked(work, role.k)
            if (role.k, each[1].temperature, each[1].paired) not in done
        ]
        for role in map(Role, ks)
        if role not in dead
    }
    roles = [role for role, asked in waiting.items() if asked]

    def left_out(role: Role, error: UserError) -> bool:
        _failed(folder, [answer for _, answer in waiting[role]], error)
        return True

    for group in side_by_side(roles, work, adapter) if roles else ():
        with started(folder, work, adapter, group, slots=1, left_out=left_out) as servers:
            total = sum(len(waiting[role]) for role in servers)
            with progress("structured output", total) as tick:
                for role, server in servers.items():
                    for number, (entry, answer) in enumerate(waiting[role]):
                        try:
                            folder.structured.append(_answered(work, server, entry, answer))
                        except ServerDiedError as error:
                            left = [each for _, each in waiting[role][number:]]
                            _failed(folder, left, error)
                            break
                        except (RequestFailedError, RefusedError) as error:
                            _failed(folder, [answer], error)
                        tick()


def _asked(work: Workload, k: int) -> Iterator[tuple[EncodedPrompt, StructuredAnswer]]:
    """Every prompt with a schema, with what is known of its answer before it is asked."""
    config = work.config
    given = [entry for entry in work.prompts if entry.prompt.schema is not None]
    for entry, temperature in product(given, config.temperature):
        prompt = entry.prompt
        # A greedy request is the same in every visit, and a test counts it once
        for visit in range(1 if temperature == GREEDY else config.repetitions):
            answer = StructuredAnswer(
                prompt_set=prompt.prompt_set,
                prompt=prompt.id,
                visit=visit,
                k=k,
                temperature=temperature,
                schema=prompt.schema or "",
                seed=work.request(entry, temperature, 0, visit).seed,
            )
            yield entry, answer


def _answered(
    work: Workload, server: Server, entry: EncodedPrompt, answer: StructuredAnswer
) -> StructuredAnswer:
    """The server's answer, held against the schema."""
    request = work.request(entry, answer.temperature, answer.k, answer.visit)
    done = server.generate(
        request.tokens, request.sampling, answer.seed, request.budget, schema=answer.schema
    )
    text = work.vocabulary.tokenizer.decode(done.tokens, skip_special_tokens=True)
    return replace(
        answer,
        status="ok",
        tokens=done.tokens,
        text=text,
        complete=done.stop_reason != "budget",
        fault=fault_of(text, answer.schema),
    )


def _failed(folder: RunFolder, answers: Sequence[StructuredAnswer], error: UserError) -> None:
    folder.structured.append(*(replace(each, error=in_one_line(error)) for each in answers))
