"""The table of verbs: name, where its command lives, and its line in the help.

To add one, write a click command in a module of its own and name it here as `module:attribute`.
The line of help is here as well, so that listing the verbs imports none of them.
"""

from taskyard.cli.lazy import Verb

VERBS: dict[str, Verb] = {
    "bench": Verb(
        "taskyard.bench.cli:main", "Measure Taskyard, side by side with what it should reach."
    ),
    "journal": Verb(
        "taskyard.cli.journal:journal", "Care for a state directory: check, export, compact."
    ),
}
