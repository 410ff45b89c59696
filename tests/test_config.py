"""Configuration: what conf/ composes to, and what is refused before anything is loaded."""

from copy import deepcopy
from dataclasses import asdict
from functools import reduce
from typing import Any

import compositions
import pytest
from hydra.errors import HydraException

from harness.cli import compose, draft_conf, draft_confs
from harness.config import (
    CONF_DIR,
    SCHEMAS,
    DraftConf,
    DraftsEntry,
    SweepConfig,
    checked,
    register,
)
from harness.records import UserError

REQUIRED = {
    "breakeven": ["draft_ms=22.09", "target_ms=29.92"],
    "plan": ["run=results/a_server_run", "rate=20", "tpot_ms=30"],
}
MODELS = sorted(path.stem for path in (CONF_DIR / "model").glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (CONF_DIR / "experiment").glob("*.yaml"))
NAN, INFINITY = float("nan"), float("inf")
PAIR = ["model=qwen3_4b", "draft=qwen3_0_6b"]
DUMMY = ["model.weights=dummy", "draft.weights=dummy"]

# As published: layers, hidden, heads, kv heads, ffn, tied embeddings
QWEN3 = {
    "qwen3_0_6b": (28, 1024, 16, 8, 3072, True),
    "qwen3_1_7b": (28, 2048, 16, 8, 6144, True),
    "qwen3_4b": (36, 2560, 32, 8, 9728, True),
    "qwen3_8b": (36, 4096, 32, 8, 12288, False),
    "qwen3_14b": (40, 5120, 40, 8, 17408, False),
    "qwen3_32b": (64, 5120, 64, 8, 25600, False),
    "qwen3_30b_a3b": (48, 2048, 32, 4, 768, False),
}


@pytest.fixture(scope="module")
def composed() -> SweepConfig:
    return compose("sweep")


@pytest.fixture
def shipped(composed: SweepConfig) -> SweepConfig:
    """The sweep as shipped, to be spoilt in one place; composing anew each time takes longer."""
    return deepcopy(composed)


@pytest.mark.parametrize("command", SCHEMAS)
def test_every_command_composes_to_its_schema_and_is_valid_as_shipped(command: str) -> None:
    config = compose(command, REQUIRED.get(command, []))
    assert type(config) is SCHEMAS[command]
    assert (config.results_root, config.seed, config.debug) == ("results", 0, False)


def test_sweep_defaults_are_the_embedded_pair_on_both_sets(composed: SweepConfig) -> None:
    assert (composed.model.id, composed.draft.id) == ("embedded:tiny", "embedded:tiny_good")
    assert (composed.k, composed.temperature) == ([1, 2, 4, 8], [0.0, 1.0])
    assert (composed.prompts.sets, composed.new_tokens) == (["easy", "hard"], 48)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("sweep", ["k=[1]", "new_tokens=4"]),
        ("sweep", [*PAIR, "k=[1,2,4]", "temperature=[0,1]", "model.dtype=bfloat16"]),
        ("sweep", ["draft=hf", "draft.id=a/b", "+model.x=1"]),
        ("sweep", ["experiment=founding_post", "k=[1]"]),
        ("sweep", ["gpu=a10g", "gpu.name=x"]),
        ("sweep", ["prompts.weights={easy:1}", "prompts.files=['a b.jsonl']"]),
        ("sweep", ["hydra.job.name=x"]),
        ("sweep", ["++new=1"]),
        ("audition", ["drafts=[tiny_good,ngram@x]", "prompts={sets:[easy]}"]),
        ("breakeven", ["draft_ms=1", "target_ms=${draft_ms}"]),
        # And errors
        ("sweep", ["nokey=1"]),
        ("sweep", ["k=abc"]),
        ("sweep", ["k=1,2"]),
        ("sweep", ["k=${x"]),
        ("sweep", ["model=nope"]),
        ("sweep", ["model.nope=1"]),
        ("profile", ["~draft"]),
    ],
)
def test_the_compositions_of_the_tests_are_hydras(command: str, words: list[str]) -> None:
    def result(composed: Any) -> Any:
        try:
            config = composed(command, tuple(words))
        except HydraException as error:
            return type(error), str(error), type(error.__cause__), str(error.__cause__)
        return config, config._metadata.flags

    register(command)
    assert result(compositions.composed) == result(compositions.by_hydra)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_a_draft_too_with_the_same_settings(name: str) -> None:
    ids = ["model.id=some/folder", "draft.id=some/folder"] if name == "hf" else []
    config = compose("sweep", [f"model={name}", f"draft={name}", *ids])
    assert asdict(config.model) == asdict(config.draft)
    assert config.model.trust_remote_code is False
    if name in QWEN3:
        shape = config.model.architecture
        keys = ("layers", "hidden", "heads", "kv_heads", "ffn", "tied_embeddings")
        assert tuple(shape[key] for key in keys) == QWEN3[name]
        assert (shape["head_dim"], shape["vocab"]) == (128, 151936)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_keep_the_pair_that_was_asked_for(name: str) -> None:
    config = compose("sweep", [f"experiment={name}", *PAIR])
    assert (config.model.name, config.draft.name) == ("qwen3_4b", "qwen3_0_6b")
    assert config.new_tokens == 128


@pytest.mark.parametrize(
    ("command", "overrides", "key", "value"),
    [
        ("sweep", ["experiment=temperature_demo", "k=[2]"], "k", [2]),
        ("sweep", ["experiment=temperature_demo", "k=[2]"], "temperature", [0, 0.3, 0.7, 1, 1.5]),
        ("sweep", ["model=qwen3_30b_a3b", *PAIR[1:]], "model.architecture.experts_per_token", 8),
        ("snapshot", PAIR, "model.dtype", "float32"),
        ("snapshot", [*PAIR, "model.dtype=bfloat16"], "model.dtype", "bfloat16"),
        ("snapshot", ["model=tiny", "draft=bf16"], "draft.dtype", "bfloat16"),
        ("sweep", ["model=hf", "model.id=Qwen/Qwen3-4B"], "model.name", "Qwen3-4B"),
        ("sweep", ["model=Qwen/Qwen3-4B"], "model.id", "Qwen/Qwen3-4B"),
        ("sweep", ["model=Qwen/Qwen3-4B", "model.name=q"], "model.name", "q"),
        ("sweep", ["draft=./my drafts/a"], "draft.id", "./my drafts/a"),
        ("audition", ["draft=org/mine"], "drafts", ["mine"]),
        ("sweep", ["model=hf", "model.id=a/b", "model.name=mine"], "model.name", "mine"),
        ("sweep", ["prompts.weights={easy:0.7,hard:0.3}"], "prompts.weights.hard", 0.3),
        ("sweep", ["k=[0,2]"], "k", [0, 2]),
        ("sweep", ["k=4"], "k", [4]),
        ("sweep", ["temperature=1"], "temperature", [1.0]),
        ("profile", ["contexts=16"], "contexts", [16]),
        ("profile", ["contexts=auto"], "contexts", "auto"),
        ("sweep", ["decode.stop_strings=END"], "decode.stop_strings", ["END"]),
        ("sweep", ["decode.stop_strings=null"], "decode.stop_strings", None),
        ("sweep", ["prompts.files='a, b.jsonl'"], "prompts.files", ["a, b.jsonl"]),
        (
            "sweep",
            ["prompts.files=/a folder/my prompts.jsonl"],
            "prompts.files",
            ["/a folder/my prompts.jsonl"],
        ),
        ("sweep", ["prompts.files=mine.jsonl"], "prompts.sets", []),
        ("sweep", ["prompts.hub=org/name"], "prompts.sets", []),
        ("sweep", ["prompts.files=mine.jsonl", "prompts.sets=easy"], "prompts.sets", ["easy"]),
        ("report", ["runs=results/a"], "runs", ["results/a"]),
        ("sweep", ["new_tokens=null"], "new_tokens", 48),
        ("sweep", PAIR, "new_tokens", 256),
        ("sweep", [*PAIR, "new_tokens=48"], "new_tokens", 48),
        ("sweep", [*PAIR, *DUMMY], "new_tokens", 48),
        ("audition", PAIR[:1], "new_tokens", 256),
        ("profile", PAIR, "new_tokens", 128),
        ("snapshot", PAIR, "new_tokens", 64),
        (
            "audition",
            [],
            "drafts",
            ["tiny_good", "tiny_small", "tiny_eagle3", "tiny_unrelated", "ngram"],
        ),
        ("audition", ["drafts=ngram"], "drafts", ["ngram"]),
        ("audition", ["draft=tiny_small"], "drafts", ["tiny_small"]),
        ("audition", ["draft=hf", "draft.id=org/mine"], "drafts", ["mine"]),
        ("audition", ["draft.id=org/mine", "draft.name=x"], "drafts", ["x"]),
        ("sweep", ["model.id=org/mine"], "model.name", "mine"),
        ("sweep", ["draft.id=org/mine"], "draft.name", "mine"),
        ("sweep", ["model=qwen3_4b", "model.id=org/mine"], "model.name", "qwen3_4b"),
        *(("sweep", [f"device={name}"], "device.name", name) for name in ("auto", "cpu", "mps")),
        ("sweep", ["device.name=cuda:1"], "device.name", "cuda:1"),
        (
            "audition",
            ["latency.target_ms=10", "latency.draft_ms=1", "latency.verify_ms=[10,11]"],
            "latency.verify_ms",
            [10, 11],
        ),
    ],
)
def test_what_overrides_make_of_a_key(
    command: str, overrides: list[str], key: str, value: object
) -> None:
    def part(owner: object, name: str) -> object:
        return owner[name] if isinstance(owner, dict) else getattr(owner, name)

    assert reduce(part, key.split("."), compose(command, overrides)) == value


def test_errors_about_an_auditioned_draft_name_what_can_be_typed() -> None:
    entry, draft = DraftsEntry(name="four", id="/a b/c"), DraftConf(name="four", id="/a b/c")
    assert (entry.where, draft.where) == ("drafts=[four@/a b/c]", "draft.id=/a b/c")
    assert (entry.shown, draft.shown) == ("drafts=[four]", "draft=four")
    keys = entry.keys.of("quantization", "int8"), draft.keys.of("quantization", "int8")
    assert keys == ("drafts=[four@quantization:int8]", "draft.quantization=int8")
    assert entry.keys.of("dtype") == "drafts=[four@dtype:...]"


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("four@org/four@dtype:int3", r"^drafts=\[four@dtype:\.\.\.\]: 'int3' is unknown"),
        ("eagle3", r"^drafts=\[eagle3\]: whose\? give drafts=\[eagle3@folder-or-hub-id\]"),
    ],
)
def test_an_entry_of_drafts_is_refused_by_what_was_typed(entry: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        draft_conf(entry)


def test_an_auditions_draft_is_that_of_the_group_wherever_drafts_names_it() -> None:
    keys = ["draft.id=some/folder", "draft.dtype=float16"]
    for drafts in ("drafts=[ngram,hf]", "drafts=[ngram,folder]"):
        ngram, mine = draft_confs(compose("audition", [*keys, drafts]))
        assert ngram.id == "ngram"
        assert (mine.name, mine.id, mine.dtype) == ("folder", "some/folder", "float16")
    with pytest.raises(UserError, match=r"drafts=\[hf\]: whose\? give drafts=\[hf@"):
        draft_confs(compose("audition", ["drafts=hf"]))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("k", [-1], "k: -1"),
        ("k", [2.5], "k: 2.5"),
        ("k", [True], "k: True"),
        ("k", [], "k=[]"),
        ("k", [0], "k=[0]"),
        ("k", [2, 2], "k: 2 is given twice"),
        ("temperature", [-0.1], "temperature: -0.1"),
        ("temperature", [NAN], "temperature: nan"),
        ("temperature", [1.0, INFINITY], "temperature: inf"),
        ("temperature", [], "temperature=[]"),
        ("temperature", [1.0, 1.0], "temperature: 1.0 is given twice"),
        ("new_tokens", 0, "new_tokens: 0"),
        ("repetitions", 0, "repetitions: 0"),
        ("threads", 0, "threads: 0"),
        ("threads", "many", "threads: 'many'"),
        ("threads", True, "threads: True"),
        ("threads", 1.5, "threads: 1.5"),
        ("seed", -1, "seed: -1"),
        ("seed", 2**63, "seed: "),
        ("mode", "guess", "mode: 'guess' is unknown"),
        ("backend", "graphs", "backend: 'graphs' is unknown; use one of auto, eager, cuda_graphs"),
        ("device.name", "gpu", "device.name: 'gpu'"),
        ("device.name", "cuda:", "device.name: 'cuda:'"),
        ("model.device", "tpu", "model.device: 'tpu'"),
        ("model.dtype", "float8", "model.dtype: 'float8'"),
        ("model.id", "", "model.id: empty"),
        ("draft.weights", "zero", "draft.weights: 'zero' is unknown"),
        ("draft.weights", "dummy", "draft.weights=dummy: draft=tiny_good has no architecture"),
        ("draft.attention", "fast", "draft.attention: 'fast'"),
        ("decode.rule", "lucky", "decode.rule: 'lucky'"),
        ("decode.top_k", 0, "decode.top_k: 0"),
        ("decode.top_p", 0.0, "decode.top_p: 0"),
        ("decode.top_p", 1.01, "decode.top_p: 1.01"),
        ("decode.top_p", NAN, "decode.top_p: nan"),
        ("decode.acceptance", 1.7, "decode.acceptance: 1.7 is not a rate"),
        ("prompts.limit", 0, "prompts.limit: 0"),
        ("prompts.sets", [], "prompts.sets=[] and prompts.files=[]"),
        ("prompts.sets", ["easy", "easy"], "prompts.sets: easy is given twice"),
        ("prompts.chat_template", "maybe", "prompts.chat_template: 'maybe'"),
        ("prompts.weights", {"easy": -1.0}, "prompts.weights.easy: -1"),
        ("prompts.weights", {"easy": NAN}, "prompts.weights.easy: nan"),
        ("prompts.weights", {"easy": "much"}, "prompts.weights.easy: 'much'"),
        ("prompts.weights", {"easy": 0.0}, "prompts.weights: all are 0"),
        ("prompts.weights", {}, "prompts.weights={}"),
        ("prompts.weights", 0.5, "prompts.weights=0.5"),
    ],
)
def test_values_that_make_no_sense_are_refused_in_one_line_with_their_key(
    key: str, value: object, says: str, shipped: SweepConfig
) -> None:
    *owners, field = key.split(".")
    shipped.until = None
    setattr(reduce(getattr, owners, shipped), field, value)
    with pytest.raises(UserError) as refused:
        checked(shipped)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
