"""What the server and the engine's process tell each other."""

from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from mars.core.output import RequestOutput
from mars.core.request import Request
from mars.method.acceptance import Dial
from mars.models.settings import Settings

# --- to the engine


@dataclass(frozen=True, slots=True)
class AddRequest:
    request_id: int
    request: Request


@dataclass(frozen=True, slots=True)
class AbortRequest:
    request_id: int


@dataclass(frozen=True, slots=True)
class SetDial:
    """Of all requests that have none of their own, from now on."""

    dial: Dial


# --- from the engine


@dataclass(frozen=True, slots=True)
class WarmingUp:
    """The model is loaded, and the engine gets ready."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class EngineReady:
    """What the server needs to know of the model that was loaded."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    end_tokens: frozenset[int]
    context: int  # tokens of a prompt and its answer together: what the model holds, and the engine's cache
    vocabulary: int
    settings: Settings | None

    @property
    def block_size(self) -> int:
        return self.settings.block_size if self.settings else 1


@dataclass(frozen=True, slots=True)
class RequestRefused:
    request_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class EngineLoad:
    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0  # share of the pages in use


@dataclass(frozen=True, slots=True)
class EngineOutputs:
    """What requests have emitted since the last message, and how busy the engine is."""

    outputs: list[RequestOutput]
    load: EngineLoad = field(default_factory=EngineLoad)


@dataclass(frozen=True, slots=True)
class EngineFailed:
    reason: str


ToEngine = AddRequest | AbortRequest | SetDial
FromEngine = WarmingUp | EngineReady | RequestRefused | EngineOutputs | EngineFailed
