"""Adapters that run a pair on the engine that will serve it, behind one protocol.

1. `protocol.py`: an `Engine` opens a `Server` that decodes plainly or with K draft tokens; a server
   turns token ids into a `Completion`: the returned ids, the engine's counters and its clocks.
2. `own.py`: our loop behind that protocol. `llamacpp.py`, `vllm.py`, `sglang.py`: their HTTP
   servers, each in one module: started here or running somewhere, asked, and their answers parsed.
   `openai.py`: any other endpoint that completes texts, mlx-lm's among them; it is timed, and
   counts nothing.
3. `http_server.py`: what these servers share. `process.py` and `supervisor.py`: a server process
   that listens on this machine only and ends with the run, however the run ends. `client.py`:
   requests to it, and what goes wrong with them. `waiting.py`: what is being waited for.
4. `adapters.py`: how the command `server` starts an engine or attaches to one. The table of engines
   is `harness.serving.engines`: to add one, begin there.
5. `stored_answers.py`: answers that a server stored elsewhere, by the same parsers.
6. `xllamacpp_server.py`: `llama-server` for those who have the Python wheel and no binary.

What an engine cannot tell is None here, never a guess.
"""
