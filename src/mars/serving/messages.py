"""What the server and the engine's process say to each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from mars.decoding.request import FinishReason, Likelihood, Request
from mars.method.acceptance import Dial
from mars.models.settings import Settings

# --- to the engine


@dataclass(frozen=True, slots=True)
class Ask:
    number: int
    request: Request
    follows: bool
    """Does it obey the server's dial, now and when that is turned?"""


@dataclass(frozen=True, slots=True)
class Drop:
    number: int


@dataclass(frozen=True, slots=True)
class Turn:
    """The server's dial from now on."""

    dial: Dial


# --- from the engine


@dataclass(frozen=True, slots=True)
class WarmingUp:
    """It has loaded its model and gets ready."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ready:
    """What the server needs to know of the model that was loaded."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    end_tokens: frozenset[int]
    context: int
    """Tokens of a prompt and its answer together: what the model holds, and the engine's cache"""
    vocabulary: int
    settings: Settings | None

    @property
    def block_size(self) -> int:
        return self.settings.block_size if self.settings else 1

    @property
    def dial(self) -> Dial:
        """The model's own"""
        return Dial.parse(self.settings.dial if self.settings else "one-token")


@dataclass(frozen=True, slots=True)
class Refused:
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Written:
    """What came out of a request since it was last heard of."""

    number: int
    steps: list[list[int]]
    """The tokens of each forward"""
    checked: int
    agreed: int
    """Both of the whole answer so far"""
    finish_reason: FinishReason | None
    likelihoods: list[Likelihood] = field(default_factory=list)
    """Of the tokens, if they were asked for"""


@dataclass(frozen=True, slots=True)
class Gauges:
    running: int = 0
    waiting: int = 0
    pages_used: float = 0.0
    """Share of the cache"""


@dataclass(frozen=True, slots=True)
class News:
    """After a step."""

    written: list[Written]
    gauges: Gauges = field(default_factory=Gauges)


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine cannot go on."""

    reason: str


FromServer = Ask | Drop | Turn
FromEngine = WarmingUp | Ready | Refused | News | Failed
