"""GGUF files as models of a server run: headers, vocabularies, and files that cannot be used."""

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGUFReader, GGUFWriter
from runs import EXACT_FLAGS, analysed, needs_llamacpp, outcome_of, ran

from harness.cli import as_hydra_takes, compose
from harness.config import DraftConf, ModelConf
from harness.engines import llamacpp
from harness.models.embedded import EMBEDDED, gguf_of
from harness.models.gguf_file import BLOCKS, GgufTokenizer, parts_of, read_model
from harness.models.load import NotEligible, check_tokenizers, load_vocabulary, token_note
from harness.models.tokenizer import COMPARED_TEXTS
from harness.records import UserError
from harness.reporting.sentences.verdict import NextStep, after_answers

TARGET, GOOD = (gguf_of(EMBEDDED / name) for name in ("tiny", "tiny_good"))
TOKENS = ["<unk>", "a", "b", "ab", "<|im_end|>", "[PAD5]"]
KINDS = [2, 1, 1, 1, 3, 5]


def file_of(
    folder: Path,
    name: str = "model.gguf",
    *,
    architecture: str = "llama",
    tokens: list[str] = TOKENS,
    kinds: list[int] = KINDS,
    merges: tuple[str, ...] = ("a b",),
    **keys: str,
) -> Path:
    """A file that package gguf writes: a small vocabulary and one tensor."""
    writer = GGUFWriter(str(folder / name), architecture)
    for key, value in keys.items():
        writer.add_string(key.replace("__", "."), value)
    writer.add_uint32(f"{architecture}.block_count", 1)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", kinds)
    writer.add_array("tokenizer.ggml.merges", list(merges))
    writer.add_tensor("token_embd.weight", np.zeros((6, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / name


# ---- headers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [TARGET, GOOD])
def test_a_header_reads_as_package_gguf_reads_it(file: Path) -> None:
    header, reader = read_model(file, "model=x"), GGUFReader(file)
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name != "tokenizer.ggml.merges":
            assert header.keys[name] == entry.contents(), name
    assert header.parameters == sum(int(tensor.n_elements) for tensor in reader.tensors)
    assert header.weights_bytes >= sum(int(tensor.n_bytes) for tensor in reader.tensors)
    assert header.weights_bytes <= file.stat().st_size


def test_bytes_of_every_type_of_tensor_are_those_of_package_gguf() -> None:
    """A type that is missing here would count as no bytes."""
    assert {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()} == {**BLOCKS}


def test_rows_that_fill_a_vocabulary_up_are_no_tokens_and_ends_are_known_by_their_text(
    tmp_path: Path,
) -> None:
    header = read_model(file_of(tmp_path), "model=x")
    tokenizer = GgufTokenizer(header)
    assert tokenizer.get_vocab() == {text: i for i, text in enumerate(TOKENS[:5])}
    assert tokenizer.rows == 6
    assert header.ends == {4}
    assert set(tokenizer.added_tokens_decoder) == {0, 4}


# ---- one tokenizer, or two -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "refused", "noted"),
    [
        ({}, None, None),
        ({"tokens": [*TOKENS[:5], "[PAD5]", "[PAD6]"], "kinds": [*KINDS, 5]}, None, None),
        ({"tokens": [*TOKENS[:4], "<|end|>", "[PAD5]"]}, None, "'<|im_end|>' is 4 in the target"),
        (
            {"tokens": ["<unk>", "b", "a", *TOKENS[3:]]},
            r"token 'a' is 1 in the target's vocabulary and 2 in the draft's; 2 of 3 ordinary",
            None,
        ),
        ({"merges": ("b a",)}, r"tokenizer\.ggml\.merges differs in their headers", None),
        (
            {"tokens": TOKENS[:4], "kinds": KINDS[:4]},
            r"token '<\|im_end\|>' is 4 in the target's vocabulary, beyond the 4 rows",
            None,
        ),
    ],
)
def test_two_files_are_compared_by_the_rule_for_checkpoints(
    tmp_path: Path, changes: dict[str, Any], refused: str | None, noted: str | None
) -> None:
    draft_file = file_of(tmp_path, "draft.gguf", **changes)
    target = load_vocabulary(ModelConf(name="t", id=str(file_of(tmp_path))))
    draft = load_vocabulary(DraftConf(name="d", id=str(draft_file)))
    if refused is not None:
        with pytest.raises(NotEligible, match=refused):
            check_tokenizers(target, draft)
        return
    check_tokenizers(target, draft)
    note = token_note(target, draft)
    assert note is None if noted is None else noted in (note or "")


@needs_llamacpp
def test_a_server_of_the_file_encodes_as_the_checkpoints_tokenizer() -> None:
    own = load_vocabulary(ModelConf(name="tiny", id="embedded:tiny"))
    file = load_vocabulary(ModelConf(name="tiny", id=str(TARGET)))
    assert (file.eos, file.context_tokens) == (own.eos, own.context_tokens)
    with llamacpp.reading(TARGET, ()) as ask:
        file.tokenizer.ask = ask
        for text in (*COMPARED_TEXTS, "a<|endoftext|>b"):
            assert file.tokenizer(text) == {"input_ids": own.tokenizer(text)["input_ids"]}


def test_a_chat_template_is_filled_in_by_the_server(tmp_path: Path) -> None:
    header = read_model(file_of(tmp_path, tokenizer__chat_template="{{ x }}"), "model=x")
    tokenizer, sent = GgufTokenizer(header), list[tuple[str, Any]]()

    def ask(path: str, body: Any) -> Any:
        sent.append((path, body))
        return {"prompt": "filled in"} if path == "/apply-template" else {"tokens": [1, 2]}

    tokenizer.ask = ask
    messages = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(messages, enable_thinking=True) == {"input_ids": [1, 2]}
    assert sent == [
        (
            "/apply-template",
            {"messages": messages, "chat_template_kwargs": {"enable_thinking": True}},
        ),
        ("/tokenize", {"content": "filled in", "add_special": True, "parse_special": True}),
    ]


# ---- a run of files alone ------------------------------------------------------------------------


@needs_llamacpp
@pytest.mark.usefixtures("few_samples")
def test_a_pair_of_files_is_measured_and_replayed_without_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (f"model={TARGET}", f"draft={GOOD}", "engine=llamacpp", EXACT_FLAGS, "threads=1")
    grid = ("k=[1,4]", "temperature=[0,1]", "repetitions=2", "new_tokens=24", "prompts.limit=2")
    with monkeypatch.context() as patch:
        for name in ("transformers.AutoTokenizer", "transformers.AutoConfig"):
            patch.setattr(f"{name}.from_pretrained", pytest.fail)
        run = ran("server", *as_hydra_takes("server", [*words, *grid]), tmp_path)
    greedy = run.results[(run.results.temperature == 0.0) & (run.results.k > 0)]
    measured, replayed = (
        greedy[greedy.source == source].set_index(["prompt_set", "k"])
        for source in ("measured", "replayed")
    )
    for name in ("rounds", "drafted", "accepted"):
        assert measured[name].to_dict() == replayed[name].to_dict()
    assert measured.accepted.max() > 0
    assert {each.temperature for each in run.traces} == {0.0, 1.0}
    sampled = run.results[(run.results.temperature == 1.0) & (run.results.k > 0)]
    assert {*sampled[sampled.source == "replayed"].rule} == {"greedy_draft"}
    target = run.manifest.models["target"]
    assert (target.weights, target.parameters, target.layers) == ("gguf", 1_313_408, 8)
    # The same requests as by the checkpoint, which cuts the prompts as the file does
    own = ran(
        "server",
        tmp_path,
        "engine=llamacpp",
        EXACT_FLAGS,
        "threads=1",
        *grid[:1],
        "temperature=[0]",
        "repetitions=1",
        *grid[3:],
    )
    mine, its = (
        {(t.key, t.k): t.tokens for t in each.trials if t.temperature == 0.0 and not t.repetition}
        for each in (run, own)
    )
    assert mine == its


def test_a_dry_run_of_files_starts_no_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(llamacpp.LlamaCpp, "open", pytest.fail)
    words = ["engine=llamacpp", f"model={TARGET}", f"draft={GOOD}", "k=[4]", "dry_run=true"]
    outcome_of("server", *as_hydra_takes("server", words))
    shown = capsys.readouterr().out
    assert "on this machine now" in shown
    assert "scored for replay" in shown


def test_after_a_run_of_files_another_file_is_advised_and_no_audition() -> None:
    summary = analysed("server")
    models = tuple(replace(model, weights="gguf") for model in summary.run.models)
    step = after_answers(replace(summary, run=replace(summary.run, models=models)))
    assert step == NextStep("measure another draft on this server (draft=...)")


# ---- what cannot be used -------------------------------------------------------------------------


def cut(folder: Path) -> list[str]:
    file = folder / "cut.gguf"
    file.write_bytes(TARGET.read_bytes()[:-1000])
    return [f"model={file}", f"draft={GOOD}"]


def cut_header(folder: Path) -> list[str]:
    file = folder / "cut.gguf"
    file.write_bytes(TARGET.read_bytes()[:3000])
    return [f"model={file}", f"draft={GOOD}"]


def of_malformed_values(folder: Path) -> list[str]:
    return [f"model={file_of(folder, general__alignment='none')}", f"draft={GOOD}"]


def of_fewer_kinds(folder: Path) -> list[str]:
    return [f"model={file_of(folder, kinds=KINDS[:-1])}", f"draft={GOOD}"]


def of_another_version(folder: Path) -> list[str]:
    file = folder / "old.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<I", 1) + TARGET.read_bytes()[8:])
    return [f"model={file}", f"draft={GOOD}"]


def no_gguf(folder: Path) -> list[str]:
    (folder / "other.gguf").write_text("a page of the hub that says that terms were not accepted")
    return [f"model={folder / 'other.gguf'}", f"draft={GOOD}"]


def missing(folder: Path) -> list[str]:
    return [f"model={folder / 'nowhere.gguf'}", f"draft={GOOD}"]


def other_vocabulary(folder: Path) -> list[str]:
    return [f"model={TARGET}", f"draft={file_of(folder)}"]


def embedding(folder: Path) -> list[str]:
    return [f"model={file_of(folder, architecture='bert')}", f"draft={GOOD}"]


def projector(folder: Path) -> list[str]:
    return [f"model={file_of(folder, architecture='clip')}", f"draft={GOOD}"]


def adapter(folder: Path) -> list[str]:
    return [f"model={TARGET}", f"draft={file_of(folder, adapter__type='lora')}"]


def part_missing(folder: Path) -> list[str]:
    file = file_of(folder, "model-00001-of-00002.gguf")
    return [f"model={file}", f"draft={GOOD}"]


def second_part(folder: Path) -> list[str]:
    file = file_of(folder, "model-00002-of-00002.gguf")
    return [f"model={file}", f"draft={GOOD}"]


def next_to_a_checkpoint(_: Path) -> list[str]:
    return [f"model={TARGET}", "draft=tiny_good"]


def checkpoint_of_a_file(_: Path) -> list[str]:
    return ["model=tiny", f"draft={GOOD}"]


def by_ratio(_: Path) -> list[str]:
    return [f"model={TARGET}", f"draft={GOOD}", "decode.rule=ratio", "temperature=[1]"]


def with_a_head(_: Path) -> list[str]:
    return [f"model={TARGET}", "draft=tiny_eagle3"]


def on_our_loop(_: Path) -> list[str]:
    return [f"model={TARGET}", f"draft={GOOD}", "engine=own"]


def in_turns(folder: Path) -> list[str]:
    (folder / "turns.jsonl").write_text('{"turns": ["a", "b"]}\n')
    prompts = f"prompts.files=[{folder / 'turns.jsonl'}]"
    return [f"model={TARGET}", f"draft={GOOD}", prompts]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (cut, r"model=\S+cut\.gguf: the file is cut; fetch or convert it again"),
        (cut_header, r"model=\S+cut\.gguf: the file is cut; fetch or convert it again"),
        (of_malformed_values, r"model=\S+model\.gguf: the file is cut; fetch or convert it again"),
        (of_fewer_kinds, r"model=\S+model\.gguf: the file is cut; fetch or convert it again"),
        (of_another_version, r"GGUF of version 1; convert it again, to version 3"),
        (no_gguf, r"other\.gguf: not a GGUF file, whose first bytes are GGUF"),
        (missing, r"model=\S+nowhere\.gguf: no such file"),
        (other_vocabulary, r"draft=model: another tokenizer than model=tiny \(token"),
        (embedding, r"model=\S+: an embedding model, which generates no text"),
        (projector, r"model=\S+: the image part of a model \(mmproj\); give the language"),
        (adapter, r"draft=\S+: a LoRA adapter; give the model that it was made for"),
        (part_missing, r"no such file model-00002-of-00002\.gguf, one of the model's 2 parts"),
        (second_part, r"a part of a model; give the first one, model-00001-of-00002\.gguf"),
        (next_to_a_checkpoint, r"is a GGUF file alone; give that of tiny_good as draft=FILE\.gguf"),
        (checkpoint_of_a_file, r"the checkpoint of tiny_good with draft\.gguf=FILE"),
        (by_ratio, r"decode\.rule=ratio: above temperature 0 it is replayed from the weights"),
        (with_a_head, r"draft=tiny_eagle3: is scored by the target's states"),
        (on_our_loop, r"model=\S+: read by llama\.cpp alone, where harness\.server engine=llam"),
        (in_turns, r"later turns continue the target's answers, which need its weights here"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line_before_anything_is_started(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    made: Callable[[Path], list[str]],
    message: str,
) -> None:
    # The check of turns comes after the prompts are encoded
    if made is not in_turns:
        monkeypatch.setattr(llamacpp.LlamaCpp, "open", pytest.fail)
    else:
        pytest.importorskip("xllamacpp")
    words = ["engine=llamacpp", "k=[4]", "temperature=[0]", *made(tmp_path)]
    with pytest.raises(UserError, match=message) as error:
        outcome_of("server", *as_hydra_takes("server", words), tmp_path / "results")
    assert "\n" not in str(error.value)


def test_files_larger_than_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp.LlamaCpp, "open", pytest.fail)
    monkeypatch.setattr(
        llamacpp.psutil, "virtual_memory", lambda: SimpleNamespace(total=5_000_000, available=0)
    )
    words = ["engine=llamacpp", "k=[4]", f"model={TARGET}", f"draft={GOOD}"]
    with pytest.raises(UserError, match=r"0\.00604 GB of weights, and this machine has 0\.005 GB"):
        outcome_of("server", *as_hydra_takes("server", words))


def test_other_commands_say_which_one_takes_a_file() -> None:
    words = as_hydra_takes("sweep", [f"model={TARGET}", "draft=tiny_good"])
    with pytest.raises(UserError, match=r"read by llama\.cpp alone, where harness\.server engine="):
        compose("sweep", words)


# ---- names ---------------------------------------------------------------------------------------


def test_a_file_of_a_repository_is_found_in_the_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama"))
    with pytest.raises(UserError, match=r"ORG/REPO:Q4_K_M: not in the cache of the hub or of llam"):
        as_hydra_takes("server", ["model=ORG/REPO:Q4_K_M"])
    snapshot = tmp_path / "hub" / "models--ORG--REPO" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for name in ("m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-Q4_K_M.gguf", "m-IQ4_K_M.gguf"):
        (snapshot / name).touch()
    words = as_hydra_takes("server", ["model=ORG/REPO:q4_k_m"])
    assert words == ["model=hf", f"model.id={snapshot / 'm-Q4_K_M.gguf'}"]
    for name in ("UD-Q8_0.gguf", "m-Q8_0_4_4.gguf", "x-00001-of-00000.gguf"):
        (snapshot / name).touch()
    several = "ORG/REPO:Q8_0: several files of that name are cached, UD-Q8_0.gguf, m-Q8_0.gguf;"
    with pytest.raises(UserError, match=several):
        as_hydra_takes("server", ["model=ORG/REPO:Q8_0"])
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "ORG_REPO_m-Q2_K-00001-of-00002.gguf").touch()
    (tmp_path / "llama" / "ORG_REPO_m-Q2_K-00002-of-00002.gguf").touch()
    words = as_hydra_takes("server", ["draft=ORG/REPO:Q2_K"])
    assert words[1].endswith("m-Q2_K-00001-of-00002.gguf")
    assert len(parts_of(Path(words[1]))) == 2
