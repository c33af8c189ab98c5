"""The table of verbs: name, where its command lives, and its line in the help.

To add one, write a click command in a module of its own and name it here as `module:attribute`.
The line of help is here as well, so that listing the verbs imports none of them. They stand in the
order in which a newcomer meets them.
"""

from taskyard.cli.commands import LazyCommand

COMMANDS: dict[str, LazyCommand] = {
    "demo": LazyCommand(
        "taskyard.cli.demo:demo",
        "Show everything once: a campaign, a broker that is killed, and what is left of it.",
    ),
    "run": LazyCommand("taskyard.cli.run:run", "Run a campaign's file from beginning to end."),
    "map": LazyCommand(
        "taskyard.cli.map:map_rows", "Run a command for every line of a file, or of stdin."
    ),
    "up": LazyCommand("taskyard.cli.up:up", "Run a broker and workers until they are stopped."),
    "down": LazyCommand(
        "taskyard.cli.up:down",
        "Stop what runs on a state directory, when running tasks are done.",
    ),
    "submit": LazyCommand("taskyard.cli.submit:submit", "Submit one task, and print its name."),
    "bundle": LazyCommand(
        "taskyard.cli.bundle:bundle",
        "Submit one payload for many recipients, and print the bundle's name.",
    ),
    "load": LazyCommand("taskyard.cli.load:load", "Load a graph of tasks from a file."),
    "wait": LazyCommand(
        "taskyard.cli.wait:wait",
        "Wait until tasks are settled: some by name, a campaign, or all that there are.",
    ),
    "watch": LazyCommand("taskyard.cli.watch:watch", "Show what happens, as it happens."),
    "list": LazyCommand(
        "taskyard.cli.inspect:list_tasks", "List tasks, in the order of their submission."
    ),
    "show": LazyCommand("taskyard.cli.inspect:show", "Show all that is known of a task."),
    "result": LazyCommand(
        "taskyard.cli.inspect:result", "Print the result of a task, byte for byte."
    ),
    "log": LazyCommand("taskyard.cli.inspect:log", "Print the end of what a task printed."),
    "why": LazyCommand("taskyard.cli.inspect:why", "Say why a task is where it is, in a sentence."),
    "status": LazyCommand(
        "taskyard.cli.inspect:status", "Say how many tasks there are in each state."
    ),
    "workers": LazyCommand("taskyard.cli.inspect:workers", "List the workers."),
    "services": LazyCommand(
        "taskyard.cli.services:services", "List the services, with what waits and who works."
    ),
    "lanes": LazyCommand(
        "taskyard.cli.lanes:lanes", "List the lanes, with what waits in them and why."
    ),
    "retry": LazyCommand(
        "taskyard.cli.control:retry", "Try failed tasks again, and delayed ones now."
    ),
    "cancel": LazyCommand(
        "taskyard.cli.control:cancel", "Cancel tasks, and all that wait for them."
    ),
    "move": LazyCommand(
        "taskyard.cli.control:move", "Put tasks into another lane, or another service."
    ),
    "expire": LazyCommand("taskyard.cli.control:expire", "Give up tasks, as if they were too old."),
    "pause": LazyCommand(
        "taskyard.cli.control:pause", "Give workers nothing more of a service, a lane, or at all."
    ),
    "resume": LazyCommand("taskyard.cli.control:resume", "Undo a pause."),
    "drain": LazyCommand(
        "taskyard.cli.control:drain", "Give workers no more tasks, and send them home."
    ),
    "broker": LazyCommand("taskyard.cli.broker:broker", "Run a broker in the foreground."),
    "worker": LazyCommand(
        "taskyard.cli.worker:worker", "Do the tasks of a broker, in the foreground."
    ),
    "relay": LazyCommand(
        "taskyard.cli.relay:relay", "Hand messages on between WMP workers and their managers."
    ),
    "rr": LazyCommand(
        "taskyard.cli.round_robin:rr",
        "Run a round-robin server, its workers and its clients, each with a prompt.",
    ),
    "config": LazyCommand(
        "taskyard.cli.config:config", "Show every setting, its value and where that came from."
    ),
    "keys": LazyCommand(
        "taskyard.cli.keys:keys", "Make keys for guests of a broker, list and revoke them."
    ),
    "journal": LazyCommand(
        "taskyard.cli.journal:journal", "Care for a state directory: check, export, compact."
    ),
    "pipeline": LazyCommand(
        "taskyard.cli.pipeline.group:pipeline",
        "Run bulk data work on Spark: campaigns in, history to tables, reports, planning, fleets.",
    ),
    "completion": LazyCommand(
        "taskyard.cli.completion:completion", "Print what lets a shell complete what is typed."
    ),
    "bench": LazyCommand(
        "taskyard.bench.cli:main", "Measure Taskyard, side by side with what it should reach."
    ),
}
