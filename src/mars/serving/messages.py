"""What the server and the engine's process tell each other."""

from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from mars.core.output import RequestOutput
from mars.core.request import Request
from mars.errors import MarsError
from mars.method.acceptance import Dial
from mars.models.settings import Settings

# --- to the engine


@dataclass(frozen=True, slots=True)
class AddRequests:
    """The choices of one prompt, by id. In one message, so that what they share is sent once."""

    requests: dict[int, Request]


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Answered by `RequestClosed` in any case."""

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
    is_batch_invariant: bool  # the engine's; see there

    @property
    def block_size(self) -> int:
        return self.settings.block_size if self.settings else 1


@dataclass(frozen=True, slots=True)
class RequestRefused:
    request_id: int
    error: MarsError


@dataclass(frozen=True, slots=True)
class RequestClosed:
    """The engine has nothing of an aborted request any more."""

    request_id: int


@dataclass(frozen=True, slots=True)
class EngineLoad:
    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0  # share of the pages in use


@dataclass(frozen=True, slots=True)
class EngineOutputs:
    """What requests have emitted since the last message, or that they failed, and how busy the engine is."""

    outputs: list[RequestOutput]
    load: EngineLoad = field(default_factory=EngineLoad)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent every second by a thread of its own."""

    step_seconds: float  # how long the step that is running has taken so far


@dataclass(frozen=True, slots=True)
class EngineFailed:
    reason: str


ToEngine = AddRequests | AbortRequest | SetDial
FromEngine = WarmingUp | EngineReady | RequestRefused | RequestClosed | EngineOutputs | Heartbeat | EngineFailed
