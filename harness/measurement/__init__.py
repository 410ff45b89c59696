"""The only rooms with a clock: step latencies, timed generations, and what machine this is."""
