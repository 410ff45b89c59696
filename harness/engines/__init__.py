"""Clients of engines: they start servers or attach to them, send requests and read answers.

The facts of an engine (acceptance rules, kinds of draft, serving lines) are data, in
`harness.engine_facts`: to add an engine, begin there.

1. `protocol.py`: an `Engine` opens a `Server` for plain decoding or for K draft tokens; a server
   turns token ids into a `Completion`: the returned ids, the engine's counters and its clocks.
2. `llamacpp.py`, `vllm.py`, `sglang.py`: the server of each engine, started here or already
   running: its flags, requests, answers and counters. `openai.py`: any other endpoint that
   completes texts, such as mlx-lm's; it is only timed. `own.py`: the harness's loop.
3. `http_server.py`: the common part of these servers. `http_client.py`: HTTP requests, how often
   they are repeated and how long they may take. `counters.py`: the page of a server's counters;
   `running.py` reads that of a server that serves others.
4. `process.py` and `supervisor.py`: a server process that listens on this machine only and ends
   with the run, however the run ends, and its processor time. `turns.py`: servers that share the
   time of a machine. `waiting.py`: the list of pending waits.
5. `adapters.py`: how the command `server` starts an engine or attaches to one.
6. `stored_answers.py`: answers that a server stored elsewhere, read by the same parsers.
7. `xllamacpp_server.py`: `llama-server` from the Python wheel, for machines without the binary.

A value that an engine does not report is None, never a guess.
"""
