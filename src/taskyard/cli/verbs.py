"""The table of verbs: name, where its command lives, and its line in the help.

To add one, write a click command in a module of its own and name it here as `module:attribute`.
The line of help is here as well, so that listing the verbs imports none of them. They stand in the
order in which a newcomer meets them.
"""

from taskyard.cli.lazy import Verb

VERBS: dict[str, Verb] = {
    "demo": Verb(
        "taskyard.cli.demo:demo",
        "Show everything once: a campaign, a broker that is killed, and what is left of it.",
    ),
    "run": Verb("taskyard.cli.run:run", "Run a campaign's file from beginning to end."),
    "map": Verb(
        "taskyard.cli.mapping:map_rows", "Run a command for every line of a file, or of stdin."
    ),
    "up": Verb("taskyard.cli.up:up", "Run a broker and workers until they are stopped."),
    "down": Verb(
        "taskyard.cli.up:down",
        "Stop what runs on a state directory, when running tasks are done.",
    ),
    "submit": Verb("taskyard.cli.submit:submit", "Submit one task, and print its name."),
    "bundle": Verb(
        "taskyard.cli.bundle:bundle",
        "Submit one payload for many recipients, and print the bundle's name.",
    ),
    "load": Verb("taskyard.cli.load:load", "Load a graph of tasks from a file."),
    "wait": Verb(
        "taskyard.cli.waiting:wait",
        "Wait until tasks are settled: some by name, a campaign, or all that there are.",
    ),
    "watch": Verb("taskyard.cli.watch:watch", "Show what happens, as it happens."),
    "list": Verb(
        "taskyard.cli.looking:list_tasks", "List tasks, in the order of their submission."
    ),
    "show": Verb("taskyard.cli.looking:show", "Show all that is known of a task."),
    "result": Verb("taskyard.cli.looking:result", "Print the result of a task, byte for byte."),
    "log": Verb("taskyard.cli.looking:log", "Print the end of what a task printed."),
    "why": Verb("taskyard.cli.looking:why", "Say why a task is where it is, in a sentence."),
    "status": Verb("taskyard.cli.looking:status", "Say how many tasks there are in each state."),
    "workers": Verb("taskyard.cli.looking:workers", "List the workers."),
    "services": Verb(
        "taskyard.cli.services:services", "List the services, with what waits and who works."
    ),
    "lanes": Verb("taskyard.cli.lanes:lanes", "List the lanes, with what waits in them and why."),
    "retry": Verb("taskyard.cli.acting:retry", "Try failed tasks again, and delayed ones now."),
    "cancel": Verb("taskyard.cli.acting:cancel", "Cancel tasks, and all that wait for them."),
    "move": Verb("taskyard.cli.acting:move", "Put tasks into another lane, or another service."),
    "expire": Verb("taskyard.cli.acting:expire", "Give up tasks, as if they were too old."),
    "pause": Verb(
        "taskyard.cli.pausing:pause", "Give workers nothing more of a service, a lane, or at all."
    ),
    "resume": Verb("taskyard.cli.pausing:resume", "Undo a pause."),
    "drain": Verb("taskyard.cli.acting:drain", "Give workers no more tasks, and send them home."),
    "broker": Verb("taskyard.cli.broker:broker", "Run a broker in the foreground."),
    "worker": Verb("taskyard.cli.worker:worker", "Do the tasks of a broker, in the foreground."),
    "relay": Verb(
        "taskyard.cli.relay:relay", "Hand messages on between WMP workers and their managers."
    ),
    "rr": Verb(
        "taskyard.cli.rr:rr",
        "Run a round-robin server, its workers and its clients, each with a prompt.",
    ),
    "config": Verb(
        "taskyard.cli.config:config", "Show every setting, its value and where that came from."
    ),
    "keys": Verb(
        "taskyard.cli.keys:keys", "Make keys for guests of a broker, list and revoke them."
    ),
    "journal": Verb(
        "taskyard.cli.journal:journal", "Care for a state directory: check, export, compact."
    ),
    "pipeline": Verb(
        "taskyard.cli.pipeline:pipeline",
        "Run bulk data work on Spark: campaigns in, history to tables, reports, planning, fleets.",
    ),
    "completion": Verb(
        "taskyard.cli.completion:completion", "Print what lets a shell complete what is typed."
    ),
    "bench": Verb(
        "taskyard.bench.cli:main", "Measure Taskyard, side by side with what it should reach."
    ),
}
