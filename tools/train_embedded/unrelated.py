"""Unrelated text: the log of a made-up server. It does not help to guess an answer or a story."""

import random

from tools.train_embedded.tasks import Task, Values

SERVICES = ("auth", "cache", "mailer", "queue", "proxy", "billing", "search", "scheduler")
HOSTS = ("node-a1", "node-b2", "node-c3", "node-d4")
LEVELS = ("INFO", "INFO", "INFO", "DEBUG", "WARN", "ERROR")
EVENTS = {
    "INFO": ("connection opened", "request served status=200", "job finished", "heartbeat ok"),
    "DEBUG": ("cache miss key={key}", "retry scheduled id={key}", "payload bytes={key}"),
    "WARN": ("slow query ms={key}", "disk usage above limit pct={key}", "token expires soon"),
    "ERROR": (
        "timeout upstream id={key}",
        "connection reset by peer",
        "checksum mismatch id={key}",
    ),
}


def _log(values: Values, rng: random.Random) -> str:
    second = rng.randrange(40)
    lines = []
    for _ in range(rng.randint(4, 7)):
        second = min(59, second + rng.randint(0, 3))
        level = rng.choice(LEVELS)
        event = rng.choice(EVENTS[level]).format(key=rng.randint(100, 999))
        lines.append(f"07:{second:02d} {level} {values['service']}@{values['host']} :: {event}")
    return "\n".join(lines)


UNRELATED_TASKS = (
    Task(
        "log",
        ("$ tail -f /var/log/{service}.log --host={host}",),
        {"service": SERVICES, "host": HOSTS},
        _log,
    ),
)
