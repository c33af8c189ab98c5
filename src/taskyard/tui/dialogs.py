"""Windows over the screens: the confirmation of an action, and the help."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from taskyard.errors import UserError
from taskyard.tui import actions

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual.app import ComposeResult
    from textual.binding import BindingType

    from taskyard.tui.actions import Choice


class Confirmation(ModalScreen[tuple[int, int] | None]):
    """Asks which of some choices to carry out. Returns its number and the priority, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "leave", "Back")]

    def __init__(self, title: str, choices: list[Choice], priority: int | None = None) -> None:
        super().__init__()
        self._title, self._choices, self._priority = title, choices, priority

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog"):
            yield Static(Text(self._title, "bold"))
            if self._priority is not None:
                yield Input(str(self._priority), id="priority", compact=True)
            yield OptionList(
                *(Option(Text(one.label), disabled=one.act is None) for one in self._choices),
                id="choices",
                markup=False,
            )
            yield Static(Text("Enter: do it   Esc: back", "dim"), id="keys")

    def on_mount(self) -> None:
        choices = self.query_one("#choices", OptionList)
        is_small = self._choices[0].is_small
        choices.highlighted = 0 if is_small else None
        if not is_small:
            self.query_one("#keys", Static).update(Text("↓ Enter: do it   Esc: back", "dim"))
        (choices if self._priority is None else self.query_one("#priority", Input)).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Continue with the choices, which are the confirmation."""
        event.stop()
        if self._typed_priority() is not None:
            self.query_one("#choices", OptionList).focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        priority = self._typed_priority()
        if priority is not None:
            self.dismiss((event.option_index, priority))

    def _typed_priority(self) -> int | None:
        """Return the priority. If it is invalid, report it and return None."""
        if self._priority is None:
            return 0
        try:
            return actions.parsed_priority(self.query_one("#priority", Input).value)
        except UserError as error:
            self.app.notify(str(error), severity="error", markup=False)
            return None

    def action_leave(self) -> None:
        self.dismiss(None)


class Help(ModalScreen[None]):
    """The keys, and the grammar of filters."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,question_mark,q", "leave", "Back")]

    def __init__(self, keys: Iterable[tuple[str, str]]) -> None:
        super().__init__()
        self._keys = keys

    def compose(self) -> ComposeResult:
        lines = Text()
        for key, words in self._keys:
            lines.append(f"{key:<14}", "bold")
            lines.append(f"{words}\n")
        lines.append(
            "\nA filter has the options of `taskyard list`: --campaign, --service, --lane, "
            "--match, --only STATE, --failed, --sort and --reverse, also --reason and --worker. "
            "A word alone is a part of a name."
        )
        with VerticalScroll(id="dialog"):
            yield Static(lines)

    def action_leave(self) -> None:
        self.dismiss(None)
