"""Failed requests to servers: stored, so that cells say so, and said at a run's end."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from harness import formatting as fmt
from harness.commands.server_requests import Task, Workload
from harness.commands.tasks import PLAIN, Role, varying_roles
from harness.records import Measurement, NotMeasured, UserError, in_one_line
from harness.storage import RunFolder

_log = logging.getLogger(__name__)
# How what a server did not answer is noted: tasks that are no trials, by their file, and loads
NOTES: Mapping[str, Measurement] = {
    "rounds": "server_rounds",
    "starts": "server_starts",
    "probes": "server_rounds",
}
LOADS: Measurement = "server_loads"


class Failures:
    """Failed requests to servers, and servers that are asked no more."""

    def __init__(self, folder: RunFolder, work: Workload) -> None:
        self._folder = folder
        self.dead: set[Role] = set()
        self._first: dict[Role, str] = {}
        self._number: Counter[Role] = Counter()
        roles = [Role(k, rejects) for k in work.ks for rejects in (False, True)]
        roles += varying_roles(work.config)
        retried = [_missing(role, what) for role in roles for what in (*NOTES.values(), LOADS)]
        folder.note_not_measured(retried=retried)

    def of_task(self, task: Task, error: UserError) -> None:
        """A request has no answer."""
        line = self._count(task.role, error)
        if task.file == "trials":
            self._folder.trials.append(task.request.as_trial(status="failed", error=line))
        else:
            self._folder.note_not_measured(_missing(task.role, NOTES[task.file], line))

    def of_server(self, role: Role, error: UserError, left: Sequence[Task]) -> None:
        """A server is asked no more: what is lost with it is marked as failed.

        Its own tasks are, and all with the one that decodes plainly, for they are not compared with
        anything any more: of each K the trials of one visit, and notes.
        """
        line = self._count(role, error)
        lost = [
            task
            for task in left
            if task.role == role or (role == PLAIN and task.role not in self.dead)
        ]
        self.dead.add(role)
        visits: dict[Role, int] = {}
        for task in lost:
            if task.file == "trials" and task.visit == visits.setdefault(task.role, task.visit):
                self._folder.trials.append(task.request.as_trial(status="failed", error=line))
        notes = (_missing(task.role, NOTES[task.file], line) for task in lost if task.file in NOTES)
        self._folder.note_not_measured(*dict.fromkeys(notes))

    def of_load(self, role: Role, error: UserError) -> None:
        """A server did not answer under load."""
        self._folder.note_not_measured(_missing(role, LOADS, self._count(role, error)))

    def say(self) -> None:
        """One line on standard error, where anything failed."""
        if not self._first:
            return
        roles = "; ".join(
            f"{role}: {fmt.number_of(self._number[role], 'time', 'times')}, first: {line}"
            for role, line in self._first.items()
        )
        _log.warning(
            "servers did not answer: %s; what was measured is stored, resume=%s asks for the rest",
            roles,
            self._folder.path,
        )

    def _count(self, role: Role, error: UserError) -> str:
        line = in_one_line(error)
        self._number[role] += 1
        self._first.setdefault(role, line)
        return line


def _missing(role: Role, what: Measurement, error: str = "") -> NotMeasured:
    return NotMeasured(what, error, k=role.k, rejects=role.rejects, varying=role.varying)
