"""One pair on the engine that will serve it: K x temperature x prompt sets, and a verdict.

    python -m harness.server                                     the embedded pair on llama.cpp
    python -m harness.server engine=llamacpp model.gguf=TARGET.gguf draft.gguf=DRAFT.gguf \
        model=hf model.id=ORG/TARGET draft=hf draft.id=ORG/DRAFT  your files; ids for replay
    python -m harness.server engine=vllm k=[4] url=[http://HOST:8000,http://HOST:8001]

Servers at every K, started here or running already, are asked in turn for the same prompts. What a
round costs comes from the engine itself, how many rounds a text takes from replay of what it
returned; the report holds the prediction against the measurement, and says which K to serve with.
"""

from typing import NoReturn

from harness.cli import run_app


def main() -> NoReturn:
    """Run the command and exit with its status."""
    run_app("server")


if __name__ == "__main__":
    main()
