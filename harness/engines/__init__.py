"""Adapters that run a pair on the engine that will serve it, behind one protocol.

1. `protocol.py`: an `Engine` opens a `Server` for plain decoding or for K draft tokens; a server
   turns token ids into a `Completion`: the returned ids, the engine's counters and its clocks.
2. `own.py`: the harness's loop behind that protocol. `llamacpp.py`, `vllm.py`, `sglang.py`: the
   HTTP server of each engine, started here or already running, its requests and its answers.
   `openai.py`: any other endpoint that completes texts, such as mlx-lm's; it is only timed.
3. `http_server.py`: the common part of these servers. `process.py` and `supervisor.py`: a server
   process that listens on this machine only and ends with the run, however the run ends.
   `client.py`: HTTP requests and their failures. `waiting.py`: the list of pending waits.
4. `adapters.py`: how the command `server` starts an engine or attaches to one. The table of engines
   is `harness.serving.engines`: to add one, begin there.
5. `stored_answers.py`: answers that a server stored elsewhere, read by the same parsers.
6. `xllamacpp_server.py`: `llama-server` from the Python wheel, for machines without the binary.

A value that an engine does not report is None, never a guess.
"""
